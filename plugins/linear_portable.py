"""W4A16 linear in OpenAI Triton, over weights in the project's own order (`layouts.pack_sits`).

Runs on every SM that OpenAI Triton compiles for, and in its interpreter; takes any shape. The faster bodies
for weights in another order are `linear_stream.cu` and `linear_hopper.cu`.
"""

import triton
import triton.language as tl


@triton.jit
def _half(words, scale, shift, HIGH: tl.constexpr):
    """Dequantize one nibble of each byte: (code - zero) * scale in float32."""
    codes = (words >> 4) if HIGH else (words & 0xF)
    return (codes.to(tl.float32) - shift) * scale


@triton.jit
def dequantize(
    qweight, scales, zeros, input_scale, out, rows, half_columns, groups, has_zeros, has_input_scale,
    GROUP: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """out[rows, 2 * half_columns] = dequantized weight (times the input scale), in out's dtype."""
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    byte = tl.program_id(1) * BH + tl.arange(0, BH)
    row_ok = row < rows
    ok = row_ok[:, None] & (byte < half_columns)[None, :]
    words = tl.load(qweight + row[:, None] * half_columns + byte[None, :], mask=ok, other=0)
    place = row[:, None] * groups + ((byte * 2) // GROUP)[None, :]
    scale = tl.load(scales + place, mask=ok, other=0).to(tl.float32)
    shift = tl.load(zeros + place, mask=ok & (row < rows * has_zeros)[:, None], other=8).to(tl.float32)
    scaled = byte < half_columns * has_input_scale
    even = tl.load(input_scale + byte * 2, mask=scaled, other=1).to(tl.float32)
    odd = tl.load(input_scale + byte * 2 + 1, mask=scaled, other=1).to(tl.float32)
    low = ((words & 0xF).to(tl.float32) - shift) * scale * even[None, :]
    high = ((words >> 4).to(tl.float32) - shift) * scale * odd[None, :]
    value = tl.interleave(low, high)
    column = tl.program_id(1) * (2 * BH) + tl.arange(0, 2 * BH)
    ok = row_ok[:, None] & (column < 2 * half_columns)[None, :]
    tl.store(out + row[:, None] * (2 * half_columns) + column[None, :], value.to(out.dtype.element_ty), mask=ok)


@triton.jit
def w4a16(
    x, qweight, scales, zeros, bias, input_scale, out, tokens, rows, half_columns, groups,
    has_zeros, has_bias, has_input_scale,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[tokens, rows] = (x * input_scale) @ dequantize(qweight).T + bias, one group of inputs an iteration.

    The two nibbles of a byte are the two operands of two products: even inputs with low nibbles, odd with high.
    """
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    row = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    token_ok, row_ok = token < tokens, row < rows
    byte = tl.arange(0, GROUP // 2)
    real = x.dtype.element_ty
    acc = tl.zeros((BN, BM), tl.float32)
    for group in range(groups):
        column = group * GROUP + byte * 2
        words = tl.load(
            qweight + row[:, None] * half_columns + (group * (GROUP // 2) + byte)[None, :],
            mask=row_ok[:, None], other=0,
        )  # fmt: skip
        place = row * groups + group
        scale = tl.load(scales + place, mask=row_ok, other=0).to(tl.float32)
        shift = tl.load(zeros + place, mask=row < rows * has_zeros, other=8).to(tl.int16)
        even = x + token[None, :] * (2 * half_columns) + column[:, None]
        x_even = tl.load(even, mask=token_ok[None, :], other=0)
        x_odd = tl.load(even + 1, mask=token_ok[None, :], other=0)
        if has_input_scale != 0:
            x_even = (x_even * tl.load(input_scale + column).to(tl.float32)[:, None]).to(real)
            x_odd = (x_odd * tl.load(input_scale + column + 1).to(tl.float32)[:, None]).to(real)
        low = ((words & 0xF).to(tl.int16) - shift[:, None]).to(real)
        high = ((words >> 4).to(tl.int16) - shift[:, None]).to(real)
        acc += tl.dot(high, x_odd, tl.dot(low, x_even)) * scale[:, None]
    acc += tl.load(bias + row, mask=row < rows * has_bias, other=0).to(tl.float32)[:, None]
    place = out + token[None, :] * rows + row[:, None]
    tl.store(place, acc.to(real), mask=row_ok[:, None] & token_ok[None, :])
