"""Stage outputs: directories with a manifest, written beside and renamed, verified before they are trusted."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sits_trt.errors import ArtifactMismatch, SitsError

MANIFEST_NAME = "manifest.json"
QUANTIZATION_REPORT = "report.json"
"""File of a quantized checkpoint: its sizes, the errors of its layers, and its scores beside the float model."""

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What an artifact is and what it was made from.

    `fingerprint` identifies the settings and inputs that produced it; `inputs` maps the name of each
    input artifact to its fingerprint; `tools` maps distribution names to versions; `sm` is the GPU
    architecture as an integer (80, 90, ...) or None where the artifact runs on any; `plugins` maps
    plugin names to digests; `details` holds what only this kind of artifact has to say.
    """

    kind: str
    fingerprint: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    sm: int | None = None
    plugins: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    schema_version: int = SCHEMA_VERSION


def fingerprint(value: Any) -> str:
    """Return 32 hex digits that identify JSON-like `value`, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def tool_versions(*distributions: str) -> dict[str, str]:
    """Return the installed version of each distribution, 'absent' where it is not installed. Imports none of them."""
    return {name: installed_version(name) or "absent" for name in distributions}


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, None where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


_TYPES = {"fingerprint": str, "inputs": dict, "tools": dict, "plugins": dict, "details": dict, "created": str}


def read_manifest(directory: Path, kind: str) -> Manifest:
    """Read and check the manifest of `directory`.

    Raises SitsError when there is none or it is damaged, ArtifactMismatch when kind or schema differ.
    """
    path = directory / MANIFEST_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SitsError(f"{directory} holds no {MANIFEST_NAME}; build it first with 'sits-trt build'") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SitsError(f"{path} cannot be read ({error}); delete the directory and build again") from None
    if not isinstance(data, dict) or "kind" not in data or "fingerprint" not in data:
        raise SitsError(f"{path} is not an artifact manifest; delete the directory and build again")
    rebuild = "build it again with this version of sits-trt"
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ArtifactMismatch(f"schema of {path}", SCHEMA_VERSION, data.get("schema_version"), rebuild)
    if data["kind"] != kind:
        raise ArtifactMismatch(f"kind of {path}", kind, data["kind"], "give the directory of the right stage")
    for key, wanted in _TYPES.items():
        if not isinstance(data.get(key, wanted()), wanted):
            raise SitsError(f"{path} is damaged: '{key}' is {data[key]!r}; delete the directory and build again")
    if data.get("sm") is not None and not isinstance(data["sm"], int):
        raise SitsError(f"{path} is damaged: 'sm' is {data['sm']!r}; delete the directory and build again")
    known = {f.name for f in fields(Manifest)}
    return Manifest(**{key: value for key, value in data.items() if key in known})


def require_input(directory: Path, made: Manifest, source: Path) -> None:
    """Raise SitsError when the artifact `made` in `directory` was made from another than the one now in `source`.

    So it is after a build that was killed between the two. What its manifest does not name is not asked for.
    """
    kind = source.resolve().name
    if kind in made.inputs and read_manifest(source, kind).fingerprint != made.inputs[kind]:
        raise SitsError(
            f"{directory} was not made from what now lies in {source.resolve()}: the last 'sits-trt build' did not "
            "end; run it again"
        )


def is_current(directory: Path, kind: str, wanted_fingerprint: str) -> bool:
    """Say whether `directory` already holds this artifact, made from these settings and inputs."""
    if not (directory / MANIFEST_NAME).is_file():
        return False
    try:
        return read_manifest(directory, kind).fingerprint == wanted_fingerprint
    except SitsError:
        return False


@contextmanager
def writing(directory: Path, manifest: Manifest) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Write an artifact beside `directory` and put it in place when the block ends without an error.

    Yields the partial directory and a dict; what the block puts into the dict is added to the
    manifest's `details`. A partial directory left by a killed run of the same fingerprint is handed
    over again, so that a stage can resume; any other is deleted. On an error nothing is replaced.
    Raises SitsError when `directory` is something else than an artifact: it would be lost.
    """
    foreign = directory.exists() and not (directory / MANIFEST_NAME).is_file()
    if foreign and not (directory.is_dir() and not any(directory.iterdir())):
        raise SitsError(f"{directory} is there and is no output of sits-trt; move it away or give another --out")
    partial = directory.with_name(directory.name + ".partial")
    marker = partial / ".fingerprint"
    if partial.exists() and not (marker.is_file() and marker.read_text() == manifest.fingerprint):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    marker.write_text(manifest.fingerprint)
    details = dict(manifest.details)
    yield partial, details
    data = asdict(manifest) | {"details": details, "created": datetime.now(UTC).isoformat(timespec="seconds")}
    (partial / MANIFEST_NAME).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    marker.unlink()
    replace_directory(partial, directory)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Write a directory that is no artifact beside `directory`, and put it in place when the block ends well.

    Yields the partial directory; however else the block ends, nothing is left of it. Raises SitsError when
    `directory` is there and holds something.
    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise SitsError(f"{directory} is there and not empty; move it away or give another --out")
    # A link stays what it is, and '.' has a name.
    place = directory.resolve()
    # Nothing is resumed, so nothing of this name may be there: it would be another's.
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except FileNotFoundError:
        raise SitsError(f"{directory} cannot be made; give another --out") from None
    try:
        yield partial
        replace_directory(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Keep a second process from writing the build in `root`: both would fill the same partial directories.

    The system lets go of the lock when its holder ends in any way. Raises SitsError when another process holds it.
    """
    with (root / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SitsError(
                f"another 'sits-trt build' is at work in {root}; wait for its end or give another --out"
            ) from None
        yield


def write_json(path: Path, value: Any) -> None:
    """Write JSON-like `value` in one step: a killed run leaves the file as it was, or none."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)


def replace_directory(new: Path, directory: Path) -> None:
    """Put directory `new` in the place of `directory`, which may exist."""
    old = directory.with_name(f".{directory.name}.replaced")
    if old.exists():
        shutil.rmtree(old)
    if directory.exists():
        os.replace(directory, old)
    os.replace(new, directory)
    shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class BuildDirectory:
    """Where the stages of one build lie. Each property is the directory of one artifact."""

    root: Path

    @property
    def recipe_file(self) -> Path:
        return self.root / "recipe.json"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def scales(self) -> Path:
        return self.root / "scales"

    @property
    def quantized(self) -> Path:
        return self.root / "quantized"

    @property
    def graph(self) -> Path:
        return self.root / "graph"

    @property
    def kernels(self) -> Path:
        return self.root / "kernels"

    @property
    def engine(self) -> Path:
        return self.root / "engine"

    @property
    def repository(self) -> Path:
        return self.root / "repository"

    @property
    def accuracy(self) -> Path:
        return self.root / "accuracy"
