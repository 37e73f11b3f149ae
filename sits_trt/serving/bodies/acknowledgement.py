"""How the executor model learns that an ensemble's client has gone.

Triton 2.51 tells the model that a client called of its leaving, but not the steps of an ensemble: it drops their
responses from then on. So each response to an ensemble carries a ticket, which postprocessing acknowledges in a table
that both processes have mapped. A ticket still missing after postprocessing has worked off all that it had been given
was dropped, whatever the load.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sits_trt.serving.room import room

SLOTS = 4096
STRIKES = 2
"""Misses before a client counts as gone: with several postprocessing instances one may still be at work."""


def table_path() -> Path:
    """Return the table's file, one for each running server."""
    return room() / f"sits-trt-tickets-{os.getppid()}"


class TicketTable:
    """The highest number acknowledged in each slot, in a file mapped by two processes."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.truncate(SLOTS * 8)
        with path.open("r+b") as file:
            self._numbers = np.frombuffer(mmap.mmap(file.fileno(), SLOTS * 8), dtype=np.int64)

    def acknowledge(self, slot: int, number: int) -> None:
        # Slots are used again, numbers only rise: a late one must not hide a newer one.
        self._numbers[slot] = max(self._numbers[slot], number)

    def acknowledged(self, slot: int) -> int:
        return int(self._numbers[slot])


class Track:
    """The tickets of one stream of responses. `sent` is the last one's number."""

    def __init__(self, slot: int, numbers: itertools.count[int]) -> None:
        self.slot = slot
        self.sent = 0
        self.expected = 0
        self.strikes = 0
        self._numbers = numbers

    def ticket(self) -> tuple[int, int]:
        """Return slot and number for the next response."""
        self.sent = next(self._numbers)
        return self.slot, self.sent


class Tickets:
    """Hands out tracks and finds those whose receiver has gone.

    `work_off()` returns True once postprocessing has done all that it had been given before the call.
    """

    def __init__(self, table: TicketTable, work_off: Callable[[], bool]) -> None:
        self._table = table
        self._work_off = work_off
        self._numbers = itertools.count(1)
        self._free = list(range(SLOTS))

    def open(self) -> Track | None:
        """Return a new track, None when all slots are taken: that stream is then not watched."""
        return Track(self._free.pop(), self._numbers) if self._free else None

    def close(self, track: Track) -> None:
        self._free.append(track.slot)

    def gone(self, tracks: Sequence[Track]) -> list[Track]:
        """Return the tracks of which a response was dropped. To be called again and again, at some distance."""
        late = [t for t in tracks if self._table.acknowledged(t.slot) < t.expected]
        if late and self._work_off():
            for track in late:
                missing = self._table.acknowledged(track.slot) < track.expected
                track.strikes = track.strikes + 1 if missing else 0
        for track in tracks:
            if self._table.acknowledged(track.slot) >= track.expected:
                track.expected = track.sent
        return [track for track in late if track.strikes >= STRIKES]
