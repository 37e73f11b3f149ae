"""From logits to one token a row without sorting: maxima, weights, then one program a row that decides.

A token's weight is exp((logit - largest) / temperature), so the largest is 1. Weights are summed as integers, in
units of 2**-43: such sums are exact, so neither their order nor the number of programs that share a row changes a
token. A weight below one unit can never be drawn. Among weights, their bits as an integer, the key, give the order.

`settings` is float64 [rows, 4]: temperature (0 takes the largest logit), top_k (0 is off), top_p (1 is off), and the
point in [0, 1) where the row's distribution is inverted.
"""

import triton
import triton.language as tl

UNITS = tl.constexpr(8796093022208.0)
LOWEST = tl.constexpr(-31.0)
"""Logarithm of a weight well below one unit."""


@triton.jit
def row_maxima(
    logits, maxima, best, best_ids, collected, vocab, groups,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(vocab / BLOCK), rows). NaN counts as infinity.

    logits: [rows, vocab]. maxima: float32 [rows, groups], the largest of every GROUP logits; groups is
    BLOCK / GROUP times the grid's width. best, best_ids: float32 and int32 [rows, MAX_BLOCKS], the largest logit of
    every BLOCK and its first id. collected: int32 [rows], set to 0.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    there = lanes < vocab
    x = tl.load(logits + row.to(tl.int64) * vocab + lanes, mask=there, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    GROUPS: tl.constexpr = BLOCK // GROUP
    largest = tl.max(tl.reshape(x, (GROUPS, GROUP)), 1)
    tl.store(maxima + row.to(tl.int64) * groups + block * GROUPS + tl.arange(0, GROUPS), largest)
    top = tl.max(largest, 0)
    tl.store(best + row * MAX_BLOCKS + block, top)
    tl.store(best_ids + row * MAX_BLOCKS + block, tl.min(tl.where((x == top) & there, lanes, vocab), 0))
    if block == 0:
        tl.store(collected + row, 0)


@triton.jit
def weigh_rows(
    logits, settings, maxima, masses, collected, listed_weights, listed_ids, vocab, groups, blocks,
    BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr, MAX_GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Sum the weights of every BLOCK, and list the tokens that top-k and top-p can leave. Grid: (any number, rows).

    masses: int64 [rows, MAX_BLOCKS]. listed_weights, listed_ids: float32 and int32 [rows, CAPACITY], in any order;
    collected: int32 [rows], their number, beyond CAPACITY where some found no room. Rows that take the largest
    logit are left out, and only rows with top-k or top-p list tokens.
    """
    row = tl.program_id(1)
    temperature = tl.load(settings + 4 * row).to(tl.float32)
    if temperature > 0:
        top_k = tl.load(settings + 4 * row + 1).to(tl.int32)
        top_p = tl.load(settings + 4 * row + 2)
        lanes = tl.arange(0, MAX_GROUPS)
        there = lanes < groups
        largest = tl.load(maxima + row.to(tl.int64) * groups + lanes, mask=there, other=float("-inf"))
        top = tl.max(largest, 0)
        bound = 0x7FFFFFFF  # which no key reaches
        if (top_k > 0) | (top_p < 1):
            bound = _lower_bound(_weight(largest, top, temperature), top_k, top_p, vocab)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
            weights = _weight(x.to(tl.float32), top, temperature)
            tl.store(masses + row * MAX_BLOCKS + block, tl.sum(_units(weights), 0))
            taken = _key(weights) >= bound
            count = tl.sum(taken.to(tl.int32), 0)
            if count > 0:
                begin = tl.atomic_add(collected + row, count, sem="relaxed")
                places = begin + tl.cumsum(taken.to(tl.int32), 0) - 1
                fits = taken & (places < CAPACITY)
                tl.store(listed_weights + row.to(tl.int64) * CAPACITY + places, weights, mask=fits)
                tl.store(listed_ids + row.to(tl.int64) * CAPACITY + places, ids, mask=fits)


@triton.jit
def pick_tokens(
    logits, settings, best, best_ids, masses, collected, listed_weights, listed_ids, tokens, vocab, blocks,
    BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Write int64 tokens [rows]: -1 where the largest logit is not a finite number. Grid: (rows,)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    listed_weights += row.to(tl.int64) * CAPACITY
    listed_ids += row.to(tl.int64) * CAPACITY
    temperature = tl.load(settings + 4 * row).to(tl.float32)
    lanes = tl.arange(0, MAX_BLOCKS)
    there = lanes < blocks
    largest = tl.load(best + row * MAX_BLOCKS + lanes, mask=there, other=float("-inf"))
    top = tl.max(largest, 0)
    first_ids = tl.load(best_ids + row * MAX_BLOCKS + lanes, mask=there, other=vocab)
    token = tl.min(tl.where(largest == top, first_ids, vocab), 0)
    if (top == float("inf")) | (top == float("-inf")):
        token = -1
    elif temperature > 0:
        top_k = tl.load(settings + 4 * row + 1).to(tl.int32)
        top_p = tl.load(settings + 4 * row + 2)
        point = tl.load(settings + 4 * row + 3)
        sums = tl.load(masses + row * MAX_BLOCKS + lanes, mask=there, other=0)
        if (top_k > 0) | (top_p < 1):
            count = tl.load(collected + row)
            listed = count <= CAPACITY
            size = tl.where(listed, count, vocab)
            last = _last_kept(
                logits, listed_weights, listed, size, top, temperature, top_k, top_p, tl.sum(sums, 0), BLOCK
            )
            if listed:
                token = _invert_list(listed_weights, listed_ids, size, last, point, BLOCK)
            else:
                sums = _kept_masses(logits, vocab, blocks, top, temperature, last, BLOCK, MAX_BLOCKS)
                token = _invert_row(logits, vocab, sums, top, temperature, last, point, BLOCK, MAX_BLOCKS)
        else:
            token = _invert_row(logits, vocab, sums, top, temperature, 0, point, BLOCK, MAX_BLOCKS)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _weight(x, top, temperature):
    """Return the weights, 0 to 1 and float32, of logits. The quotients are rounded before they are subtracted."""
    below = tl.div_rn(x, temperature) - tl.div_rn(top, temperature)
    # Both quotients may be infinite: their difference then is no number, and not above LOWEST.
    return tl.where(x == top, 1.0, tl.where(below > LOWEST, tl.exp(below), 0.0))


@triton.jit
def _key(weights):
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def _units(weights):
    return (weights * UNITS).to(tl.int64)


@triton.jit
def _lower_bound(maxima, top_k, top_p, vocab):
    """Return a key, at least 1, that no last kept token is below, from the largest weights of the row's groups.

    The k-th largest weight is at least the k-th largest of the maxima. Without top-k, the tokens from the last kept
    one downwards weigh more than the part 1 - top_p of all, and none of them, `vocab` at most, more than it does.
    """
    bound = 0
    if top_k > 0:
        for step in range(12):
            tried = bound + (1 << (29 - step))
            bound = tl.where(tl.sum((_key(maxima) >= tried).to(tl.int32), 0) >= top_k, tried, bound)
    else:
        # The factor covers the roundings of this line.
        bound = _key((tl.sum(maxima, 0) * 0.999 * (1 - top_p) / vocab).to(tl.float32))
    return tl.maximum(bound, 1)


@triton.jit
def _weights_at(logits, listed_weights, listed, lanes, size, top, temperature):
    """Return the weights at `lanes` of the list, or of the row where there is none; 0 beyond `size`."""
    if listed:
        weights = tl.load(listed_weights + lanes, mask=lanes < size, other=0.0)
    else:
        x = tl.load(logits + lanes, mask=lanes < size, other=float("-inf")).to(tl.float32)
        weights = _weight(x, top, temperature)
    return weights


@triton.jit
def _last_kept(logits, listed_weights, listed, size, top, temperature, top_k, top_p, total, BLOCK: tl.constexpr):
    """Return the key of the last token that top-k and then top-p leave; tokens with the same key are left, too.

    Top-p counts from the mass that top-k leaves, that is, of exactly k tokens.
    """
    last = 0
    mass = total
    if top_k > 0:
        last = _largest_key(
            logits, listed_weights, listed, size, top, temperature, top_k.to(tl.int64), BLOCK, COUNT=True
        )
        mass = _mass_of(logits, listed_weights, listed, size, top, temperature, last, top_k, BLOCK)
    if top_p < 1:
        wanted = top_p * mass.to(tl.float64)
        goal = wanted.to(tl.int64)
        goal = tl.maximum(goal + (goal.to(tl.float64) < wanted).to(tl.int64), 1)
        key = _largest_key(logits, listed_weights, listed, size, top, temperature, goal, BLOCK, COUNT=False)
        last = tl.maximum(last, key)
    return last


@triton.jit
def _largest_key(
    logits, listed_weights, listed, size, top, temperature, goal, BLOCK: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Return the largest key for which the tokens that reach it are `goal` in number or units, 0 if there is none.

    Two bits of it at a time, from the highest that a weight up to 1 can have.
    """
    found = 0
    for digit in range(15):
        unit = 1 << (28 - 2 * digit)
        one = tl.zeros((BLOCK,), tl.int64)
        two = tl.zeros((BLOCK,), tl.int64)
        three = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, size, BLOCK):
            weights = _weights_at(
                logits, listed_weights, listed, start + tl.arange(0, BLOCK), size, top, temperature
            )  # fmt: skip
            keys = _key(weights)
            amounts = tl.full((BLOCK,), 1, tl.int64) if COUNT else _units(weights)
            one += tl.where(keys >= found + unit, amounts, 0)
            two += tl.where(keys >= found + 2 * unit, amounts, 0)
            three += tl.where(keys >= found + 3 * unit, amounts, 0)
        reached = (tl.sum(one, 0) >= goal).to(tl.int32) + (tl.sum(two, 0) >= goal).to(tl.int32)
        found += unit * (reached + (tl.sum(three, 0) >= goal).to(tl.int32))
    return found


@triton.jit
def _mass_of(logits, listed_weights, listed, size, top, temperature, last, top_k, BLOCK: tl.constexpr):
    """Return the units of the `top_k` largest weights, of which the key of the last is `last`."""
    above = tl.zeros((BLOCK,), tl.int64)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        weights = _weights_at(
            logits, listed_weights, listed, start + tl.arange(0, BLOCK), size, top, temperature
        )  # fmt: skip
        over = _key(weights) > last
        above += tl.where(over, _units(weights), 0)
        count += over.to(tl.int32)
    return tl.sum(above, 0) + (top_k - tl.sum(count, 0)) * _units(last.to(tl.float32, bitcast=True))


@triton.jit
def _target(point, total):
    """Return the units that the running sum has to pass."""
    return tl.minimum((point * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _invert_list(weights, ids, size, last, point, BLOCK: tl.constexpr):
    """Return the id at which the running sum of kept weights, in the order of ids, passes its `point` part.

    It is the largest id such that what lies before it does not: two bits of it at a time.
    """
    kept = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, size, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        here = tl.load(weights + lanes, mask=lanes < size, other=0.0)
        kept += tl.where(_key(here) >= last, _units(here), 0)
    target = _target(point, tl.sum(kept, 0))
    found = 0
    for digit in range(10):
        unit = 1 << (18 - 2 * digit)
        one = tl.zeros((BLOCK,), tl.int64)
        two = tl.zeros((BLOCK,), tl.int64)
        three = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, size, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            here = tl.load(weights + lanes, mask=lanes < size, other=0.0)
            places = tl.load(ids + lanes, mask=lanes < size, other=0)
            amounts = tl.where(_key(here) >= last, _units(here), 0)
            one += tl.where(places < found + unit, amounts, 0)
            two += tl.where(places < found + 2 * unit, amounts, 0)
            three += tl.where(places < found + 3 * unit, amounts, 0)
        passed = (tl.sum(one, 0) <= target).to(tl.int32) + (tl.sum(two, 0) <= target).to(tl.int32)
        found += unit * (passed + (tl.sum(three, 0) <= target).to(tl.int32))
    return found


@triton.jit
def _kept_masses(
    logits, vocab, blocks, top, temperature, last, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr
):  # fmt: skip
    """Return int64 [MAX_BLOCKS]: the units in every block of a row of the tokens whose key is at least `last`."""
    sums = tl.zeros((MAX_BLOCKS,), tl.int64)
    for block in range(blocks):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        weights = _weight(x, top, temperature)
        mass = tl.sum(tl.where(_key(weights) >= last, _units(weights), 0), 0)
        sums = tl.where(tl.arange(0, MAX_BLOCKS) == block, mass, sums)
    return sums


@triton.jit
def _invert_row(
    logits, vocab, sums, top, temperature, last, point, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr
):  # fmt: skip
    """Return the id at which the running sum of the row's kept weights, `sums` by blocks, passes its `point` part."""
    target = _target(point, tl.sum(sums, 0))
    block = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, MAX_BLOCKS) < block, sums, 0), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    weights = _weight(x, top, temperature)
    amounts = tl.where(_key(weights) >= last, _units(weights), 0)
    return block * BLOCK + tl.sum((before + tl.cumsum(amounts, 0) <= target).to(tl.int32), 0)
