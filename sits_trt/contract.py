"""The engine's bindings and limits: written once here, read by the builder, the runners and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sits_trt.errors import SitsError
from sits_trt.spec import CODED_KV_DTYPES, ModelSpec, TileSpec

ONNX_DOMAIN = "sits"
ATTENTION_PLUGIN = "SitsTiledAttention"
LINEAR_PLUGIN = "SitsW4A16Linear"
PLUGIN_VERSION = "3"
"""Version of the plugins' input and output lists: raise it whenever a list changes."""

GRAPH_FILE = "model.onnx"
GRAPH_DATA_FILE = "model.onnx.data"
"""The graph in its directory, and its weights, which it finds by this name."""

KERNEL_ABI = (2, 0)
"""(major, minor) of the kernel bundle: another major is refused, a newer minor is accepted."""


@dataclass(frozen=True)
class Binding:
    """One engine input or output. A string in `shape` is a symbolic dimension."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    is_input: bool
    doc: str


@dataclass(frozen=True)
class EngineLimits:
    """What one engine step may hold. All counts are upper bounds that include the bound itself.

    `max_seq_tokens` bounds prompt plus answer of one sequence; `max_tokens_per_step` bounds the
    new tokens of all sequences together; `num_tiles` is the pool size the profile is tuned for.
    """

    max_batch_size: int
    max_tokens_per_step: int
    max_seq_tokens: int
    num_tiles: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineLimits:
        return cls(**data)


@dataclass(frozen=True)
class EngineDetails:
    """The `details` of an engine's manifest: all that the run wing needs to know of a build.

    `checkpoint` is the path, relative to the engine's directory, of the checkpoint that the engine was
    made from: eager and cuda runners take their weights from it, and every runner its tokenizer.
    `engine_file` is empty for backends that have none; `kernels` is the relative path of the kernel bundle's
    directory, empty for targets without a GPU.
    """

    backend: str
    model: ModelSpec
    tile: TileSpec
    limits: EngineLimits
    checkpoint: str
    engine_file: str = ""
    kernels: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], directory: Path) -> EngineDetails:
        """Return the details that the manifest of `directory` holds. Raises SitsError when they are damaged."""
        try:
            details = cls(
                backend=data["backend"],
                model=ModelSpec.from_dict(data["model"]),
                tile=TileSpec(**data["tile"]),
                limits=EngineLimits.from_dict(data["limits"]),
                checkpoint=data["checkpoint"],
                engine_file=data["engine_file"],
                kernels=data["kernels"],
            )
            for name in ("backend", "checkpoint", "engine_file", "kernels"):
                if not isinstance(data[name], str):
                    raise TypeError(f"'{name}'")
            if details.tile.tile_bytes < 1:
                raise ValueError("'tile'")
            return details
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SitsError(
                f"the manifest of {directory} lacks or misnames {error}; delete the directory and build again"
            ) from None


def bindings(model: ModelSpec, tile: TileSpec) -> tuple[Binding, ...]:
    """Return every binding of a decoder engine, inputs first, in the order of the graph's arguments.

    A coded pool travels as int8, whatever its codes mean: TensorRT passes those bytes on as they are.
    """
    pool: tuple[str | int, ...] = ("tiles", *tile.pool_shape(1)[1:])
    scales: tuple[str | int, ...] = ("tiles", *tile.scales_shape(1)[1:])
    doc = "scales of kv_pool's rows, written in place"
    coded = (Binding("kv_scales", "float16", scales, True, doc),) if tile.is_coded else ()
    return (
        Binding("input_ids", "int32", ("tokens",), True, "new tokens of all sequences, back to back"),
        Binding("kv_pool", "int8" if coded else tile.kv_dtype, pool, True, "tile pool, written in place"),
        Binding("tile_table", "int32", ("batch", "tiles_per_seq"), True, "tile ids of each sequence, padded with 0"),
        Binding("context_lens", "int32", ("batch",), True, "tokens of each sequence already in the pool"),
        Binding("query_starts", "int32", ("batch_plus_1",), True, "start of each sequence in input_ids, then the end"),
        Binding("logit_indices", "int32", ("outputs",), True, "positions in input_ids whose logits are wanted"),
        *coded,
        Binding("logits", "float32", ("outputs", model.vocab_size), False, "next-token logits of those positions"),
    )


@dataclass(frozen=True)
class PluginInput:
    """One input of a plugin. `dtype` 'activation' means the type of the plugin's first input.

    A node lists the inputs that it has in this order and leaves out those that it has not: `only_with` names the
    integer attribute that is not 0 where the input is there, `only_without` one that is 0 then.
    """

    name: str
    dtype: str
    doc: str
    only_with: str = ""
    only_without: str = ""


ATTENTION_INPUTS = (
    PluginInput("qkv", "activation", "[tokens, (num_heads + 2*num_kv_heads) * head_dim], not rotated yet"),
    PluginInput(
        "kv_pool", "float16", "[tiles, layers, 2, num_kv_heads, tile_tokens, head_dim], written in place",
        only_without="kv_format",
    ),
    PluginInput(
        "kv_pool", "int8", "codes of kv_format, `TileSpec.pool_shape`, written in place", only_with="kv_format"
    ),
    PluginInput("tile_table", "int32", "[batch, tiles_per_seq]"),
    PluginInput("context_lens", "int32", "[batch]"),
    PluginInput("query_starts", "int32", "[batch + 1]"),
    PluginInput("rope_table", "float32", "[positions, head_dim], cosines, then sines"),
    PluginInput(
        "kv_scales", "float16", "[tiles, layers, 2, num_kv_heads, tile_tokens], written in place",
        only_with="kv_format",
    ),
)  # fmt: skip
"""Inputs of SitsTiledAttention. Its one output is [tokens, num_heads * head_dim] in the type of qkv."""

LINEAR_INPUTS = (
    PluginInput("x", "activation", "[tokens, in]"),
    PluginInput("qweight", "int8", "[ceil(out/16), ceil(in/64), 512], the bytes of `layouts.pack_mma16`"),
    PluginInput("scales", "activation", "[ceil(out/16), groups, 8, 2] of `layouts.pack_mma16_groups`"),
    PluginInput("zeros", "int8", "as scales, 0..15", only_with="has_zeros"),
    PluginInput("bias", "activation", "[out]", only_with="has_bias"),
    PluginInput("input_scale", "activation", "[in]", only_with="has_input_scale"),
)
"""Inputs of SitsW4A16Linear. Its one output is [tokens, out] in the type of x.

