"""Content identity of a checkpoint, without loading anything: SHA-256 over its files, remembered between runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from sits_trt.artifacts import file_digest, fingerprint
from sits_trt.checkpoint.source import find_source

_RELEVANT = (".json", ".safetensors", ".jinja", ".model", ".txt", ".gguf")
"""Suffixes of files that decide what is read from a Hugging Face directory."""

_NOT_CONTENT = ("manifest.json",)


def source_digest(source: Path | str, cache: Path | None = None) -> str:
    """Return 32 hex digits that identify the content of `source` (as `open_checkpoint` takes it).

    `cache` is a JSON file that keeps the SHA-256 of each file by path, size and modification time, so that
    an unchanged file is not read again; it is created and updated as needed. A damaged cache is rebuilt.
    Raises CheckpointError when there is no such source.
    """
    place = find_source(source)
    files = [place] if place.is_file() else sorted(_relevant_files(place))
    known = _load(cache)
    found: dict[str, str] = {}
    content = {}
    for path in files:
        status = path.stat()
        key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        found[key] = known.get(key) or file_digest(path)
        content[path.name] = found[key]
    if cache is not None and not found.items() <= known.items():
        _store(cache, known | found)
    return fingerprint(content)


def _relevant_files(directory: Path) -> Iterable[Path]:
    return (
        path
        for path in directory.iterdir()
        if path.is_file() and path.suffix in _RELEVANT and path.name not in _NOT_CONTENT
    )


def _load(cache: Path | None) -> dict[str, str]:
    if cache is None or not cache.is_file():
        return {}
    try:
        data = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return {}
    return {key: value for key, value in data.items() if isinstance(value, str)} if isinstance(data, dict) else {}


def _store(cache: Path, entries: dict[str, str]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    # The process id keeps two builds from writing one temporary file.
    partial = cache.with_name(f"{cache.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(entries, indent=1, sort_keys=True), encoding="utf-8")
    os.replace(partial, cache)
