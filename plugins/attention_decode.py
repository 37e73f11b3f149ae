"""Decode attention: few new tokens a sequence, work split evenly over the programs whatever the lengths are.

A unit of work is BLOCK_N keys of one new token and one KV head. Units are numbered sequence by sequence,
token by token, head by head; program p takes the p-th run of equal length. A (token, head) pair that lies in
one run is finished there; otherwise each program leaves a partial result, and the last one to arrive combines
them. A program holds at most two partials: slot 0 for the pair in which its run begins, slot 1 for the pair
that begins inside its run and goes on in the next.

The keys and values of new tokens are taken from qkv and written to the pool by whoever has the pair's last
unit, so the pool is only read for tokens of earlier steps and needs no order among programs.
"""

import triton
import triton.language as tl
from sits_plugins.attention_kv import (
    INT4,
    NATIVE,
    NO_SCORE,
    decode,
    encode,
    load_halves,
    load_rows,
    load_tiles,
    pool_rows,
    rotate,
    store_rows,
    tile_rows,
)


@triton.jit
def _spans(contexts, new, window, decode_limit, BLOCK_N: tl.constexpr):
    """First unit and number of units of each pair of sequences with these lengths; 0 where others handle them."""
    lowest = tl.where(window > 0, tl.maximum(contexts + 1 - window, 0), 0)
    first = lowest // BLOCK_N
    steps = tl.maximum((contexts + BLOCK_N - 1) // BLOCK_N - first, 1)
    return first, tl.where((new > 0) & (new <= decode_limit), steps, 0)


@triton.jit
def _batch_units(context_lens, query_starts, start, batch, window, decode_limit,
                 kv_heads, BLOCK_N: tl.constexpr, BLOCK_BATCH: tl.constexpr):  # fmt: skip
    """Units of each of the sequences from `start` on, int32 [BLOCK_BATCH]."""
    lanes = start + tl.arange(0, BLOCK_BATCH)
    there = lanes < batch
    contexts = tl.load(context_lens + lanes, mask=there, other=0)
    new = tl.load(query_starts + lanes + 1, mask=there, other=0) - tl.load(query_starts + lanes, mask=there, other=0)
    _, steps = _spans(contexts, new, window, decode_limit, BLOCK_N)
    return steps * new * kv_heads


@triton.jit
def _attend_new(
    qkv, pool, pool_scales, table, rope_table, q1, q2, top, norm, out1, out2,
    row, token, context, num_layers, layer, kv_heads, group, tile_shift, head, window, score_scale,
    HEAD_DIM: tl.constexpr, KV_FORMAT: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Take in the keys and values of the sequence's new tokens up to `token`, and write that token's to the pool."""
    stride = (group + 2) * kv_heads * HEAD_DIM
    one = tl.arange(0, 1)
    for index in range(token + 1):
        position = context + index
        cosine, sine = load_halves(rope_table + position.to(tl.int64) * HEAD_DIM + one, one == 0, HEAD_DIM, HALF)
        source = qkv + (row + index).to(tl.int64) * stride + (group * kv_heads + head) * HEAD_DIM + one
        k1, k2 = load_halves(source, one == 0, HEAD_DIM, HALF)
        k1, k2 = rotate(k1, k2, cosine, sine)
        v1, v2 = load_halves(source + kv_heads * HEAD_DIM, one == 0, HEAD_DIM, HALF)
        k1, k2, k_scale = encode(k1, k2, KV_FORMAT, DTYPE)
        v1, v2, v_scale = encode(v1, v2, KV_FORMAT, DTYPE)
        if index == token:
            tile = tl.load(table + (position >> tile_shift))
            k_row = pool_rows(tile, position, num_layers, layer, kv_heads, head, tile_shift)
            v_row = k_row + (kv_heads << tile_shift)
            row_bytes: tl.constexpr = HEAD_DIM // 2 if KV_FORMAT == INT4 else HEAD_DIM
            store_rows(pool + k_row * row_bytes + one, k1, k2, one == 0, HEAD_DIM, HALF, KV_FORMAT)
            store_rows(pool + v_row * row_bytes + one, v1, v2, one == 0, HEAD_DIM, HALF, KV_FORMAT)
            if KV_FORMAT != NATIVE:
                tl.store(pool_scales + k_row + one, k_scale.to(tl.float16))
                tl.store(pool_scales + v_row + one, v_scale.to(tl.float16))
        dot = q1.to(tl.float32) * decode(k1, KV_FORMAT) + q2.to(tl.float32) * decode(k2, KV_FORMAT)
        score = tl.sum(dot, 1) * k_scale * score_scale
        if window > 0:
            score = tl.where(index > token - window, score, float("-inf"))
        higher = tl.maximum(top, score)
        keep, weight = tl.exp2(top - higher), tl.exp2(score - higher)
        norm = norm * keep + weight
        out1 = out1 * keep[:, None] + weight[:, None] * (decode(v1, KV_FORMAT) * v_scale[:, None])
        out2 = out2 * keep[:, None] + weight[:, None] * (decode(v2, KV_FORMAT) * v_scale[:, None])
        top = higher
    return top, norm, out1, out2


@triton.jit
def _attend_pool(
    pool, pool_scales, table, table_width, q1, q2, top, norm, out1, out2,
    begin, end, context, position, num_layers, layer, kv_heads, tile_shift, head, window, score_scale,
    HEAD_DIM: tl.constexpr, KV_FORMAT: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, SPREAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take in the units begin..end of a sequence's pooled keys, BLOCK_N positions each."""
    row_size: tl.constexpr = HEAD_DIM // 2 if KV_FORMAT == INT4 else HEAD_DIM
    norms = tl.zeros((q1.shape[0], BLOCK_N), tl.float32)
    # Tile ids are fetched one unit ahead: a load that hangs on a load of the same round would take half the stages.
    tiles = load_tiles(table, table_width, begin * BLOCK_N, tile_shift, BLOCK_N, SPREAD)
    for unit in tl.range(begin, end, num_stages=STAGES):
        start = unit * BLOCK_N
        positions = start + tl.arange(0, BLOCK_N)
        rows = tile_rows(tiles, start, num_layers, layer, kv_heads, head, tile_shift, BLOCK_N, SPREAD)
        ahead = tl.minimum(unit + 1, end - 1) * BLOCK_N
        tiles = load_tiles(table, table_width, ahead, tile_shift, BLOCK_N, SPREAD)
        there = positions < context
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
        seen = there
        if window > 0:
            seen = there & (positions > position - window)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        keep = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        norms = norms * keep[:, None] + weights
        if KV_FORMAT != NATIVE:
            weights = weights * v_scales[None, :]
        v1, v2 = load_rows(pool + v_rows * row_size, there, HEAD_DIM, HALF, KV_FORMAT, DTYPE, True)
        weights = weights.to(DTYPE)
        out1 = tl.dot(weights, v1, out1 * keep[:, None])
        out2 = tl.dot(weights, v2, out2 * keep[:, None])
        norm = norm * keep
        top = higher
    return top, norm + tl.sum(norms, 1), out1, out2


@triton.jit
def _combine(
    partial_out, partial_stats, target, program, programs, first_slot, group,
    HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write to `target` the sum of the partials of `programs` programs from `program` on."""
    size = group * HEAD_DIM
    for chunk in range(0, size, BLOCK_C):
        lanes = chunk + tl.arange(0, BLOCK_C)
        top = tl.full((BLOCK_C,), NO_SCORE, tl.float32)
        norm, total = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
        for start in range(0, programs, AT_ONCE):
            index = start + tl.arange(0, AT_ONCE)
            slots = (program + index) * 2 + tl.where(index == 0, first_slot, 0)
            there = (index < programs)[:, None] & (lanes < size)[None, :]
            stats = partial_stats + slots[:, None] * (2 * group) + (lanes // HEAD_DIM)[None, :]
            tops = tl.load(stats, mask=there, other=NO_SCORE, cache_modifier=".cg")
            norms = tl.load(stats + group, mask=there, other=1.0, cache_modifier=".cg")
            places = partial_out + slots[:, None].to(tl.int64) * size + lanes[None, :]
            parts = tl.load(places, mask=there, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, tl.max(tops, 0))
            keep, weights = tl.exp2(top - higher), tl.exp2(tops - higher[None, :])
            norm = norm * keep + tl.sum(norms * weights, 0)
            total = total * keep + tl.sum(parts * weights, 0)
            top = higher
        tl.store(target + lanes, (total / norm).to(target.dtype.element_ty), mask=lanes < size)


@triton.jit
def _store_heads(target, first, second, group, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Write the first `group` of [ROWS, HALF] rows to `target`, HEAD_DIM apart."""
    lanes, heads = tl.arange(0, HALF), tl.arange(0, ROWS)
    keep = (heads < group)[:, None] & (lanes < HEAD_DIM // 2)[None, :]
    places = target + heads[:, None] * HEAD_DIM + lanes[None, :]
    tl.store(places, first.to(target.dtype.element_ty), mask=keep)
    tl.store(places + HEAD_DIM // 2, second.to(target.dtype.element_ty), mask=keep)


@triton.jit
def attention_decode(
    qkv, out, pool, pool_scales, tile_table, context_lens, query_starts, rope_table,
    partial_out, partial_stats, arrivals,
    batch, table_width, num_layers, layer, kv_heads, group, tile_shift, window, decode_limit, softmax_scale,
    HEAD_DIM: tl.constexpr, KV_FORMAT: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPREAD: tl.constexpr, BLOCK_BATCH: tl.constexpr, LEAST_UNITS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_C: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """RoPE, append and attention for every sequence with 1..decode_limit new tokens; any one-dimensional grid.

    qkv, out, tile_table, context_lens, query_starts, rope_table, layer, window: as in `ops.tiled_attention`.
    pool: [tiles, num_layers, 2, kv_heads, 2**tile_shift, HEAD_DIM] of KV_FORMAT's codes; INT4 packs two in a byte.
    pool_scales: float16 of the pool's shape without its last dimension; unused for NATIVE.
    partial_out: float32 [2 * programs, group, HEAD_DIM], partial_stats: float32 [2 * programs, 2, group].
    arrivals: int32 [tokens * kv_heads], zero before and after.
    group: query heads a KV head, at most ROWS. SPREAD: tiles are smaller than BLOCK_N.
    HALF: HEAD_DIM/2 rounded up to a power of two.
    """
    DTYPE: tl.constexpr = pool.dtype.element_ty if KV_FORMAT == NATIVE else qkv.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = 0
    for start in range(0, batch, BLOCK_BATCH):
        total += tl.sum(_batch_units(context_lens, query_starts, start, batch, window, decode_limit,
                                     kv_heads, BLOCK_N, BLOCK_BATCH))  # fmt: skip
    run = tl.maximum(tl.cdiv(total, programs), LEAST_UNITS)
    unit = program * run
    end = tl.minimum(unit + run, total)
    sequence, before, passed = 0, 0, 0
    if unit < end:
        for start in range(0, batch, BLOCK_BATCH):
            units = _batch_units(context_lens, query_starts, start, batch, window, decode_limit,
                                 kv_heads, BLOCK_N, BLOCK_BATCH)  # fmt: skip
            reached = tl.cumsum(units, 0) + passed
            behind = reached <= unit
            sequence += tl.sum(behind.to(tl.int32))
            before = tl.maximum(before, tl.max(tl.where(behind, reached, 0)))
            passed += tl.sum(units)
    while unit < end:
        context = tl.load(context_lens + sequence)
        row = tl.load(query_starts + sequence)
        new = tl.load(query_starts + sequence + 1) - row
        first, steps = _spans(context, new, window, decode_limit, BLOCK_N)
        offset = unit - before
        if offset >= steps * new * kv_heads:
            before += steps * new * kv_heads
            sequence += 1
        else:
            pair = offset // steps
            step = offset - pair * steps
            stop = tl.minimum(step + end - unit, steps)
            token, head = pair // kv_heads, pair % kv_heads
            table = tile_table + sequence.to(tl.int64) * table_width
            position = context + token
            heads = tl.arange(0, ROWS)
            one = tl.arange(0, 1)
            cosine, sine = load_halves(rope_table + position.to(tl.int64) * HEAD_DIM + one, one == 0, HEAD_DIM, HALF)
            source = qkv + (row + token).to(tl.int64) * ((group + 2) * kv_heads * HEAD_DIM)
            q1, q2 = load_halves(source + (head * group + heads) * HEAD_DIM, heads < group, HEAD_DIM, HALF)
            q1, q2 = rotate(q1, q2, cosine, sine)
            q1, q2 = q1.to(DTYPE), q2.to(DTYPE)
            top = tl.full((ROWS,), NO_SCORE, tl.float32)
            norm = tl.zeros((ROWS,), tl.float32)
            out1, out2 = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
            if stop == steps:
                top, norm, out1, out2 = _attend_new(
                    qkv, pool, pool_scales, table, rope_table, q1, q2, top, norm, out1, out2,
                    row, token, context, num_layers, layer, kv_heads, group, tile_shift, head, window,
                    softmax_scale * 1.4426950408889634,
                    HEAD_DIM, KV_FORMAT, HALF, DTYPE,
                )  # fmt: skip
            top, norm, out1, out2 = _attend_pool(
                pool, pool_scales, table, table_width, q1, q2, top, norm, out1, out2,
                first + step, first + stop, context, position, num_layers, layer, kv_heads, tile_shift, head, window,
                softmax_scale * 1.4426950408889634,
                HEAD_DIM, KV_FORMAT, HALF, DTYPE, BLOCK_N, SPREAD, STAGES,
            )  # fmt: skip
            target = out + ((row + token).to(tl.int64) * kv_heads + head) * (group * HEAD_DIM)
            if stop - step == steps:
                _store_heads(target, out1 / norm[:, None], out2 / norm[:, None], group, HEAD_DIM, HALF, ROWS)
            else:
                slot = program * 2 + tl.where(unit == program * run, 0, 1)
                _store_heads(partial_out + slot.to(tl.int64) * (group * HEAD_DIM), out1, out2,
                             group, HEAD_DIM, HALF, ROWS)  # fmt: skip
                tl.store(partial_stats + slot * (2 * group) + heads, top, mask=heads < group)
                tl.store(partial_stats + slot * (2 * group) + group + heads, norm, mask=heads < group)
                begin = before + pair * steps
                earliest = begin // run
                sharers = (begin + steps - 1) // run - earliest + 1
                counter = arrivals + (row + token) * kv_heads + head
                tl.debug_barrier()
                if tl.atomic_add(counter, 1, sem="acq_rel") == sharers - 1:
                    tl.debug_barrier()
                    first_slot = tl.where(begin == earliest * run, 0, 1)
                    _combine(partial_out, partial_stats, target, earliest, sharers, first_slot, group,
                             HEAD_DIM, BLOCK_C, AT_ONCE)  # fmt: skip
                    tl.store(counter, 0)
            unit += stop - step