Weights lie in the mma16 layout, which the kernels for every architecture take, laid once when the graph is exported.
Codes travel as int8 because TensorRT takes int8 plugin inputs byte for byte, while it widens uint8
initialisers to int32 (four times the bytes) and refuses uint4 ones.
"""

ATTENTION_FIELDS = {
    "layer": "int", "num_heads": "int", "num_kv_heads": "int", "head_dim": "int", "tile_tokens": "int",
    "window": "int", "scale": "float", "kv_format": "int",
}  # fmt: skip
"""Attributes of a SitsTiledAttention node, as in `ops.tiled_attention` and `TileSpec`; all of them are serialized.

`kv_format` says what the pool holds: 0 for floats, else `kv_format` of its type.
"""

LINEAR_FIELDS = {
    "out_features": "int", "group_size": "int", "has_zeros": "int", "has_bias": "int", "has_input_scale": "int",
}  # fmt: skip
"""Attributes of a SitsW4A16Linear node; all of them are serialized."""


def present_inputs(inputs: tuple[PluginInput, ...], fields: Mapping[str, float]) -> tuple[PluginInput, ...]:
    """Return the inputs that a node with these attributes has, in order."""
    return tuple(
        i
        for i in inputs
        if (not i.only_with or fields[i.only_with]) and not (i.only_without and fields[i.only_without])
    )


def kv_format(kv_dtype: str) -> int:
    """Return the number of a type of KV pool in a node: 0 for floats, 1 for int8, 2 for float8_e4m3, 3 for int4."""
    return CODED_KV_DTYPES.index(kv_dtype) + 1 if kv_dtype in CODED_KV_DTYPES else 0
