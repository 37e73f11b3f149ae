"""SitsTiledAttention for TensorRT: RoPE, append to the tile pool and attention in one node.

The pool is an input that the node writes in place. TensorRT knows nothing of that and needs not: a layer's node
touches only its own layer's part, and the nodes of one step follow one another through the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sits_plugins.launcher import AttentionCall, KernelLauncher, attention_workspace_bytes
from sits_plugins.tensorrt_plugin import Fields, Operands, PluginDefinition, expect

from sits_trt import contract

_NAME = contract.ATTENTION_PLUGIN


def _output_shape(build: Any, fields: Fields, inputs: Mapping[str, Any]) -> list[Any]:
    return [inputs["qkv"][0], build.constant(fields["num_heads"] * fields["head_dim"])]


def _check(fields: Fields, operands: Operands) -> None:
    heads, kv_heads, dim = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
    expect(_NAME, "width of qkv", (heads + 2 * kv_heads) * dim, operands["qkv"].shape[1])
    pool = operands["kv_pool"].shape
    expect(_NAME, "pool after its layers", (2, kv_heads, fields["tile_tokens"], dim), pool[2:])
    if not 0 <= fields["layer"] < pool[1]:
        expect(_NAME, "layer", f"below {pool[1]}", fields["layer"])
    batch = operands["tile_table"].shape[0]
    expect(_NAME, "length of context_lens", batch, operands["context_lens"].shape[0])
    expect(_NAME, "length of query_starts", batch + 1, operands["query_starts"].shape[0])
    expect(_NAME, "width of rope_table", dim, operands["rope_table"].shape[1])


def _workspace_bytes(fields: Fields, largest: Operands) -> int:
    tokens = largest["qkv"].shape[0]
    return attention_workspace_bytes(tokens, fields["num_heads"], fields["num_kv_heads"], fields["head_dim"])


def _launch(launcher: KernelLauncher, fields: Fields, operands: Operands, workspace: int, stream: int) -> None:
    pool, table = operands["kv_pool"], operands["tile_table"]
    call = AttentionCall(
        **{name: operands[name].address for name in (*(i.name for i in contract.ATTENTION_INPUTS), "out")},
        workspace=workspace,
        dtype=operands["qkv"].dtype,
        kv_dtype=pool.dtype,
        tokens=operands["qkv"].shape[0],
        batch=table.shape[0],
        num_tiles=pool.shape[0],
        tiles_per_seq=table.shape[1],
        num_layers=pool.shape[1],
        positions=operands["rope_table"].shape[0],
        **fields,
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
