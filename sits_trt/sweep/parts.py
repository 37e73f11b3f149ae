"""Levels measured so far, a file each, so that a killed sweep goes on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sits_trt.artifacts import fingerprint
from sits_trt.sweep.result import LevelResult


@dataclass(frozen=True)
class Part:
    """One measured level and who served it."""

    served_by: str
    server: str
    level: LevelResult


class Parts:
    """The parts of one sweep under a directory. A part counts only under the conditions it was measured in."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._used: set[Path] = set()

    def take_over(self, other: Path) -> None:
        """Copy the parts of an earlier sweep that this one does not have yet."""
        for file in other.glob("*/*.json"):
            target = self._directory / file.parent.name / file.name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)

    def find(self, build: str, key: str, conditions: Mapping[str, Any]) -> Part | None:
        """Return the part of that build (by fingerprint) and level, None when there is none of these conditions."""
        path = self._path(build, key)
        if not path.is_file():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["conditions"] != fingerprint(conditions):
            return None
        self._used.add(path)
        return Part(data["served_by"], data["server"], LevelResult.from_dict(data["level"]))

    def keep(self, build: str, key: str, conditions: Mapping[str, Any], part: Part) -> None:
        path = self._path(build, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"conditions": fingerprint(conditions), **asdict(part)})
        # Beside and renamed: a kill while writing must not leave half a file.
        beside = path.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
        self._used.add(path)

    def drop_unused(self) -> None:
        """Delete the parts that this sweep neither found nor kept."""
        for file in self._directory.glob("*/*"):
            if file not in self._used:
                file.unlink()

    def _path(self, build: str, key: str) -> Path:
        return self._directory / build / f"{key}.json"
