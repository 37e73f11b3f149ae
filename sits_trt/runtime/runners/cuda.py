"""The decoder over a kernel bundle: decode steps as CUDA graphs, all others kernel by kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sits_plugins.launch import BundleLauncher
from torch import Tensor

from sits_trt.contract import EngineLimits
from sits_trt.kernels.decoder import KernelDecoder
from sits_trt.kernels.sampling import draw_tokens
from sits_trt.models import Decoder
from sits_trt.ops import allocate_pool
from sits_trt.runtime.runners.arrays import packed, to_device, views
from sits_trt.runtime.step import IntArray, StepInputs
from sits_trt.spec import TileSpec

WARM_UPS = 2
"""Runs before a capture: libraries choose their kernels and allocate in the first."""


def graph_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Return the batch sizes that get a graph: 1, 2, 4, then every eighth up to 64, every 32nd above, and the last."""
    wanted = (1, 2, 4, *range(8, 65, 8), *range(96, max_batch_size, 32))
    return (*(size for size in wanted if size < max_batch_size), max_batch_size)


def is_decode(inputs: StepInputs) -> bool:
    """Whether every sequence of a step advances by one token."""
    return len(inputs.input_ids) == len(inputs.context_lens)


def padded_decode(inputs: StepInputs, size: int, width: int, spare_tile: int) -> StepInputs:
    """Return a decode step with `size` sequences and a table of `width` tiles, which gives logits for every one.

    The sequences added compute token 0 at position 0, and write into `spare_tile`, which belongs to no other.
    """
    batch = len(inputs.context_lens)
    table = np.zeros((size, width), dtype=np.int32)
    table[:batch, : inputs.tile_table.shape[1]] = inputs.tile_table
    table[batch:, 0] = spare_tile
    input_ids, context_lens = np.zeros((2, size), dtype=np.int32)
    input_ids[:batch], context_lens[:batch] = inputs.input_ids, inputs.context_lens
    return StepInputs(
        input_ids=input_ids,
        tile_table=table,
        context_lens=context_lens,
        query_starts=np.arange(size + 1, dtype=np.int32),
        logit_indices=np.arange(size, dtype=np.int32),
    )


def wanted_rows(logits: Tensor, indices: IntArray) -> Tensor:
    """Return the rows `indices` of `logits`, without a copy where they are the first ones in order."""
    if np.array_equal(indices, np.arange(len(indices))):
        return logits[: len(indices)]
    return logits[torch.from_numpy(indices).to(logits.device)]


class CudaRunner:
    """Runs a decoder on the current GPU; takes it over. The pool has one tile more than `num_tiles`, for padding."""

    def __init__(
        self, decoder: Decoder, tile: TileSpec, num_tiles: int, limits: EngineLimits, launcher: BundleLauncher
    ) -> None:  # fmt: skip
        """Lay weights anew, load kernels and capture graphs: seconds. Raises SitsError for an unsupported model."""
        self.vocab_size, self.num_tiles = decoder.spec.vocab_size, num_tiles
        self._launcher = launcher
        device = decoder.embedding.device
        self._pool, self._scales = allocate_pool(tile, num_tiles + 1, device)
        self._width = tile.tiles_for(limits.max_seq_tokens)
        with torch.inference_mode():
            self._decoder = KernelDecoder(decoder, launcher, limits.max_tokens_per_step)
            launcher.load_all()
            # From the largest: the smaller ones find their memory in its.
            sizes = sorted(graph_sizes(limits.max_batch_size), reverse=True)
            # One stream for all: libraries keep a workspace for each.
            memory, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self._graphs = {size: self._capture(size, memory, aside) for size in sizes}

    def run(self, inputs: StepInputs) -> Tensor:
        with torch.inference_mode():
            if not is_decode(inputs):
                return self._compute(to_device(inputs, self._pool.device))
            batch = len(inputs.context_lens)
            graph = self._graphs[min(size for size in self._graphs if size >= batch)]
            logits = graph.replay(padded_decode(inputs, graph.size, self._width, self.num_tiles))
            return wanted_rows(logits, inputs.logit_indices)

    def draw(self, logits: Tensor, settings: NDArray[np.float64]) -> Tensor:
        """Draw tokens from logits on the runner's device (`sampler.Draw`)."""
        largest_only = not settings[:, 0].any()
        with torch.inference_mode():
            on_device = torch.from_numpy(settings).to(logits.device)
            return draw_tokens(self._launcher, logits, on_device, largest_only)

    def close(self) -> None:
        del self._graphs, self._decoder, self._pool, self._scales

    def _compute(self, arrays: dict[str, Tensor]) -> Tensor:
        return self._decoder(kv_pool=self._pool, kv_scales=self._scales, **arrays)

    def _capture(self, size: int, memory: Any, aside: torch.cuda.Stream) -> _Graph:
        nobody = StepInputs(
            input_ids=np.zeros(0, dtype=np.int32),
            tile_table=np.zeros((0, 0), dtype=np.int32),
            context_lens=np.zeros(0, dtype=np.int32),
            query_starts=np.zeros(1, dtype=np.int32),
            logit_indices=np.zeros(0, dtype=np.int32),
        )
        inputs = padded_decode(nobody, size, self._width, self.num_tiles)
        numbers = packed(inputs, self._pool.device).to(self._pool.device)
        arrays = views(numbers, inputs)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._compute(arrays)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=aside):
            logits = self._compute(arrays)
        return _Graph(size, graph, numbers, logits)


@dataclasses.dataclass(frozen=True)
class _Graph:
    """The captured step of one batch size: the packed arrays that it reads, the logits [size, vocab] that it writes."""

    size: int
    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    logits: Tensor

    def replay(self, inputs: StepInputs) -> Tensor:
        self.numbers.copy_(packed(inputs, self.numbers.device), non_blocking=True)
        self.graph.replay()
        return self.logits
