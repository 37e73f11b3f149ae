"""Prefill attention for SM 9.0: one warp brings tiles by TMA, two warpgroups multiply with wgmma.

BOX keys of a tile (64, or 16 for smaller tiles) are one box to the copy engine. Each warpgroup owns 64 rows of a
block (rows as in `attention_prefill`). It starts the scores of the next step before it adds up the values of the
last one, so that the softmax of one step runs beside the products of another. The programs stay resident and take
blocks in falling order of length, every second round backwards, which evens out the causal triangle.

Boxes beyond a sequence's end are replaced by its last one, and the rows of its tile behind the last token hold
zeros in V (`attention_append` sees to it): a masked key has weight 0, which only a finite value survives.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Releases of OpenAI Triton before 3.9 call it async_copy_global_to_shared, and 3.9 keeps that name only to refuse it.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _locate(number, query_starts, context_lens, batch, window, decode_limit, block_q, KEYS: gl.constexpr):
    """What block `number` of the grid's order is: (sequence, first row in qkv, its position, rows, steps low..high).

    high is 0 where there is nothing to do. Numbers as of `attention_prefill.find_block`.
    """
    low, high = 0, batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(query_starts + middle) // block_q + middle <= number:
            low = middle
        else:
            high = middle - 1
    start = gl.load(query_starts + low)
    new = gl.load(query_starts + low + 1) - start
    skipped = (number - start // block_q - low) * block_q
    rows = gl.minimum(new - skipped, block_q)
    position = gl.load(context_lens + low) + skipped
    first = gl.where(window > 0, gl.maximum(position + 1 - window, 0), 0) // KEYS
    last = gl.where((rows > 0) & (new > decode_limit), (position + rows + KEYS - 1) // KEYS, 0)
    return low, start + skipped, position, rows, first, last


@gluon.jit
def _item(turn):
    """The number of this program's `turn`-th item."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _producer(
    descriptor, tile_table, context_lens, query_starts, k_keys, v_keys, k_full, k_empty, v_full, v_empty,
    blocks, batch, table_width, num_layers, layer, kv_heads, group, tile_shift, window, decode_limit,
    KEYS: gl.constexpr, BOX: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the rings of K and V tiles, last step of an item first."""
    turn, count = 0, 0
    while turn * gl.num_programs(0) < blocks * kv_heads:
        item = _item(turn)
        turn += 1
        if item < blocks * kv_heads:
            head = item % kv_heads
            sequence, _row, position, rows, first, last = _locate(
                blocks - 1 - item // kv_heads, query_starts, context_lens, batch, window, decode_limit,
                128 // group, KEYS,
            )  # fmt: skip
            table = tile_table + sequence.to(gl.int64) * table_width
            final = (position + rows - 1) // BOX * BOX
            step = last - 1
            while step >= first:
                slot = count % STAGES
                phase = (count // STAGES) & 1
                for side in gl.static_range(2):
                    full = (k_full if side == 0 else v_full).index(slot)
                    keys = k_keys if side == 0 else v_keys
                    mbarrier.wait((k_empty if side == 0 else v_empty).index(slot), phase ^ 1)
                    mbarrier.expect(full, KEYS // BOX * PARTS * descriptor.nbytes_per_cta)
                    for piece in gl.static_range(KEYS // BOX):
                        start = gl.minimum(step * KEYS + piece * BOX, final)
                        place = gl.load(table + (start >> tile_shift))
                        row = ((place * num_layers + layer) * 2 + side) * kv_heads + head
                        row = (row << tile_shift) + (start & ((1 << tile_shift) - 1))
                        for part in gl.static_range(PARTS):
                            box = keys.index(slot * PARTS + part).slice(piece * BOX, BOX)
                            load_tile(descriptor, [row, part * 64], full, box)
                count += 1
                step -= 1


@gluon.jit
def _scores(q_rows, k_keys, slot, KEYS: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Start q @ K.T of a step: a pending accumulator [64, KEYS]."""
    scores = warpgroup_mma(
        q_rows.index(0), k_keys.index(slot * PARTS).permute((1, 0)), gl.zeros([64, KEYS], gl.float32, layout),
        use_acc=False, is_async=True,
    )  # fmt: skip
    if PARTS == 2:
        scores = warpgroup_mma(q_rows.index(1), k_keys.index(slot * PARTS + 1).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _add_values(weights, v_keys, slot, out1, out2, PARTS: gl.constexpr):
    """Start out + weights @ V of a step, out in parts of 64 lanes."""
    out1 = warpgroup_mma(weights, v_keys.index(slot * PARTS), out1, is_async=True)
    if PARTS == 2:
        out2 = warpgroup_mma(weights, v_keys.index(slot * PARTS + 1), out2, is_async=True)
    return out1, out2


@gluon.jit
def _softmax(scores, step, positions, top, window, score_scale, MASKED: gl.constexpr, KEYS: gl.constexpr,
             layout: gl.constexpr):  # fmt: skip
    """(weights [64, KEYS], new maximum, factor for what was summed before, sum of the weights) of a step."""
    if MASKED:
        keys = step * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        seen = keys[None, :] <= positions[:, None]
        seen = seen & ((keys[None, :] > positions[:, None] - window) | (window == 0))
        scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * score_scale)
    weights = gl.exp2(scores * score_scale - higher[:, None])
    return weights, higher, gl.exp2(top - higher), gl.sum(weights, 1)


