"""Whether an engine fits this machine and program, from its manifest alone: no native library is touched."""

from __future__ import annotations

from sits_plugins.tensorrt_flavours import FLAVOURS
from sits_plugins.tensorrt_registry import plugin_digests

from sits_trt.artifacts import Manifest
from sits_trt.errors import ArtifactMismatch

_REBUILD = "build it again with 'sits-trt build'"


def check_engine(manifest: Manifest, sm: int | None) -> None:
    """Raise ArtifactMismatch, naming both sides, unless the engine of `manifest` can be loaded here.

    `sm` is the GPU that shall run it (80, 89, ...), None when there is none in view: then only versions and plugins
    are compared, the plugins that the engine calls. The eager backend runs wherever torch does.
    """
    backend = manifest.details["backend"]
    if backend == "eager":
        return
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
    ours = plugin_digests()
    for name in manifest.details["tensorrt"].get("plugin_layers", ours):
        needed, found = ours.get(name, "none"), manifest.plugins.get(name, "none")
        if needed != found or found == "none":
            raise ArtifactMismatch(f"plugin {name} of the engine", needed, found, _REBUILD)
