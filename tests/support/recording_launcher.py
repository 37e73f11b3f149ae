"""A launcher that computes nothing."""

from __future__ import annotations

from typing import Any


class RecordingLauncher:
    """Writes down what it is asked to launch: name, grid and arguments."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any, Any]] = []

    def launch(self, name: str, grid: Any, args: Any, stream: int) -> None:
        self.launches.append((name, grid, args))
