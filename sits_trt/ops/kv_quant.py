"""Quantized KV: how a row of K or V becomes codes and a scale, and the attention op over such a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.ops.attention import _attend, _token_places
from sits_trt.ops.rope import apply_rope

LARGEST_CODE = {"int8": 127.0, "float8_e4m3": 448.0, "int4": 7.0}
"""Absolute value of the largest code of each kind; codes are symmetric around zero."""

SMALLEST_SCALE = 2.0**-14
"""The smallest normal float16: a row smaller than that rounds to zero instead of dividing by nothing."""


def pool_shapes(kind: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return (shape of the codes, shape of the float16 scales, dtype of the codes) of an unquantized pool's `shape`."""
    if kind == "int4":
        return (*shape[:-1], shape[-1] // 2), shape[:-1], torch.uint8
    return shape, shape[:-1], torch.int8 if kind == "int8" else torch.float8_e4m3fn


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
) -> Tensor:
    """`tiled_attention` over a pool of codes and its scales (`pool_shapes`), both written in place.

    New tokens attend to themselves as later tokens will: through their codes. Other arguments and the result
    are those of `tiled_attention`; arithmetic is float32.
    """
    tokens, tile_tokens = qkv.shape[0], kv_pool.shape[-2]
    dim = kv_pool.shape[-1] * (2 if kind == "int4" else 1)
    sequence, position = _token_places(tile_table, context_lens, query_starts, tokens)
    q, k, v = qkv.reshape(tokens, -1, dim).float().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rows = rope_table[position]
    q, k = apply_rope(q, rows), apply_rope(k, rows)
    tiles, offsets = tile_table[sequence, position // tile_tokens].long(), position % tile_tokens
    for side, new in ((0, k), (1, v)):
        kv_pool[tiles, layer, side, :, offsets], kv_scales[tiles, layer, side, :, offsets] = quantize_kv(new, kind)
    out = qkv.new_empty(tokens, num_heads * dim)
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    for index, context in enumerate(contexts):
        begin, end = starts[index], starts[index + 1]
        if begin == end:
            continue
        total = context + end - begin
        used = tile_table[index, : -(-total // tile_tokens)].long()
        keys, values = (
            dequantize_kv(kv_pool[used, layer, side], kv_scales[used, layer, side], kind)
            .permute(1, 0, 2, 3)
            .reshape(num_kv_heads, -1, dim)[:, :total]
            for side in (0, 1)
        )
        out[begin:end] = _attend(q[begin:end], keys, values, context, window, scale).to(out.dtype)
    return out
