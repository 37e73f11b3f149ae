"""A step as the engine's input arrays."""

from __future__ import annotations

from itertools import chain

import numpy as np

from sits_trt.runtime.step import Step, StepInputs


def build_inputs(step: Step) -> StepInputs:
    """Return the arrays of a step that is not empty; rows and their order are those of its advances.

    logit_indices holds the last token of each advance that draws.
    """
    advances = step.advances
    query_starts = np.zeros(len(advances) + 1, dtype=np.int32)
    np.cumsum([len(advance.token_ids) for advance in advances], out=query_starts[1:])
    tile_table = np.zeros((len(advances), max(len(advance.tiles) for advance in advances)), dtype=np.int32)
    for row, advance in zip(tile_table, advances, strict=True):
        row[: len(advance.tiles)] = advance.tiles
    draws = np.array([advance.plan is not None for advance in advances])
    return StepInputs(
        input_ids=np.fromiter(
            chain.from_iterable(advance.token_ids for advance in advances), dtype=np.int32, count=query_starts[-1]
        ),
        tile_table=tile_table,
        context_lens=np.array([advance.context_len for advance in advances], dtype=np.int32),
        query_starts=query_starts,
        logit_indices=query_starts[1:][draws] - 1,
    )
