"""The folder that a server and its Python bodies share while the server runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

ROOM_VARIABLE = "SITS_TRT_ROOM"

STOP_FILE = "stop"
"""Appears in the room when what is still in flight has to end."""

IDLE_FILE = "idle"
"""The executor's answer to it, once nothing is in flight."""


def room() -> Path:
    """Return the room of the server that this process belongs to, the temporary folder where it has none."""
    return Path(os.environ.get(ROOM_VARIABLE) or tempfile.gettempdir())


def is_stopping() -> bool:
    """Whether the server wants everything in flight to end."""
    return ROOM_VARIABLE in os.environ and (room() / STOP_FILE).exists()
