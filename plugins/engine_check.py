"""Whether an engine fits this machine and program, from its manifest alone: no native library is touched."""

from __future__ import annotations

from typing import Any

from sits_plugins.tensorrt_flavours import FLAVOURS
from sits_plugins.tensorrt_registry import plugin_digests

from sits_trt.artifacts import Manifest
from sits_trt.errors import ArtifactMismatch

_REBUILD = "build it again with 'sits-trt build'"


def check_engine(manifest: Manifest, sm: int | None) -> None:
    """Raise ArtifactMismatch, naming both sides, unless the engine of `manifest` can be loaded here.

    `sm` is the GPU that shall run it (80, 89, ...), None when there is none in view: then only versions and plugins
    are compared. Engines of backends without an engine file run anywhere that their checkpoint does.
    """
    backend = manifest.details["backend"]
    if sm is not None and manifest.sm is not None and sm != manifest.sm:
        raise ArtifactMismatch("GPU architecture of the engine", f"SM {sm}", f"SM {manifest.sm}", _REBUILD)
    if backend not in FLAVOURS:
        return
    flavour = FLAVOURS[backend]
    installed, built_with = flavour.version(), manifest.details.get("tensorrt", {}).get("version", "unknown")
    if installed is None:
        way_out = f"install that version ({flavour.install}) or {_REBUILD}"
        raise ArtifactMismatch(f"{backend} version of the engine", "(not installed)", built_with, way_out)
    if installed != built_with:
        raise ArtifactMismatch(f"{backend} version of the engine", installed, built_with, _REBUILD)
    _check_plugins(dict(manifest.plugins))


def _check_plugins(found: dict[str, Any]) -> None:
    for name, digest in plugin_digests().items():
        if found.get(name) != digest:
            raise ArtifactMismatch(f"plugin {name} of the engine", digest, found.get(name, "none"), _REBUILD)
