"""How prefills share the tokens of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """What one prefill could use.

    rank: smaller comes first (priority, then arrival). pending: tokens it still needs, at least 1. offset: tokens
    already in its current tile. names: names of the tiles that its next tokens fill, the current one first.
    can_wait: whether it would take over the current tile if another sequence filled it.
    """

    rank: tuple[int, int]
    pending: int
    offset: int = 0
    names: Sequence[bytes] = ()
    can_wait: bool = False


def share_budget(budget: int, claims: Sequence[Claim], tile_tokens: int) -> list[int]:
    """Return how many tokens each claim gets of `budget`, in the order given.

    The first in rank gets half of the budget, so whatever arrives later, it takes at most twice its own time. What
    is left goes to priorities in turn, within one priority to the fewest pending tokens first: a short prompt behind
    a long one has its first token in the next step, and prompts of equal length finish one after the other instead
    of all together at the end (shortest remaining time first has the least mean wait).

    When there is not enough for all, a claim whose current tile is filled in this very step by another one gets
    nothing: it takes the tile over in the next step, and its tokens go to others now.
    """
    shares = [0] * len(claims)
    coming: set[bytes] = set()
    if not claims:
        return shares

    def give(index: int, most: int) -> int:
        claim = claims[index]
        extra = min(most, claim.pending - shares[index])
        shares[index] += extra
        coming.update(claim.names[: (claim.offset + shares[index]) // tile_tokens])
        return extra

    contended = sum(claim.pending for claim in claims) > budget
    first = min(range(len(claims)), key=lambda index: claims[index].rank)
    budget -= give(first, (budget + 1) // 2)

    def turn(index: int) -> tuple[int, int, tuple[int, int]]:
        claim = claims[index]
        return claim.rank[0], claim.pending - shares[index], claim.rank

    for index in sorted(range(len(claims)), key=turn):
        claim = claims[index]
        waits = contended and index != first and claim.can_wait and claim.names[0] in coming
        if not waits:
            budget -= give(index, budget)
    return shares
