"""What the attention kernels share: formats of KV rows, rotation, and places in the tile pool.

A head's row is handled as two halves, because RoPE pairs element i with element i + head_dim/2 and because
an INT4 byte holds such a pair. Halves are padded to a power of two, `HALF`, with masked lanes.

KV_FORMAT is one of NATIVE (the model's 16-bit type), INT8, FP8 (e4m3) and INT4; all but NATIVE carry one
float16 scale per token and head. The formulas are those of `sits_trt/ops/kv_quant.py`.
"""
# ruff: noqa: RET505 - OpenAI Triton drops a branch not taken only if it is an else.

import triton
import triton.language as tl

NATIVE = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
INT4 = tl.constexpr(3)

KV_FORMATS = {"native": 0, "int8": 1, "float8_e4m3": 2, "int4": 3}
"""KV_FORMAT of each kind of pool."""

SMALLEST_SCALE = tl.constexpr(2.0**-14)
"""The smallest normal float16: a row smaller than its scale rounds to zero instead of dividing by nothing."""

NO_SCORE = tl.constexpr(-1.0e30)
"""Running maximum before the first key: finite, so that a row without any key stays free of NaN."""


@triton.jit
def rotate(first, second, cosine, sine):
    """RoPE of one row's two halves."""
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def load_halves(rows, mask, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Both halves, float32 [rows, HALF], of the rows that pointers `rows` begin; zero where masked."""
    lanes = tl.arange(0, HALF)
    keep = mask[:, None] & (lanes[None, :] < HEAD_DIM // 2)
    places = rows[:, None] + lanes[None, :]
    first = tl.load(places, mask=keep, other=0.0).to(tl.float32)
    return first, tl.load(places + HEAD_DIM // 2, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def round_to_integer(x):
    """Round to nearest, ties to even, for |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode(first, second, KV_FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of rows [rows, HALF] given as float32 halves: (first, second, scale [rows] float32).

    INT4 codes come back unpacked, 1..15. NATIVE's scale is 1.
    """
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    if KV_FORMAT == NATIVE:
        return first.to(DTYPE), second.to(DTYPE), largest * 0 + 1
    else:
        top: tl.constexpr = 127.0 if KV_FORMAT == INT8 else 448.0 if KV_FORMAT == FP8 else 7.0
        scale = tl.div_rn(largest, tl.zeros_like(largest) + top).to(tl.float16)
        scale = tl.maximum(scale.to(tl.float32), SMALLEST_SCALE)
        divisor = tl.broadcast_to(scale[:, None], first.shape)
        first = tl.clamp(tl.div_rn(first, divisor), -top, top)
        second = tl.clamp(tl.div_rn(second, divisor), -top, top)
        if KV_FORMAT == FP8:
            return first.to(tl.float8e4nv), second.to(tl.float8e4nv), scale
        elif KV_FORMAT == INT8:
            return round_to_integer(first).to(tl.int8), round_to_integer(second).to(tl.int8), scale
        else:
            return (round_to_integer(first) + 8).to(tl.uint8), (round_to_integer(second) + 8).to(tl.uint8), scale


@triton.jit
def decode(codes, KV_FORMAT: tl.constexpr):
    """Float32 values of codes in units of their scale."""
    if KV_FORMAT == INT4:
        return codes.to(tl.float32) - 8
    else:
        return codes.to(tl.float32)


@triton.jit
def store_rows(rows, first, second, mask, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, KV_FORMAT: tl.constexpr):
    """Write coded rows [rows, HALF] to `rows`, pointers [rows] to the first element of each row in the pool."""
    lanes = tl.arange(0, HALF)
    keep = mask[:, None] & (lanes[None, :] < HEAD_DIM // 2)
    places = rows[:, None] + lanes[None, :]
    if KV_FORMAT == INT4:
        tl.store(places, first | (second << 4), mask=keep)
    else:
        tl.store(places, first, mask=keep)
        tl.store(places + HEAD_DIM // 2, second, mask=keep)


@triton.jit
def load_rows(rows, mask, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, KV_FORMAT: tl.constexpr, DTYPE: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Two halves [rows, HALF] in DTYPE, in units of the rows' scales; masked rows are zero codes if MASKED."""
    lanes = tl.arange(0, HALF)
    places = rows[:, None] + lanes[None, :]
    if KV_FORMAT == INT4:
        if HALF != HEAD_DIM // 2 or MASKED:
            packed = tl.load(places, mask=mask[:, None] & (lanes[None, :] < HEAD_DIM // 2), other=0x88)
        else:
            packed = tl.load(places)
        return ((packed & 0xF).to(tl.int8) - 8).to(DTYPE), ((packed >> 4).to(tl.int8) - 8).to(DTYPE)
    else:
        if HALF != HEAD_DIM // 2 or MASKED:
            keep = mask[:, None] & (lanes[None, :] < HEAD_DIM // 2)
            first = tl.load(places, mask=keep, other=0.0)
            second = tl.load(places + HEAD_DIM // 2, mask=keep, other=0.0)
        else:
            first = tl.load(places)
            second = tl.load(places + HEAD_DIM // 2)
        return first.to(DTYPE), second.to(DTYPE)


@triton.jit
def load_tiles(table, table_width, start, tile_shift, BLOCK_N: tl.constexpr, SPREAD: tl.constexpr):
    """Tile ids, int32, of BLOCK_N positions from `start` on: [BLOCK_N] if SPREAD, else the one tile that holds all.

    `table` points to the sequence's row of the tile table; tiles hold 2**tile_shift tokens; `start` is a multiple of
    BLOCK_N. Volatile, because the compiler's pipeline would else stage these loads too, and wait for each of them.
    """
    if SPREAD:
        index = (start + tl.arange(0, BLOCK_N)) >> tile_shift
        return tl.load(table + index, mask=index < table_width, other=0, volatile=True)
    else:
        return tl.load(table + (start >> tile_shift), volatile=True)


@triton.jit
def pool_rows(tiles, positions, num_layers, layer, kv_heads, head, tile_shift):
    """Row numbers, int64, in the pool's K side of one layer and head for positions that lie in `tiles`.

    The V side lies kv_heads << tile_shift rows further.
    """
    first = ((tiles.to(tl.int64) * num_layers + layer) * (2 * kv_heads) + head) << tile_shift
    return first + (positions & ((1 << tile_shift) - 1))


@triton.jit
def tile_rows(tiles, start, num_layers, layer, kv_heads, head, tile_shift, BLOCK_N: tl.constexpr,
              SPREAD: tl.constexpr):  # fmt: skip
    """`pool_rows`, [BLOCK_N], of positions from `start` on in the tiles of `load_tiles`."""
    lanes = tl.arange(0, BLOCK_N)
    if SPREAD:
        return pool_rows(tiles, start + lanes, num_layers, layer, kv_heads, head, tile_shift)
    else:
        return pool_rows(tiles, start, num_layers, layer, kv_heads, head, tile_shift) + lanes
