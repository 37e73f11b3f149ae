"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with what is done, the total, and what is being done; the counts are in a unit of the caller's."""


def silent(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""
