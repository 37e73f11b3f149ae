"""Dense product in OpenAI Triton, for weights dequantized to 16 bits, where no vendor library is at hand."""

import triton
import triton.language as tl


@triton.jit
def dense(
    x, weight, bias, out, tokens, rows, columns, stride, has_bias,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[tokens, :rows], whose rows are `stride` apart, = x[tokens, columns] @ weight[rows, columns].T + bias.

    Token tiles are the fastest grid dimension, so that blocks that run together share a tile of the weight.
    """
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    row = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    token_ok, row_ok = token < tokens, row < rows
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, columns, BK):
        column = start + tl.arange(0, BK)
        column_ok = column < columns
        left = tl.load(
            x + token[:, None] * columns + column[None, :], mask=token_ok[:, None] & column_ok[None, :], other=0
        )
        right = tl.load(
            weight + row[None, :] * columns + column[:, None], mask=row_ok[None, :] & column_ok[:, None], other=0
        )
        acc = tl.dot(left, right, acc)
    acc += tl.load(bias + row, mask=row < rows * has_bias, other=0).to(tl.float32)[None, :]
    place = out + token[:, None] * stride + row[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=token_ok[:, None] & row_ok[None, :])
