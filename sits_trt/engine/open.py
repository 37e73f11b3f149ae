"""Opening an engine's directory: everything is verified before anything is trusted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sits_plugins.engine_check import check_engine

from sits_trt.artifacts import Manifest, read_manifest
from sits_trt.contract import EngineDetails
from sits_trt.errors import ArtifactMismatch

KIND = "engine"


@dataclass(frozen=True)
class OpenedEngine:
    """An engine that fits this machine. `engine_file` is None for backends that have none."""

    directory: Path
    manifest: Manifest
    details: EngineDetails
    engine_file: Path | None


def open_engine(directory: Path, sm: int | None) -> OpenedEngine:
    """Return the engine in `directory`, for the GPU of architecture `sm` (None: no GPU in view).

    Raises SitsError when there is no readable manifest, ArtifactMismatch when schema, GPU architecture, TensorRT
    version, plugins or the engine file are not those that this machine and program need.
    """
    manifest, details = read_engine(directory)
    check_engine(manifest, sm)
    if not details.engine_file:
        return OpenedEngine(directory, manifest, details, None)
    file = directory / details.engine_file
    expected, found = manifest.details.get("tensorrt", {}).get("bytes"), file.stat().st_size if file.is_file() else 0
    if expected != found:
        raise ArtifactMismatch(f"size of {file}", f"{expected} bytes", f"{found} bytes", "copy or build it again")
    return OpenedEngine(directory, manifest, details, file)


def read_engine(directory: Path) -> tuple[Manifest, EngineDetails]:
    """Return manifest and details of the engine in `directory`, whatever machine it is for."""
    manifest = read_manifest(directory, KIND)
    return manifest, EngineDetails.from_dict(manifest.details, directory)
