"""Looking into an engine file without the library that reads it."""

from __future__ import annotations

import mmap
from pathlib import Path


def names_plugin(engine: Path, plugin: str) -> bool:
    """Say whether an engine file names `plugin`, as it does for every layer that calls it.

    Engines are large: the file is mapped, not read.
    """
    if not engine.is_file() or engine.stat().st_size == 0:
        return False
    with engine.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(plugin.encode()) >= 0
