"""What an engine's directory says of itself, for people and programs, on any machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sits_plugins.tensorrt_flavours import FLAVOURS

from sits_trt.contract import bindings
from sits_trt.engine.contents import names_plugin
from sits_trt.engine.open import open_engine, read_engine
from sits_trt.errors import ArtifactMismatch

PLUGIN_EVIDENCE = "layers counted in the network when the engine was built; names searched in the engine file now"
"""TensorRT's own inspector needs the GPU that the engine is for."""


def inspect_engine(directory: Path) -> dict[str, Any]:
    """Return manifest, limits, bindings, profiles and plugins of the engine in `directory`, as JSON-like data.

    `loads_here` is None where this program could load the engine given its GPU, else the reason why not.
    Raises SitsError when there is no readable manifest of this schema.
    """
    manifest, details = read_engine(directory)
    file = directory / details.engine_file if details.engine_file else None
    built = manifest.details.get("tensorrt", {})
    return {
        "directory": str(directory),
        "backend": details.backend,
        "sm": manifest.sm,
        "fingerprint": manifest.fingerprint,
        "created": manifest.created,
        "tools": dict(manifest.tools),
        "inputs": dict(manifest.inputs),
        "model": details.model.to_dict(),
        "tile": asdict(details.tile) | {"tile_bytes": details.tile.tile_bytes},
        "limits": details.limits.to_dict(),
        "bindings": [asdict(binding) for binding in bindings(details.model, details.tile)],
        "profiles": manifest.details.get("profiles", []),
        "plugins": {
            name: {
                "version_and_digest": digest,
                "layers": built.get("plugin_layers", {}).get(name, 0),
                "in_engine_file": file is not None and names_plugin(file, name),
            }
            for name, digest in manifest.plugins.items()
        },
        "plugin_evidence": PLUGIN_EVIDENCE if details.backend in FLAVOURS else "",
        "engine_file": details.engine_file,
        "engine_bytes": file.stat().st_size if file and file.is_file() else 0,
        "build": {key: built[key] for key in ("module", "version", "seconds", "peak_memory_bytes") if key in built},
        "layers": built.get("layers", {}),
        "checkpoint": details.checkpoint,
        "kernels": details.kernels,
        "loads_here": _why_not_here(directory),
    }


def _why_not_here(directory: Path) -> str | None:
    try:
        open_engine(directory, None)
    except ArtifactMismatch as error:
        return str(error)
    return None
