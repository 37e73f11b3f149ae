"""How the executor model learns that an ensemble's client has gone.

Triton 2.51 tells the model that a client called of its leaving, but not a step of an ensemble that is at work: only
steps that begin later know it. So a streamed answer carries a ticket, and postprocessing, which begins anew for every
response, writes down in a table that both processes have mapped whose ticket came from a caller that has gone.
"""

from __future__ import annotations

import itertools
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sits_trt.serving.room import room

SLOTS = 4096


def table_path() -> Path:
    """Return the table's file, one for each running server."""
    return room() / f"sits-trt-tickets-{os.getppid()}"


@dataclass(frozen=True)
class Ticket:
    """One streamed answer: its place in the table, and a number that no other answer has."""

    slot: int
    number: int


class TicketTable:
    """In each slot the number of the last ticket whose holder has gone, in a file mapped by two processes."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.truncate(SLOTS * 8)
        with path.open("r+b") as file:
            self._gone = np.frombuffer(mmap.mmap(file.fileno(), SLOTS * 8), dtype=np.int64)

    def mark_gone(self, ticket: Ticket) -> None:
        self._gone[ticket.slot] = ticket.number

    def is_gone(self, ticket: Ticket) -> bool:
        return bool(self._gone[ticket.slot] == ticket.number)


class Tickets:
    """Hands out tickets. From any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._free = list(range(SLOTS))

    def take(self) -> Ticket | None:
        """Return a new ticket, None when all slots are taken: that answer goes on if its caller leaves."""
        return Ticket(self._free.pop(), next(self._numbers)) if self._free else None

    def give_back(self, ticket: Ticket) -> None:
        self._free.append(ticket.slot)
