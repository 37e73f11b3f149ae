"""What of the CUDA runner needs no GPU: which graphs there are, and that padding changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sits_trt.models import build_decoder
from sits_trt.runtime.runners.cuda import graph_sizes, is_decode, padded_decode
from sits_trt.runtime.runners.eager import EagerRunner
from sits_trt.runtime.step import StepInputs
from sits_trt.spec import TileSpec
from tests.support.tiny import tiny_spec, tiny_tensors


@pytest.mark.parametrize("most", [1, 2, 3, 8, 24, 63, 64, 65, 96, 100, 256])
def test_every_batch_has_a_graph_that_is_not_much_larger(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for batch in range(1, most + 1):
        size = min(s for s in sizes if s >= batch)
        assert size - batch < max(8, batch)
        assert size - batch < 32


def inputs(counts: list[int], contexts: list[int], tables: list[list[int]], wanted: list[int]) -> StepInputs:
    rng = np.random.default_rng(1)
    return StepInputs(
        input_ids=rng.integers(1, 97, sum(counts), dtype=np.int32),
        tile_table=np.array(tables, dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        query_starts=np.cumsum([0, *counts], dtype=np.int32),
        logit_indices=np.array(wanted, dtype=np.int32),
    )


def test_padding_changes_no_logits_and_no_tile() -> None:
    spec = tiny_spec()
    decoder = build_decoder(spec, tiny_tensors(spec), dtype=torch.float32)
    tile = TileSpec.of(spec, 16, "float32")
    tables = [[4, 2], [1, 3], [5, 0]]
    prefill = inputs([17, 5, 30], [0, 0, 0], tables, [16, 21, 51])
    decode = inputs([1, 1, 1], [17, 5, 30], tables, [0, 1, 2])
    assert (is_decode(prefill), is_decode(decode)) == (False, True)
    plain, padded = EagerRunner(decoder, tile, 6), EagerRunner(decoder, tile, 7)
    for runner in (plain, padded):
        runner._pool.zero_()
    assert torch.equal(plain.run(prefill), padded.run(prefill))
    logits = padded.run(padded_decode(decode, 8, 4, 6))
    assert logits.shape == (8, spec.vocab_size)
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits[:3], plain.run(decode), rtol=1e-5, atol=1e-5)
    # The keys and values differ only as sums over another number of rows do.
    torch.testing.assert_close(padded._pool[:6], plain._pool, rtol=1e-5, atol=1e-5)
