"""The interface between the executor and what computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from sits_trt.errors import SitsError
from sits_trt.runtime.step import StepInputs

if TYPE_CHECKING:
    from torch import Tensor


class Runner(Protocol):
    """Computes steps. One thread calls it, one step at a time; it owns the KV pool of `num_tiles` tiles."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_tiles(self) -> int: ...

    def run(self, inputs: StepInputs) -> Tensor:
        """Compute one step; return float32 logits [outputs, vocab_size], which the next step may overwrite.

        It may return before the device is done with it; whatever is enqueued on the device's current stream afterwards
        comes after it. The new tokens' keys and values are in the pool then. Running the same step again must give the
        same.
        Raises RowsFailed when the failure belongs to some of the sequences; any other error ends the executor.
        """
        ...

    def close(self) -> None:
        """Free what the runner holds. Nothing is run afterwards."""
        ...


class RowsFailed(SitsError):
    """A step failed because of some of its sequences. `rows` maps rows of the batch to one sentence each."""

    def __init__(self, rows: Mapping[int, str]) -> None:
        assert rows, "a step that fails for nobody would be run again for ever"
        super().__init__("; ".join(f"row {row}: {text}" for row, text in sorted(rows.items())))
        self.rows = dict(rows)
