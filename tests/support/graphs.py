"""Checkpoints in memory and steps of mixed batches, for tests of graphs and engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sits_trt.spec import ModelSpec, TileSpec, WeightFormat
from tests.support.quantized import quantize_tensors
from tests.support.tiny import tiny_spec, tiny_tensors


class MemoryCheckpoint(dict[str, Tensor]):
    """What the exporter needs of a checkpoint, without files."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor], formats: Mapping[str, WeightFormat]) -> None:
        super().__init__(tensors)
        self.spec = spec
        self.formats = dict(formats)


def tiny_int4(dtype: torch.dtype = torch.float16, **overrides: object) -> MemoryCheckpoint:
    """Return a tiny Llama (or what `overrides` of its spec make of it) with INT4 layers."""
    spec = tiny_spec(**overrides)
    tensors, formats = quantize_tensors({name: t.to(dtype) for name, t in tiny_tensors(spec).items()})
    return MemoryCheckpoint(spec, tensors, formats)


class MixedBatch:
    """Sequences that advance by given counts, on a pool of scattered, poisoned tiles, whose arrays are `pools`."""

    def __init__(self, spec: ModelSpec, tile: TileSpec, sequences: int, tiles_per_seq: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.vocab_size = spec.vocab_size
        tiles = sequences * tiles_per_seq + 1
        if tile.is_coded:
            codes = self.rng.integers(-128, 128, tile.pool_shape(tiles), dtype=np.int8)
            scales = np.full(tile.scales_shape(tiles), np.nan, dtype=np.float16)
            self.pools: dict[str, NDArray[Any]] = {"kv_pool": codes, "kv_scales": scales}
        else:
            self.pools = {"kv_pool": np.full(tile.pool_shape(tiles), np.nan, dtype=tile.kv_dtype)}
        self.table = self.rng.permutation(tiles)[: sequences * tiles_per_seq].reshape(sequences, -1).astype(np.int32)
        self.contexts = np.zeros(sequences, np.int32)

    def step(self, counts: Sequence[int]) -> dict[str, NDArray[np.generic]]:
        """Return the inputs, pools apart, of a step that advances each sequence by its count. All logits are wanted."""
        total = sum(counts)
        inputs = {
            "input_ids": self.rng.integers(0, self.vocab_size, total, dtype=np.int32),
            "tile_table": self.table,
            "context_lens": self.contexts.copy(),
            "query_starts": np.cumsum([0, *counts]).astype(np.int32),
            "logit_indices": self.rng.permutation(total).astype(np.int32),
        }
        self.contexts += np.asarray(counts, np.int32)
        return inputs
