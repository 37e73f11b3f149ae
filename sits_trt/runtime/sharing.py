"""How prefills share the tokens of one step."""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(budget: int, pending: Sequence[int], ranks: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many tokens each of several prefills gets of `budget`, in the order given.

    pending: tokens each still needs, at least 1. ranks: smaller comes first (priority, then arrival).

    The first in rank gets half of the budget, so whatever arrives later, it takes at most twice its own time. What
    is left goes to priorities in turn, within one priority to the fewest pending tokens first: a short prompt behind
    a long one has its first token in the next step, and prompts of equal length finish one after the other instead
    of all together at the end (shortest remaining time first has the least mean wait).
    """
    shares = [0] * len(pending)
    if not pending:
        return shares
    first = min(range(len(pending)), key=lambda index: ranks[index])
    shares[first] = min(pending[first], (budget + 1) // 2)
    budget -= shares[first]
    for index in sorted(
        range(len(pending)), key=lambda index: (ranks[index][0], pending[index] - shares[index], ranks[index])
    ):
        extra = min(budget, pending[index] - shares[index])
        shares[index] += extra
        budget -= extra
    return shares
