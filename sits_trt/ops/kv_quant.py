"""Quantized KV: how a row of K or V becomes codes and a scale, and the attention op over such a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.ops.attention import Places, attend_over_tiles

LARGEST_CODE = {"int8": 127.0, "float8_e4m3": 448.0, "int4": 7.0}
"""Absolute value of the largest code of each kind; codes are symmetric around zero."""

SMALLEST_SCALE = 2.0**-14
"""The smallest normal float16: a row smaller than that rounds to zero instead of dividing by nothing."""


def quantize_kv(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return (codes, float16 scales [...]) of rows x [..., head_dim]: code = x / scale, to nearest, ties to even.

    The scale is the row's largest absolute value over LARGEST_CODE, rounded to float16 first, so that codes and
    scale fit each other. int8 codes are int8, fp8 codes float8_e4m3fn; int4 codes are uint8 [..., head_dim/2]
    with code + 8 of element i in the low and of element i + head_dim/2 in the high nibble.
    """
    largest = LARGEST_CODE[kind]
    scales = (x.float().abs().amax(-1) / largest).half().clamp(min=SMALLEST_SCALE)
    scaled = (x.float() / scales.float()[..., None]).clamp(-largest, largest)
    if kind == "float8_e4m3":
        return scaled.to(torch.float8_e4m3fn), scales
    if kind == "int8":
        return scaled.round().to(torch.int8), scales
    low, high = (scaled.round() + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4), scales


def dequantize_kv(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Undo `quantize_kv`: float32 [..., head_dim]."""
    unpacked = torch.cat((codes & 0xF, codes >> 4), dim=-1).float() - 8 if kind == "int4" else codes.float()
    return unpacked * scales.float()[..., None]


@torch.library.custom_op("sits::quantized_tiled_attention", mutates_args=("kv_pool", "kv_scales"))
def quantized_tiled_attention(
    qkv: Tensor,
    kv_pool: Tensor,
    kv_scales: Tensor,
    tile_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    rope_table: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    scale: float,
    kind: str,
    softcap: float = 0.0,
) -> Tensor:
    """`tiled_attention` over a pool of codes and its scales (`kv_pool.allocate_pool`), both written in place.

    `kind` is one of LARGEST_CODE. New tokens attend to themselves as later tokens will: through their codes. Other
    arguments, the result and the arithmetic are those of `tiled_attention`; codes are chosen in float32.
    """
    pool_bytes = kv_pool.view(torch.uint8)  # torch indexes few devices' FP8 tensors

    def write(places: Places, side: int, new: Tensor) -> None:
        tiles, offsets = places
        codes, scales = quantize_kv(new, kind)
        pool_bytes[tiles, layer, side, :, offsets] = codes.view(torch.uint8)
        kv_scales[tiles, layer, side, :, offsets] = scales

    def read(used: Tensor, side: int) -> Tensor:
        return dequantize_kv(pool_bytes[used, layer, side].view(kv_pool.dtype), kv_scales[used, layer, side], kind)

    return attend_over_tiles(
        qkv, tile_table, context_lens, query_starts, rope_table, num_heads, num_kv_heads, kv_pool.shape[-2],
        window, scale, softcap, write, read,
    )  # fmt: skip


@torch.library.custom_op("sits::quantized_tiled_attention_functional", mutates_args=())
def quantized_tiled_attention_functional(
    qkv: Tensor,
    kv_pool: Tensor,
    kv_scales: Tensor,
    tile_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    rope_table: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    scale: float,
    kind: str,
    softcap: float = 0.0,
) -> Tensor:
    """The twin that graphs are exported with, as `tiled_attention_functional`."""
    return quantized_tiled_attention(
        qkv, kv_pool.clone(), kv_scales.clone(), tile_table, context_lens, query_starts, rope_table,
        layer, num_heads, num_kv_heads, window, scale, kind, softcap,
    )  # fmt: skip


@quantized_tiled_attention.register_fake
@quantized_tiled_attention_functional.register_fake
def _(
    qkv: Tensor,
    kv_pool: Tensor,
    kv_scales: Tensor,
    tile_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    rope_table: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    scale: float,
    kind: str,
    softcap: float = 0.0,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], num_heads * rope_table.shape[-1])
