"""The knapsack against trying every combination."""

from __future__ import annotations

import itertools
import random

from sits_trt.quant.allocation import Option, allocate


def total(parts: list[list[Option]], chosen: list[int]) -> tuple[int, float]:
    taken = [options[index] for options, index in zip(parts, chosen, strict=True)]
    return sum(option.cost for option in taken), sum(option.loss for option in taken)


def test_as_good_as_the_best_of_all_combinations() -> None:
    rng = random.Random(0)
    for _ in range(60):
        # As in a model: few sizes, losses that fall by large and uneven steps, and sometimes do not fall at all.
        parts = []
        for _ in range(rng.randint(1, 6)):
            size = rng.choice([64, 96, 160])
            parts.append([Option(size * bits, rng.random() * 2.0**-bits) for bits in (4, 5, 8, 16)])
        least = sum(options[0].cost for options in parts)
        budget = least + rng.randint(0, least)
        every = [list(chosen) for chosen in itertools.product(range(4), repeat=len(parts))]
        feasible = [total(parts, chosen) for chosen in every if total(parts, chosen)[0] <= budget]
        chosen = allocate(parts, budget)
        assert chosen is not None
        cost, loss = total(parts, chosen)
        assert cost <= budget
        # The same sum in another order.
        assert abs(loss - min(loss for _, loss in feasible)) <= 1e-12


def test_too_small_a_budget_and_one_for_everything() -> None:
    parts = [[Option(10, 1.0), Option(7, 3.0)], [Option(5, 2.0), Option(9, 0.0)]]
    assert allocate(parts, 11) is None
    assert allocate(parts, 12) == [1, 0]
    assert allocate(parts, 1000) == [0, 1]
    assert allocate([], 0) == []


def test_equal_losses_go_to_the_cheaper_option() -> None:
    parts = [[Option(10, 1.0), Option(4, 1.0)], [Option(8, 0.0), Option(3, 0.0)]]
    assert allocate(parts, 100) == [1, 1]


def test_costs_that_share_no_unit_stay_within_the_budget() -> None:
    """A model of 40 layers with sizes of many digits: rounded up to 1/65536 of what is left, never over it."""
    rng = random.Random(1)
    parts = [
        [Option(size * bits + 1, size * 4.0**-bits) for bits in (4, 5, 8, 16)]
        for size in (rng.randint(10**6, 10**8) for _ in range(40))
    ]
    least = sum(options[0].cost for options in parts)
    for budget in (least, least + 1, int(1.3 * least), 2 * least):
        chosen = allocate(parts, budget)
        assert chosen is not None
        assert total(parts, chosen)[0] <= budget
    # Not spent is at most one unit a part, or what no option costs less than.
    assert total(parts, allocate(parts, int(1.3 * least)) or [])[0] > 1.29 * least
