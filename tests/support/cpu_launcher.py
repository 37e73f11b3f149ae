"""A kernel launcher whose device is the host: raw addresses in and out, computed by the ops' references."""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
import torch
from sits_plugins.launcher import AttentionCall, LinearCall
from sits_plugins.linear_plan import workspace_bound
from torch import Tensor

from sits_trt.layouts import pack_sits, unpack_mma16
from sits_trt.ops import quantized_tiled_attention, tiled_attention, w4a16_linear
from sits_trt.ops.kv_pool import CODE_DTYPES
from sits_trt.spec import TileSpec


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor over the host memory at `address`; writing to it writes there."""
    size_bytes = prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=dtype).reshape(shape)


class CpuLauncher:
    """Launches at once on the calling thread; `streams` collects the stream of every launch."""

    def __init__(self) -> None:
        self.streams: list[int] = []

    def tiled_attention(self, call: AttentionCall, stream: int) -> None:
        self.streams.append(stream)
        dtype = getattr(torch, call.dtype)
        heads = call.num_heads + 2 * call.num_kv_heads
        tile = TileSpec(call.num_layers, call.num_kv_heads, call.head_dim, call.tile_tokens, call.kv_dtype)
        pool_dtype = CODE_DTYPES[call.kv_dtype] if tile.is_coded else getattr(torch, call.kv_dtype)
        qkv = tensor_at(call.qkv, (call.tokens, heads * call.head_dim), dtype)
        pool = tensor_at(call.kv_pool, tile.pool_shape(call.num_tiles), pool_dtype)
        rest = (
            tensor_at(call.tile_table, (call.batch, call.tiles_per_seq), torch.int32),
            tensor_at(call.context_lens, (call.batch,), torch.int32),
            tensor_at(call.query_starts, (call.batch + 1,), torch.int32),
            tensor_at(call.rope_table, (call.positions, call.head_dim), torch.float32),
            call.layer, call.num_heads, call.num_kv_heads, call.window, call.scale,
        )  # fmt: skip
        if tile.is_coded:
            scales = tensor_at(call.kv_scales, tile.scales_shape(call.num_tiles), torch.float16)
            result = quantized_tiled_attention(qkv, pool, scales, *rest, call.kv_dtype)
        else:
            result = tiled_attention(qkv, pool, *rest)
        tensor_at(call.out, (call.tokens, call.num_heads * call.head_dim), dtype).copy_(result)

    def w4a16_linear(self, call: LinearCall, stream: int) -> None:
        self.streams.append(stream)
        dtype = getattr(torch, call.dtype)
        size = (call.out_features, call.in_features)
        blocks, pieces = (-(-extent // step) for extent, step in zip(size, (16, 64), strict=True))
        words = tensor_at(call.qweight, (blocks, pieces, 32, 4), torch.int32).numpy().view(np.uint32)
        bound = workspace_bound(call.tokens, *size, call.input_scale != 0)
        if bound:
            tensor_at(call.workspace, (bound,), torch.uint8).fill_(255)
        out = tensor_at(call.out, (call.tokens, call.out_features), dtype)
        out.copy_(
            w4a16_linear(
                tensor_at(call.x, (call.tokens, call.in_features), dtype),
                torch.from_numpy(pack_sits(unpack_mma16(words, *size))),
                self._groups(call, call.scales, dtype),
                self._groups(call, call.zeros, torch.uint8) if call.zeros else None,
                tensor_at(call.bias, (call.out_features,), dtype) if call.bias else None,
                tensor_at(call.input_scale, (call.in_features,), dtype) if call.input_scale else None,
                call.group_size,
            )
        )

    @staticmethod
    def _groups(call: LinearCall, address: int, dtype: torch.dtype) -> Tensor:
        """Return scales or zero points [out, in/group_size] of the mma16 layout."""
        groups, per_piece = call.in_features // call.group_size, max(1, 64 // call.group_size)
        padded = -(-groups // per_piece) * per_piece
        laid = tensor_at(address, (-(-call.out_features // 16), padded, 8, 2), dtype)
        return laid.permute(0, 3, 2, 1).reshape(-1, padded)[: call.out_features, :groups]
