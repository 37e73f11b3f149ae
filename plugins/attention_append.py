"""RoPE and append: keys and values of new tokens go to their places in the tile pool."""

import triton
import triton.language as tl
from sits_plugins.attention_kv import INT4, NATIVE, encode, load_halves, pool_rows, rotate, store_rows


@triton.jit
def sequences_of(query_starts, tokens, batch, BLOCK_T: tl.constexpr, BLOCK_BATCH: tl.constexpr):
    """Index of the sequence that holds each token of `tokens`, int32 [BLOCK_T]."""
    passed = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, batch, BLOCK_BATCH):
        lanes = start + tl.arange(0, BLOCK_BATCH)
        ends = tl.load(query_starts + lanes + 1, mask=lanes < batch, other=2147483647)
        passed += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
    return passed


@triton.jit
def attention_append(
    qkv, pool, pool_scales, tile_table, context_lens, query_starts, rope_table,
    tokens, batch, table_width, num_layers, layer, kv_heads, group, tile_shift, decode_limit,
    HEAD_DIM: tl.constexpr, KV_FORMAT: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
):  # fmt: skip
    """Write K (rotated) and V of every sequence with more than decode_limit new tokens.

    Grid: (ceil(tokens / BLOCK_T), kv_heads). Arguments as of `attention_decode`. In a NATIVE pool the rest of V in
    the tile of a sequence's last token is set to zero, for readers that take whole tiles.
    """
    DTYPE: tl.constexpr = pool.dtype.element_ty if KV_FORMAT == NATIVE else qkv.dtype.element_ty
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    sequence = tl.minimum(sequences_of(query_starts, token, batch, BLOCK_T, BLOCK_BATCH), batch - 1)
    begin = tl.load(query_starts + sequence)
    new = tl.load(query_starts + sequence + 1) - begin
    mine = (token < tokens) & (new > decode_limit)
    position = tl.load(context_lens + sequence) + token - begin
    table = tile_table + sequence.to(tl.int64) * table_width
    tiles = tl.load(table + (position >> tile_shift), mask=mine, other=0)
    k_rows = pool_rows(tiles, position, num_layers, layer, kv_heads, head, tile_shift)
    v_rows = k_rows + (kv_heads << tile_shift)
    row_size: tl.constexpr = HEAD_DIM // 2 if KV_FORMAT == INT4 else HEAD_DIM
    source = qkv + token.to(tl.int64) * ((group + 2) * kv_heads * HEAD_DIM) + (group * kv_heads + head) * HEAD_DIM
    cosine, sine = load_halves(rope_table + position.to(tl.int64) * HEAD_DIM, mine, HEAD_DIM, HALF)
    k1, k2 = load_halves(source, mine, HEAD_DIM, HALF)
    k1, k2 = rotate(k1, k2, cosine, sine)
    k1, k2, k_scales = encode(k1, k2, KV_FORMAT, DTYPE)
    store_rows(pool + k_rows * row_size, k1, k2, mine, HEAD_DIM, HALF, KV_FORMAT)
    v1, v2 = load_halves(source + kv_heads * HEAD_DIM, mine, HEAD_DIM, HALF)
    v1, v2, v_scales = encode(v1, v2, KV_FORMAT, DTYPE)
    store_rows(pool + v_rows * row_size, v1, v2, mine, HEAD_DIM, HALF, KV_FORMAT)
    if KV_FORMAT == NATIVE:
        rest = tl.where(mine & (token == begin + new - 1), ((1 << tile_shift) - 1) & ~position, 0)
        nothing = tl.zeros_like(v1)
        for ahead in range(1, tl.max(rest, 0) + 1):
            store_rows(pool + (v_rows + ahead) * row_size, nothing, nothing, ahead <= rest, HEAD_DIM, HALF, KV_FORMAT)
    else:
        tl.store(pool_scales + k_rows, k_scales.to(tl.float16), mask=mine)
        tl.store(pool_scales + v_rows, v_scales.to(tl.float16), mask=mine)