@gluon.jit
def _steps(
    q_rows, weights, out1, out2, top, norm, positions, step, end, count,
    k_keys, v_keys, k_full, k_empty, v_full, v_empty, window, score_scale,
    DTYPE: gl.constexpr, MASKED: gl.constexpr, KEYS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    s_layout: gl.constexpr, p_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Go down from `step` to `end`: scores of this step beside the values of the step before it."""
    mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1, pred=step >= end)
    while step >= end:
        slot = count % STAGES
        before = (count - 1) % STAGES
        scores = _scores(q_rows, k_keys, slot, KEYS, PARTS, s_layout)
        mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
        out1, out2 = _add_values(weights, v_keys, before, out1, out2, PARTS)
        scores = warpgroup_mma_wait(PARTS, deps=[scores])
        mbarrier.arrive(k_empty.index(slot), count=1)
        fresh, top, keep, total = _softmax(scores, step, positions, top, window, score_scale, MASKED, KEYS, s_layout)
        norm = norm * keep + total
        keep = gl.convert_layout(keep, gl.SliceLayout(1, o_layout))[:, None]
        fresh = gl.convert_layout(fresh.to(DTYPE), p_layout)
        # Looking for the next keys here parts the softmax from the wait for the values, behind which the
        # assembler would otherwise move all of it.
        after = count + 1
        mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=step > end)
        if PARTS == 2:
            out1, out2, weights, fresh = warpgroup_mma_wait(0, deps=[out1, out2, weights, fresh])
            out2 = out2 * keep
        else:
            out1, weights, fresh = warpgroup_mma_wait(0, deps=[out1, weights, fresh])
        mbarrier.arrive(v_empty.index(before), count=1)
        out1 = out1 * keep
        weights = fresh
        count += 1
        step -= 1
    return weights, out1, out2, top, norm, step, count


@gluon.jit
def _consumer(
    WHICH: gl.constexpr, qkv, out, context_lens, query_starts, rope_table, q_rows,
    k_keys, v_keys, k_full, k_empty, v_full, v_empty, blocks, batch, kv_heads, group, window, decode_limit,
    softmax_scale, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rows WHICH*64 .. WHICH*64+63 of every item of this program; `q_rows` is its [parts, 64, 64] buffer."""
    DTYPE: gl.constexpr = q_rows.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, row_layout))
    score_rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    score_scale = softmax_scale * 1.4426950408889634
    turn, count = 0, 0
    while turn * gl.num_programs(0) < blocks * kv_heads:
        item = _item(turn)
        turn += 1
        number = gl.where(item < blocks * kv_heads, blocks - 1 - item // kv_heads, 0)
        _sequence, start, position, there, first, last = _locate(
            number, query_starts, context_lens, batch, window, decode_limit, 128 // group, KEYS
        )
        if (item < blocks * kv_heads) & (last > first):
            head = item % kv_heads
            token = rows // group
            mine = (token < there)[:, None]
            source = qkv + (start + token).to(gl.int64)[:, None] * ((group + 2) * kv_heads * HEAD_DIM)
            source += ((head * group + rows % group) * HEAD_DIM)[:, None]
            turns = rope_table + (position + token).to(gl.int64)[:, None] * HEAD_DIM
            for part in gl.static_range(PARTS):
                lanes = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, row_layout))
                across = ((lanes + HEAD_DIM // 2) % HEAD_DIM)[None, :]
                angles = turns + (lanes % (HEAD_DIM // 2))[None, :]
                straight = gl.load(source + lanes[None, :], mask=mine, other=0.0).to(gl.float32)
                turned = gl.load(source + across, mask=mine, other=0.0).to(gl.float32)
                turned = turned * gl.where(lanes < HEAD_DIM // 2, -1.0, 1.0)[None, :]
                cosine = gl.load(angles, mask=mine, other=0.0)
                sine = gl.load(angles + HEAD_DIM // 2, mask=mine, other=0.0)
                q_rows.index(part).store((straight * cosine + turned * sine).to(DTYPE))
            fence_async_shared()
            gl.barrier()
            positions = position + score_rows // group
            open_to_all = gl.where(window > 0, first, (position + 1) // KEYS)
            top = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, s_layout))
            out1 = gl.zeros([64, 64], gl.float32, o_layout)
            out2 = out1
            step = last - 1
            slot = count % STAGES
            mbarrier.wait(k_full.index(slot), (count // STAGES) & 1)
            scores = _scores(q_rows, k_keys, slot, KEYS, PARTS, s_layout)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(slot), count=1)
            fresh, top, _keep, norm = _softmax(scores, step, positions, top, window, score_scale, True, KEYS, s_layout)
            weights = gl.convert_layout(fresh.to(DTYPE), p_layout)
            count += 1
            step -= 1
            weights, out1, out2, top, norm, step, count = _steps(
                q_rows, weights, out1, out2, top, norm, positions, step, open_to_all, count,
                k_keys, v_keys, k_full, k_empty, v_full, v_empty, window, score_scale,
                DTYPE, True, KEYS, PARTS, STAGES, s_layout, p_layout, o_layout,
            )  # fmt: skip
            weights, out1, out2, top, norm, step, count = _steps(
                q_rows, weights, out1, out2, top, norm, positions, step, first, count,
                k_keys, v_keys, k_full, k_empty, v_full, v_empty, window, score_scale,
                DTYPE, False, KEYS, PARTS, STAGES, s_layout, p_layout, o_layout,
            )  # fmt: skip
            before = (count - 1) % STAGES
            mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
            out1, out2 = _add_values(weights, v_keys, before, out1, out2, PARTS)
            norm = gl.convert_layout(norm, gl.SliceLayout(1, o_layout))[:, None]
            if PARTS == 2:
                out1, out2, weights = warpgroup_mma_wait(0, deps=[out1, out2, weights])
                q_rows.index(1).store((out2 / norm).to(DTYPE))
            else:
                out1, weights = warpgroup_mma_wait(0, deps=[out1, weights])
            mbarrier.arrive(v_empty.index(before), count=1)
            q_rows.index(0).store((out1 / norm).to(DTYPE))
            gl.barrier()
            target = out + (start + token).to(gl.int64)[:, None] * (group * kv_heads * HEAD_DIM)
            target += ((head * group + rows % group) * HEAD_DIM)[:, None]
            for part in gl.static_range(PARTS):
                lanes = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, row_layout))
                gl.store(
                    target + lanes[None, :], q_rows.index(part).load(row_layout).to(out.dtype.element_ty), mask=mine
                )
            gl.barrier()


@gluon.jit
def _first_consumer(
    qkv, out, context_lens, query_starts, rope_table, q_rows,
    k_keys, v_keys, k_full, k_empty, v_full, v_empty, blocks, batch, kv_heads, group, window, decode_limit,
    softmax_scale, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _consumer(0, qkv, out, context_lens, query_starts, rope_table, q_rows,
              k_keys, v_keys, k_full, k_empty, v_full, v_empty, blocks, batch, kv_heads, group, window, decode_limit,
              softmax_scale, HEAD_DIM, KEYS, STAGES)  # fmt: skip


@gluon.jit
def _second_consumer(
    qkv, out, context_lens, query_starts, rope_table, q_rows,
    k_keys, v_keys, k_full, k_empty, v_full, v_empty, blocks, batch, kv_heads, group, window, decode_limit,
    softmax_scale, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _consumer(1, qkv, out, context_lens, query_starts, rope_table, q_rows,
              k_keys, v_keys, k_full, k_empty, v_full, v_empty, blocks, batch, kv_heads, group, window, decode_limit,
              softmax_scale, HEAD_DIM, KEYS, STAGES)  # fmt: skip


@gluon.jit
def attention_prefill_hopper(
    qkv, out, pool, tile_table, context_lens, query_starts, rope_table,
    tokens, batch, num_tiles, table_width, num_layers, layer, kv_heads, group, tile_shift, window, decode_limit,
    softmax_scale, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """`attention_prefill` for a NATIVE pool, HEAD_DIM 64 or 128, tiles of BOX tokens or more.

    Any one-dimensional grid, 4 warps (and 8 more for the other two roles). Blocks have 128 // group tokens;
    steps have KEYS keys (64 or 128), STAGES of them in flight.
    """
    DTYPE: gl.constexpr = pool.dtype.element_ty
    PARTS: gl.constexpr = HEAD_DIM // 64
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    pool_rows = num_tiles * num_layers * (2 * (kv_heads << tile_shift))
    descriptor = tma.make_tensor_descriptor(pool, [pool_rows, HEAD_DIM], [HEAD_DIM, 1], [BOX, 64], layout)
    q_first = gl.allocate_shared_memory(DTYPE, [PARTS, 64, 64], layout)
    q_second = gl.allocate_shared_memory(DTYPE, [PARTS, 64, 64], layout)
    k_keys = gl.allocate_shared_memory(DTYPE, [STAGES * PARTS, KEYS, 64], layout)
    v_keys = gl.allocate_shared_memory(DTYPE, [STAGES * PARTS, KEYS, 64], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    blocks = tokens // (128 // group) + batch
    gl.warp_specialize(
        [
            (_first_consumer, (
                qkv, out, context_lens, query_starts, rope_table, q_first,
                k_keys, v_keys, k_full, k_empty, v_full, v_empty, blocks, batch, kv_heads, group, window, decode_limit,
                softmax_scale, HEAD_DIM, KEYS, STAGES,
            )),
            (_second_consumer, (
                qkv, out, context_lens, query_starts, rope_table, q_second,
                k_keys, v_keys, k_full, k_empty, v_full, v_empty, blocks, batch, kv_heads, group, window, decode_limit,
                softmax_scale, HEAD_DIM, KEYS, STAGES,
            )),
            (_producer, (
                descriptor, tile_table, context_lens, query_starts, k_keys, v_keys, k_full, k_empty, v_full, v_empty,
                blocks, batch, table_width, num_layers, layer, kv_heads, group, tile_shift, window, decode_limit,
                KEYS, BOX, PARTS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
