"""SitsTiledAttention for TensorRT: RoPE, append to the tile pool and attention in one node.

The pool, and the scales of a coded one, are inputs that the node writes in place. TensorRT knows nothing of that and
needs not: a layer's node touches only its own layer's part, and the nodes of one step follow one another through the
residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sits_plugins.launcher import AttentionCall, KernelLauncher, attention_workspace_bytes
from sits_plugins.tensorrt_plugin import Fields, Operands, PluginDefinition, expect

from sits_trt import contract
from sits_trt.spec import CODED_KV_DTYPES

_NAME = contract.ATTENTION_PLUGIN


def _output_shape(build: Any, fields: Fields, inputs: Mapping[str, Any]) -> list[Any]:
    return [inputs["qkv"][0], build.constant(fields["num_heads"] * fields["head_dim"])]


def _check(fields: Fields, operands: Operands) -> None:
    heads, kv_heads, dim = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
    expect(_NAME, "width of qkv", (heads + 2 * kv_heads) * dim, operands["qkv"].shape[1])
    pool = operands["kv_pool"].shape
    row = dim // 2 if _kv_dtype(fields, operands) == "int4" else dim
    expect(_NAME, "pool after its layers", (2, kv_heads, fields["tile_tokens"], row), pool[2:])
    if "kv_scales" in operands:
        expect(_NAME, "shape of kv_scales", pool[:-1], operands["kv_scales"].shape)
    if not 0 <= fields["layer"] < pool[1]:
        expect(_NAME, "layer", f"below {pool[1]}", fields["layer"])
    batch = operands["tile_table"].shape[0]
    expect(_NAME, "length of context_lens", batch, operands["context_lens"].shape[0])
    expect(_NAME, "length of query_starts", batch + 1, operands["query_starts"].shape[0])
    expect(_NAME, "width of rope_table", dim, operands["rope_table"].shape[1])


def _kv_dtype(fields: Fields, operands: Operands) -> str:
    """What the pool holds: codes travel as int8 whatever they mean."""
    coded = fields["kv_format"]
    return CODED_KV_DTYPES[coded - 1] if coded else operands["kv_pool"].dtype


def _workspace_bytes(fields: Fields, largest: Operands) -> int:
    tokens = largest["qkv"].shape[0]
    return attention_workspace_bytes(tokens, fields["num_heads"], fields["num_kv_heads"], fields["head_dim"])


def _launch(launcher: KernelLauncher, fields: Fields, operands: Operands, workspace: int, stream: int) -> None:
    pool, table = operands["kv_pool"], operands["tile_table"]
    sizes = {name: value for name, value in fields.items() if name != "kv_format"}
    call = AttentionCall(
        **{name: operand.address for name, operand in operands.items()},
        workspace=workspace,
        dtype=operands["qkv"].dtype,
        kv_dtype=_kv_dtype(fields, operands),
        tokens=operands["qkv"].shape[0],
        batch=table.shape[0],
        num_tiles=pool.shape[0],
        tiles_per_seq=table.shape[1],
        num_layers=pool.shape[1],
        positions=operands["rope_table"].shape[0],
        **sizes,
    )
    launcher.tiled_attention(call, stream)


ATTENTION = PluginDefinition(
    name=_NAME,
    inputs=contract.ATTENTION_INPUTS,
    fields=contract.ATTENTION_FIELDS,
    output_shape=_output_shape,
    check=_check,
    workspace_bytes=_workspace_bytes,
    launch=_launch,
)
