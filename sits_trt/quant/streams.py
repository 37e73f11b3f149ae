"""The calibration text's residual streams: that of the float model and that of the model quantized so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sits_trt.models.decoder import DecoderLayer
from sits_trt.ops.rope import rope_table
from sits_trt.spec import ModelSpec, RopeSpec, TileSpec


@dataclass
class Streams:
    """Residual streams float32 [tokens, hidden], blocks of `lengths` tokens back to back, before layer `layer`."""

    reference: Tensor
    quantized: Tensor
    lengths: tuple[int, ...]
    layer: int = 0

    @classmethod
    def start(cls, embedding: Tensor, blocks: Sequence[Sequence[int]], embedding_scale: float = 1.0) -> Streams:
        """Embed blocks of token ids; `embedding` is [vocab, hidden], its rows are multiplied by `embedding_scale`."""
        ids = torch.tensor([token for block in blocks for token in block])
        embedded = embedding[ids].float() * embedding_scale
        return cls(embedded, embedded.clone(), tuple(len(block) for block in blocks))

    def rows(self) -> Iterator[slice]:
        """Yield the rows of each block."""
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length

    def save(self, path: Path) -> None:
        """Write to `path` in one step: a killed run leaves the file of the layer before."""
        partial = path.with_suffix(".partial")
        metadata = {"layer": str(self.layer), "lengths": " ".join(map(str, self.lengths))}
        save_file({"reference": self.reference, "quantized": self.quantized}, partial, metadata)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Streams:
        with safe_open(path, "pt") as file:
            metadata: Mapping[str, str] = file.metadata()
            lengths = tuple(map(int, metadata["lengths"].split()))
            return cls(file.get_tensor("reference"), file.get_tensor("quantized"), lengths, int(metadata["layer"]))


class BlockRunner:
    """Runs one layer at a time (`models.build_layer`) over whole blocks, each from an empty cache."""

    def __init__(self, spec: ModelSpec, longest: int) -> None:
        self.head_dim, self.longest = spec.head_dim, longest
        self.tables: dict[RopeSpec, Tensor] = {}
        tile = TileSpec(1, spec.num_kv_heads, spec.head_dim, kv_dtype="float32")
        tiles = tile.tiles_for(longest)
        self.pool = torch.zeros(tile.pool_shape(tiles))
        self.table = torch.arange(tiles, dtype=torch.int32)[None]

    def attended(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """Return the input of `o` for the residual stream x [tokens, hidden] of one block."""
        return layer.attended(x, *self._places(layer, x))

    def run(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """Return the residual stream after the layer for x [tokens, hidden] of one block."""
        after: Tensor = layer(x, *self._places(layer, x))
        return after

    def _places(self, layer: DecoderLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        none_before = torch.zeros(1, dtype=torch.int32)
        starts = torch.tensor([0, len(x)], dtype=torch.int32)
        return self.pool, self.table, none_before, starts, self._rope(layer.spec.rope)

    def _rope(self, rope: RopeSpec) -> Tensor:
        """Return the table of a layer's rotary embedding: layers of one model may differ in it, or have none."""
        if rope not in self.tables:
            self.tables[rope] = rope_table(rope, self.head_dim, self.longest)
        return self.tables[rope]


class LayerTensors(Mapping[str, Tensor]):
    """The tensors of decoder layer `index` by canonical name, each read when it is asked for."""

    def __init__(self, checkpoint: Mapping[str, Tensor], index: int) -> None:
        self.checkpoint = checkpoint
        self.names = [name for name in checkpoint if name.startswith(f"model.layers.{index}.")]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.checkpoint[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
