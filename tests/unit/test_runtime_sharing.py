import random

import pytest

from sits_trt.runtime.sharing import Claim, share_budget

TILE = 16


def share(budget: int, *pending: int) -> list[int]:
    return share_budget(budget, [Claim((0, index), tokens) for index, tokens in enumerate(pending)], TILE)


def test_one_prefill_gets_all() -> None:
    assert share(100, 30) == [30]
    assert share(100, 300) == [100]
    assert share(100) == []
    assert share(0, 5, 5) == [0, 0]


def test_a_later_short_prompt_overtakes_an_earlier_long_one() -> None:
    assert share(100, 1000, 20) == [80, 20]


def test_the_first_keeps_half_whatever_comes() -> None:
    assert share(100, 1000, 40, 40, 40) == [50, 40, 10, 0]


def test_equal_prompts_finish_one_after_the_other() -> None:
    assert share(100, 150, 150, 150) == [100, 0, 0]
    assert share(100, 50, 150, 150) == [50, 50, 0]


def test_priority_goes_before_length() -> None:
    claims = [Claim((0, 0), 10), Claim((-1, 1), 500), Claim((-1, 2), 30)]
    assert share_budget(100, claims, TILE) == [0, 70, 30]


def test_of_prompts_that_begin_alike_one_computes_the_common_tiles() -> None:
    names = [b"a", b"b", b"c"]
    claims = [Claim((0, index), 60, 0, names, True) for index in range(3)] + [Claim((0, 9), 70, 0, [b"x"], True)]
    assert share_budget(100, claims, TILE) == [60, 0, 0, 40]
    # In the middle of a tile it is too late to wait; with room for all it is not worth it.
    late = [claims[0], Claim((0, 1), 50, 10, names, False)]
    assert share_budget(100, late, TILE) == [60, 40]
    assert share_budget(180, claims[:3], TILE) == [60, 60, 60]


def test_nobody_waits_for_a_tile_that_is_not_filled_in_this_step() -> None:
    claims = [Claim((0, 0), 60, 0, [b"a"], True), Claim((0, 1), 12, 0, [b"a"], True)]
    assert share_budget(20, claims, TILE) == [10, 10]
    # The first fills its tile from the offset on.
    claims[0] = Claim((0, 0), 60, 8, [b"a", b"b"], False)
    assert share_budget(20, claims, TILE) == [20, 0]


@pytest.mark.parametrize("seed", range(30))
def test_no_token_is_wasted_or_given_twice(seed: int) -> None:
    rng = random.Random(seed)
    claims = [Claim((-rng.randrange(2), index), rng.randrange(1, 200)) for index in range(rng.randrange(1, 10))]
    budget = rng.randrange(1, 400)
    shares = share_budget(budget, claims, TILE)
    assert all(0 <= given <= claim.pending for given, claim in zip(shares, claims, strict=True))
    assert sum(shares) == min(budget, sum(claim.pending for claim in claims))
    first = min(range(len(claims)), key=lambda index: claims[index].rank)
    assert shares[first] >= min(claims[first].pending, -(-budget // 2))
