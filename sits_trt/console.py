"""What the command line shows: progress bars with time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ProgressCallback = Callable[[int, int, str], None]
"""Called with the steps done, the steps in all, and what is being done now."""

PLAIN_INTERVAL_S = 10.0
"""Where there is no terminal, a stage reports at most this often."""


@contextmanager
def stage_progress(console: Console, name: str) -> Iterator[ProgressCallback]:
    """Show one stage's progress for as long as the block runs; yields the callback that moves it."""
    if not console.is_terminal:
        yield _plain(console, name)
        return
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[what]}"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(name, total=None, what="")

        def update(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total, what=what)

        yield update


def _plain(console: Console, name: str) -> ProgressCallback:
    began = time.monotonic()
    last = began

    def update(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_INTERVAL_S or not done:
            return
        last = now
        left_s = (now - began) / done * (total - done)
        console.print(f"  {name}: {done}/{total} {what}, about {left_s:.0f} s left", markup=False, highlight=False)

    return update
