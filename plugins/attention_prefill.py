"""Prefill attention for every SM and pool format: blocks of new tokens over a sequence's tiles.

The heads of a group share one matrix operand: row r of a block is head r % group of token r // group, so one
pass over the keys of a KV head serves the whole group. K and V of the new tokens are already in the pool.
"""

import triton
import triton.language as tl
from sits_plugins.attention_kv import INT4, NATIVE, NO_SCORE, load_halves, load_rows, load_tiles, rotate, tile_rows


@triton.jit
def find_block(query_starts, block, batch, block_q, BLOCK_BATCH: tl.constexpr):
    """Sequence and block within it that the grid's block number stands for.

    Sequence s begins at block query_starts[s] // block_q + s: at most one block a sequence stays empty, and
    tokens // block_q + batch blocks are enough without knowing the lengths.
    """
    begun = 0
    for start in range(0, batch, BLOCK_BATCH):
        lanes = start + tl.arange(0, BLOCK_BATCH)
        first = tl.load(query_starts + lanes, mask=lanes < batch, other=0) // block_q
        begun += tl.sum(((first + lanes <= block) & (lanes < batch)).to(tl.int32))
    sequence = begun - 1
    return sequence, block - (tl.load(query_starts + sequence) // block_q + sequence)


@triton.jit
def _attend(
    pool, pool_scales, table, table_width, q1, q2, top, norm, out1, out2, begin, end, total, positions_q,
    num_layers, layer, kv_heads, tile_shift, head, window, score_scale,
    HEAD_DIM: tl.constexpr, KV_FORMAT: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, SPREAD: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take in the keys of steps begin..end, BLOCK_N positions each; MASKED applies causality, window and `total`."""
    row_size: tl.constexpr = HEAD_DIM // 2 if KV_FORMAT == INT4 else HEAD_DIM
    first = tl.maximum(tl.minimum(begin, end - 1), 0) * BLOCK_N
    tiles = load_tiles(table, table_width, first, tile_shift, BLOCK_N, SPREAD)
    for step in tl.range(begin, end, num_stages=STAGES):
        start = step * BLOCK_N
        positions = start + tl.arange(0, BLOCK_N)
        there = positions < total
        rows = tile_rows(tiles, start, num_layers, layer, kv_heads, head, tile_shift, BLOCK_N, SPREAD)
        ahead = tl.minimum(step + 1, end - 1) * BLOCK_N
        tiles = load_tiles(table, table_width, ahead, tile_shift, BLOCK_N, SPREAD)
        k1, k2 = load_rows(pool + rows * row_size, there, HEAD_DIM, HALF, KV_FORMAT, DTYPE, False)
        scores = tl.dot(q1, tl.trans(k1))
        scores = tl.dot(q2, tl.trans(k2), scores)
        v_rows = rows + (kv_heads << tile_shift)
        if KV_FORMAT == NATIVE:
            scores = scores * score_scale
        else:
            k_scales = tl.load(pool_scales + rows, mask=there, other=0.0).to(tl.float32)
            v_scales = tl.load(pool_scales + v_rows, mask=there, other=0.0).to(tl.float32)
            scores = scores * (k_scales * score_scale)[None, :]
        if MASKED:
            seen = (positions[None, :] <= positions_q[:, None]) & there[None, :]
            if window > 0:
                seen = seen & (positions[None, :] > positions_q[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        keep = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        norm = norm * keep + tl.sum(weights, 1)
        if KV_FORMAT != NATIVE:
            weights = weights * v_scales[None, :]
        v1, v2 = load_rows(pool + v_rows * row_size, there, HEAD_DIM, HALF, KV_FORMAT, DTYPE, MASKED)
        weights = weights.to(DTYPE)
        out1 = tl.dot(weights, v1, out1 * keep[:, None])
        out2 = tl.dot(weights, v2, out2 * keep[:, None])
        top = higher
    return top, norm, out1, out2


@triton.jit
def attention_prefill(
    qkv, out, pool, pool_scales, tile_table, context_lens, query_starts, rope_table,
    batch, table_width, num_layers, layer, kv_heads, group, tile_shift, window, decode_limit, softmax_scale,
    HEAD_DIM: tl.constexpr, KV_FORMAT: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPREAD: tl.constexpr, BLOCK_BATCH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Causal attention of every sequence with more than decode_limit new tokens.

    Grid: (kv_heads, tokens // block_q + batch) with block_q = BLOCK_M // group tokens a block. Later blocks have
    more keys and come first. Arguments as of `attention_decode`; group is at most BLOCK_M.
    """
    block_q = BLOCK_M // group
    DTYPE: tl.constexpr = pool.dtype.element_ty if KV_FORMAT == NATIVE else qkv.dtype.element_ty
    head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, block = find_block(query_starts, number, batch, block_q, BLOCK_BATCH)
    begin = tl.load(query_starts + sequence)
    new = tl.load(query_starts + sequence + 1) - begin
    if (block * block_q >= new) | (new <= decode_limit):
        return
    context = tl.load(context_lens + sequence)
    rows = tl.arange(0, BLOCK_M)
    token = block * block_q + rows // group
    mine = (rows < block_q * group) & (token < new)
    positions = context + token
    sources = qkv + (begin + token).to(tl.int64) * ((group + 2) * kv_heads * HEAD_DIM)
    q1, q2 = load_halves(sources + (head * group + rows % group) * HEAD_DIM, mine, HEAD_DIM, HALF)
    cosine, sine = load_halves(rope_table + positions.to(tl.int64) * HEAD_DIM, mine, HEAD_DIM, HALF)
    q1, q2 = rotate(q1, q2, cosine, sine)
    q1, q2 = q1.to(DTYPE), q2.to(DTYPE)
    earliest = context + block * block_q
    total = tl.minimum(earliest + block_q, context + new)
    table = tile_table + sequence.to(tl.int64) * table_width
    low = tl.where(window > 0, tl.maximum(earliest + 1 - window, 0), 0) // BLOCK_N
    open_to_all = tl.where(window > 0, low, (earliest + 1) // BLOCK_N)
    top = tl.full((BLOCK_M,), NO_SCORE, tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    out1, out2 = tl.zeros((BLOCK_M, HALF), tl.float32), tl.zeros((BLOCK_M, HALF), tl.float32)
    score_scale = softmax_scale * 1.4426950408889634
    top, norm, out1, out2 = _attend(
        pool, pool_scales, table, table_width, q1, q2, top, norm, out1, out2, low, open_to_all, total, positions,
        num_layers, layer, kv_heads, tile_shift, head, window, score_scale,
        HEAD_DIM, KV_FORMAT, HALF, DTYPE, BLOCK_N, SPREAD, STAGES, False,
    )  # fmt: skip
    top, norm, out1, out2 = _attend(
        pool, pool_scales, table, table_width, q1, q2, top, norm, out1, out2, open_to_all, tl.cdiv(total, BLOCK_N),
        total, positions, num_layers, layer, kv_heads, tile_shift, head, window, score_scale,
        HEAD_DIM, KV_FORMAT, HALF, DTYPE, BLOCK_N, SPREAD, STAGES, True,
    )  # fmt: skip
    lanes = tl.arange(0, HALF)
    targets = out + ((begin + token).to(tl.int64) * kv_heads + head) * (group * HEAD_DIM) + (rows % group) * HEAD_DIM
    places = targets[:, None] + lanes[None, :]
    keep = mine[:, None] & (lanes < HEAD_DIM // 2)[None, :]
    norm = tl.where(mine, norm, 1.0)
    tl.store(places, (out1 / norm[:, None]).to(out.dtype.element_ty), mask=keep)
    tl.store(places + HEAD_DIM // 2, (out2 / norm[:, None]).to(out.dtype.element_ty), mask=keep)
