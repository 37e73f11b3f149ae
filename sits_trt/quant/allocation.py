"""Spending a bit budget: one choice per part of the model, so that the sum of losses is least within a cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST_UNITS = 1 << 16
"""Costs are counted in units of their greatest common divisor, or of this part of the budget where that is finer."""


@dataclass(frozen=True)
class Option:
    """One way to store a part: `cost` in bits, `loss` in any unit that adds up."""

    cost: int
    loss: float


def allocate(parts: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Return the index of the option taken for each part: least total loss with a total cost of at most `budget`.

    None when even the cheapest options cost more. The multiple-choice knapsack by dynamic programming over costs:
    exact where the costs above the cheapest options have a common divisor of at least 1/65536 of what is left to
    spend, else costs are rounded up to that. Equal losses go to the cheaper, then to the earlier option.
    """
    cheapest = [min(option.cost for option in options) for options in parts]
    left = budget - sum(cheapest)
    if left < 0:
        return None
    extra = [[option.cost - base for option in options] for options, base in zip(parts, cheapest, strict=True)]
    unit = max(math.gcd(*(cost for costs in extra for cost in costs)), -(-left // _MOST_UNITS), 1)
    room = left // unit
    # best[u]: least loss of the parts so far at a cost of exactly u units; taken[part][u]: the option it ends with.
    best = np.full(room + 1, np.inf)
    best[0] = 0
    taken = []
    for options, costs in zip(parts, extra, strict=True):
        reached, choice = np.full(room + 1, np.inf), np.zeros(room + 1, np.int16)
        for index, (option, cost) in enumerate(zip(options, costs, strict=True)):
            units = -(-cost // unit)
            if units > room:
                continue
            candidate = best[: room + 1 - units] + option.loss
            better = candidate < reached[units:]
            reached[units:][better] = candidate[better]
            choice[units:][better] = index
        best = reached
        taken.append(choice)
    place = int(best.argmin())
    chosen = []
    for choice, costs in zip(reversed(taken), reversed(extra), strict=True):
        index = int(choice[place])
        chosen.append(index)
        place -= -(-costs[index] // unit)
    return chosen[::-1]
