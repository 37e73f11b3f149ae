"""Quantized KV rows: errors within half a step, extreme rows, packing, and attention over such a pool."""

from __future__ import annotations

import pytest
import torch

from sits_trt.ops.attention import tiled_attention
from sits_trt.ops.kv_pool import allocate_pool, code_kind
from sits_trt.ops.kv_quant import (
    LARGEST_CODE,
    SMALLEST_SCALE,
    dequantize_kv,
    quantize_kv,
    quantized_tiled_attention,
)
from sits_trt.ops.rope import rope_table
from sits_trt.spec import CODED_KV_DTYPES, RopeSpec, TileSpec

KINDS = sorted(LARGEST_CODE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_allocated_as_rows_are_quantized_and_as_tiles_are_counted(kind):
    tile = TileSpec(3, 2, 32, 16, kind)
    assert tile.is_coded
    assert sorted(CODED_KV_DTYPES) == KINDS
    pool, scales = allocate_pool(tile, 5)
    codes, row_scales = quantize_kv(torch.randn(5, 3, 2, 2, 16, 32), kind)
    assert (pool.shape, pool.dtype, scales.shape, scales.dtype) == (
        codes.shape, codes.dtype, row_scales.shape, row_scales.dtype
    )  # fmt: skip
    assert 5 * tile.tile_bytes == pool.nbytes + scales.nbytes
    assert code_kind(pool) == kind


def test_a_float_pool_has_no_scales():
    tile = TileSpec(3, 2, 32, 16)
    pool, scales = allocate_pool(tile, 5)
    assert (pool.dtype, scales, tile.is_coded) == (torch.float16, None, False)
    assert 5 * tile.tile_bytes == pool.nbytes


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_error_is_at_most_half_a_step(kind):
    x = torch.randn(7, 3, 64) * torch.logspace(-2, 2, 7)[:, None, None]
    codes, scales = quantize_kv(x, kind)
    step = scales.float()[..., None]
    # A scale rounded down to float16 puts the largest element up to 2**-11 of its range beyond the last code.
    assert ((dequantize_kv(codes, scales, kind) - x).abs() <= step * (0.5 + LARGEST_CODE[kind] * 2**-11)).all()


def test_fp8_error_is_a_sixteenth_at_most():
    x = torch.randn(7, 64)
    codes, scales = quantize_kv(x, "float8_e4m3")
    error = (dequantize_kv(codes, scales, "float8_e4m3") - x).abs()
    assert (error <= x.abs() / 16 + scales.float()[:, None] * 2**-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_b14_zero_and_tiny_rows_have_normal_scales(kind):
    """0/0 would be NaN, and a scale below float16's range would be 0."""
    x = torch.zeros(3, 64)
    x[1, 5], x[2] = 1e-7, 1e-30
    codes, scales = quantize_kv(x, kind)
    assert (scales >= SMALLEST_SCALE).all()
    values = dequantize_kv(codes, scales, kind)
    assert not values[0].any()
    assert (values - x).abs().max() <= SMALLEST_SCALE / 2


def test_int4_puts_the_halves_of_a_row_into_one_byte():
    x = torch.zeros(64)
    x[3], x[35] = 7.0, -7.0
    codes, scales = quantize_kv(x, "int4")
    assert scales.item() == 1.0
    assert codes[3].item() == 15 | (1 << 4)
    assert torch.equal(dequantize_kv(codes, scales, "int4"), x)


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.02), ("float8_e4m3", 0.06), ("int4", 0.25)])
def test_attention_is_near_that_over_an_exact_pool(kind, tolerance):
    heads, kv_heads, dim, shape = 4, 2, 32, (5, 1, 2, 2, 16, 32)
    pool, table = torch.randn(shape), torch.tensor([[3, 1, 0], [2, 4, 0]], dtype=torch.int32)
    codes, scales = quantize_kv(pool, kind)
    qkv = torch.randn(6, (heads + 2 * kv_heads) * dim)
    given = (
        table, torch.tensor([20, 3], dtype=torch.int32), torch.tensor([0, 5, 6], dtype=torch.int32),
        rope_table(RopeSpec(), dim, 64), 0, heads, kv_heads, 0, dim**-0.5,
    )  # fmt: skip
    want = tiled_attention(qkv, pool, *given)
    out = quantized_tiled_attention(qkv, codes, scales, *given, kind)
    assert (out - want).norm() < tolerance * want.norm()
