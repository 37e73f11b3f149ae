"""One engine step: what is to be advanced, the arrays that say so, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sits_trt.runtime.history import Counted
from sits_trt.runtime.sampling import SamplingPlan

IntArray = NDArray[np.int32]


class Advance(NamedTuple):
    """How far one sequence moves in one step: prefill, chunk and decode differ only in the number of tokens.

    token_ids: the tokens to compute, at positions context_len onwards. tiles: int32, the sequence's tiles, enough
    for them. plan: how the next token is drawn; None when the last of `token_ids` is not the last one known, so
    that there is nothing to draw. draw: the number of tokens of the answer so far. recent: the newest tokens of prompt
    and answer, as many as the plan's bad words reach back. counted: token counts where the plan has penalties.
    """

    key: int
    token_ids: Sequence[int]
    context_len: int
    tiles: IntArray
    plan: SamplingPlan | None
    draw: int
    recent: tuple[int, ...] = ()
    counted: Counted | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One pass through the model. `number` counts steps; a step without advances is empty and is not run."""

    number: int
    advances: tuple[Advance, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(advance.token_ids) for advance in self.advances)

    @property
    def draws(self) -> list[Advance]:
        """The advances that draw a token, in the order of the logits' rows."""
        return [advance for advance in self.advances if advance.plan is not None]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step as the engine's input arrays, all int32: names and shapes are those of contract.bindings.

    The KV pool itself belongs to the runner.
    """

    input_ids: IntArray
    tile_table: IntArray
    context_lens: IntArray
    query_starts: IntArray
    logit_indices: IntArray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, by the keys of its advances.

    tokens: one for each advance that draws, unless it is in `errors`. logprobs: where the plan asks for them.
    errors: one sentence for each sequence that the step failed for; the others are unharmed.
    """

    number: int
    tokens: Mapping[int, int]
    logprobs: Mapping[int, float] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
