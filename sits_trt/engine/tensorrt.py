"""Engines of both TensorRT flavours, built in a child process: a crash of the native library ends only the child."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sits_plugins.tensorrt_flavours import FLAVOURS, Flavour

from sits_trt import contract
from sits_trt.engine.profiles import Profile
from sits_trt.errors import EngineBuildError
from sits_trt.graph.files import MODEL_FILE
from sits_trt.recipe.skus import Sku

Progress = Callable[[int, int, str], None]

ENGINE_FILE = "model.engine"
LOG_FILE = "build.log"
_WORK = ".build"
_ERROR_MARKS = ("[ERROR]", "[INTERNAL_ERROR]", "Error", "error:")


def build_tensorrt(
    backend: str, graph_dir: Path, sku: Sku, profiles: Sequence[Profile], optimization_level: int, out_dir: Path,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Build model.engine and build.log in `out_dir`, and return what was built: version, layers, seconds, memory.

    Raises EngineBuildError when the backend does not serve the SKU or is not installed, or when the build fails;
    then `out_dir` keeps the log and, in build-again.sh, the command that repeats the build by itself.
    """
    flavour = FLAVOURS[backend]
    capability = compute_capability(flavour, sku)
    module = flavour.module()
    work = out_dir / _WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    request = {
        "module": module,
        "graph": str((graph_dir / MODEL_FILE).resolve()),
        "engine": str((out_dir / ENGINE_FILE).resolve()),
        "result": str((work / "result.json").resolve()),
        "compute_capability": capability,
        "optimization_level": optimization_level,
        "profiles": [profile.to_dict() for profile in profiles],
    }
    request_file = work / "request.json"
    request_file.write_text(json.dumps(request, indent=2), encoding="utf-8")
    command = [sys.executable, "-m", "sits_trt.engine.tensorrt_child", str(request_file.resolve())]
    libraries = _library_path(flavour, work)
    again = out_dir / "build-again.sh"
    again.write_text(f"#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(libraries)} exec {shlex.join(command)}\n")
    again.chmod(0o755)
    log = out_dir / LOG_FILE
    _run(command, os.environ | {"LD_LIBRARY_PATH": libraries}, log, progress)
    result: dict[str, Any] = json.loads((work / "result.json").read_text(encoding="utf-8"))
    _require_plugins(out_dir / ENGINE_FILE, result["plugin_layers"], log)
    again.unlink()
    shutil.rmtree(work)
    return result | {"module": module, "bytes": (out_dir / ENGINE_FILE).stat().st_size}


def compute_capability(flavour: Flavour, sku: Sku) -> int | None:
    """Return the architecture to build for, None to build for the GPU of this machine.

    Raises EngineBuildError when the flavour cannot serve the SKU.
    """
    if sku.sm is None:
        raise EngineBuildError(
            f"backend '{flavour.backend}' builds for GPUs and SKU '{sku.name}' has none; set engine.backend=eager"
        )
    if not flavour.sms:
        return None
    if sku.sm not in flavour.sms:
        known = ", ".join(str(sm) for sm in flavour.sms)
        raise EngineBuildError(
            f"backend '{flavour.backend}' does not run on SM {sku.sm} ({sku.name}), only on {known}; "
            "set engine.backend=cuda, which runs the same kernels without TensorRT"
        )
    return sku.sm


def _library_path(flavour: Flavour, work: Path) -> str:
    """Return the LD_LIBRARY_PATH of the child.

    The ONNX parser of TensorRT for RTX opens its core library by a name that the wheel does not ship, and aborts
    the process when there is none. A link of that name in a folder of our own leaves the installation alone.
    """
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    library = flavour.misnamed_library()
    if library is None:
        return inherited
    folder = work / "lib"
    folder.mkdir()
    (folder / f"{flavour.library_stem}.so").symlink_to(library)
    return f"{folder.resolve()}:{inherited}" if inherited else str(folder.resolve())


def _run(command: list[str], environment: Mapping[str, str], log: Path, progress: Progress) -> None:
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                _pass_on(line, progress)
            status = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if status != 0:
        raise EngineBuildError(f"the engine builder {_how_it_ended(status)}{_first_error(log)}", log)


def _pass_on(line: str, progress: Progress) -> None:
    """Report a progress line. Other lines of standard output are the native library's and say nothing to users."""
    try:
        report = json.loads(line)
    except json.JSONDecodeError:
        return
    if isinstance(report, dict):
        progress(report["done"], report["total"], report["what"])


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"failed with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def _first_error(log: Path) -> str:
    """Return ': ' and the first error line of the log, or an empty string."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if any(mark in line for mark in _ERROR_MARKS):
            return f": {line.strip()}"
    return ""


def _require_plugins(engine: Path, layers: Mapping[str, int], log: Path) -> None:
    """Check that the engine calls the attention plugin, by the network's layers and by the engine's bytes."""
    content = engine.read_bytes()
    for name in {contract.ATTENTION_PLUGIN, *layers}:
        if not layers.get(name) or name.encode() not in content:
            raise EngineBuildError(f"the engine does not call plugin {name}", log)
