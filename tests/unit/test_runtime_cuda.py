"""What of the CUDA runner needs no GPU: which graphs there are, and that padding changes nothing."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sits_trt.contract import EngineLimits
from sits_trt.models import build_decoder
from sits_trt.runtime.runners import cuda as module
from sits_trt.runtime.runners.arrays import packed, to_device, views
from sits_trt.runtime.runners.cuda import CudaRunner, graph_sizes, is_decode, padded_decode, wanted_rows
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


@pytest.mark.parametrize(("counts", "width"), [([1], 1), ([17, 5, 30], 3), ([0, 64, 1], 65), ([], 0)])
def test_arrays_arrive_whole_and_aligned(counts: list[int], width: int) -> None:
    table = np.random.default_rng(len(counts)).integers(0, 99, (len(counts), width), dtype=np.int32)
    step = inputs(counts, [7] * len(counts), table.tolist(), list(range(len(counts))))
    step = dataclasses.replace(step, tile_table=table)
    arrays = to_device(step, torch.device("cpu"))
    for field in dataclasses.fields(step):
        assert np.array_equal(arrays[field.name].numpy(), getattr(step, field.name))
        # Kernels are compiled for pointers that are multiples of 16.
        assert arrays[field.name].storage_offset() * 4 % 16 == 0
        assert arrays[field.name].is_contiguous()
        assert arrays[field.name].dtype == torch.int32


def test_another_step_of_the_same_shapes_fits_the_same_memory() -> None:
    first = inputs([1, 1], [3, 9], [[1, 2], [3, 4]], [0, 1])
    second = inputs([1, 1], [8, 2], [[5, 6], [7, 8]], [1, 0])
    memory = packed(first, torch.device("cpu"))
    arrays = views(memory, first)
    memory.copy_(packed(second, torch.device("cpu")))
    for name, array in arrays.items():
        assert np.array_equal(array.numpy(), getattr(second, name))


@pytest.mark.parametrize("indices", [[], [0], [0, 1, 2], [0, 1, 2, 3, 4], [1], [0, 2], [2, 1, 0], [0, 0]])
def test_wanted_rows_are_those_asked_for(indices: list[int]) -> None:
    logits = torch.randn(5, 7)
    rows = wanted_rows(logits, np.array(indices, dtype=np.int32))
    assert torch.equal(rows, logits[torch.tensor(indices, dtype=torch.long)])
    if indices == list(range(len(indices))):
        assert rows.data_ptr() == logits.data_ptr() or not indices


class Stream(nullcontext[None]):
    """A CUDA stream, and the context managers that take one."""

    def wait_stream(self, other: Stream) -> None: ...


class RunnerWithoutCuda(CudaRunner):
    """Replays a graph by computing again what was captured, from and to the same memory."""

    def _compute(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        self.arrays = arrays
        return super()._compute(arrays)

    def _capture(self, *args: Any) -> Any:
        captured, compute = super()._capture(*args), super()._compute
        arrays, logits = self.arrays, captured.logits
        captured.graph.replay = lambda: logits.copy_(compute(arrays))
        return captured


def test_prefill_decode_and_mixed_steps_give_the_eager_runners_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("graph_pool_handle", "Stream", "stream", "current_stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: Stream())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(module, "KernelDecoder", lambda decoder, launcher, max_tokens: decoder)
    spec = tiny_spec()
    decoder = build_decoder(spec, tiny_tensors(spec), dtype=torch.float32)
    tile, limits = TileSpec.of(spec, 16, "float32"), EngineLimits(5, 64, 64, 12)
    launcher: Any = SimpleNamespace(load_all=lambda: None)
    ours, eager = RunnerWithoutCuda(decoder, tile, 12, limits, launcher), EagerRunner(decoder, tile, 12)
    tables = [[4, 2], [1, 3], [5, 0]]
    steps = [
        inputs([17, 5, 20], [0, 0, 0], tables, [16, 41]),
        inputs([1, 1, 1], [17, 5, 20], tables, [0, 1, 2]),
        inputs([1, 4, 1], [18, 6, 21], tables, [0, 4, 5]),
        inputs([1, 1, 1], [19, 10, 22], tables, [2, 0]),
        inputs([1], [20], tables[:1], [0]),
        inputs([1, 1], [11, 23], tables[1:], [0, 1]),
    ]
    for step in steps:
        torch.testing.assert_close(ours.run(step), eager.run(step), rtol=1e-5, atol=1e-5)
