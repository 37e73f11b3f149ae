"""Engines of both TensorRT flavours, built in a child process: a crash of the native library ends only the child."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sits_plugins.tensorrt_flavours import FLAVOURS, Flavour

from sits_trt import contract
from sits_trt.contract import GRAPH_FILE, Binding
from sits_trt.engine.contents import names_plugin
from sits_trt.engine.gpu import gpu_sm
from sits_trt.engine.profiles import Profile
from sits_trt.errors import EngineBuildError
from sits_trt.progress import Progress
from sits_trt.recipe.skus import Sku

ENGINE_FILE = "model.engine"
LOG_FILE = "build.log"
AGAIN_FILE = "build-again.sh"
_WORK = ".build"
_ERROR_MARKS = ("[ERROR]", "[INTERNAL_ERROR]", "Error:", "error:", "terminate called")


@dataclass(frozen=True)
class EnginePlan:
    """What an engine shall be: its bindings, its profiles in order, and the builder's effort (0 to 5)."""

    bindings: Sequence[Binding]
    profiles: Sequence[Profile]
    optimization_level: int


def build_tensorrt(
    backend: str, graph_dir: Path, sku: Sku, plan: EnginePlan, out_dir: Path, progress: Progress
) -> dict[str, Any]:
    """Build model.engine and build.log in `out_dir`, and return what was built: version, layers, seconds, memory.

    Raises EngineBuildError when the backend does not serve the SKU or is not installed, or when the build fails;
    then `out_dir` keeps the log and, in build-again.sh, the command that repeats the build by itself.
    """
    flavour = FLAVOURS[backend]
    capability = compute_capability(flavour, sku)
    module = flavour.module()
    graph = graph_dir / GRAPH_FILE
    if not graph.is_file():
        raise EngineBuildError(f"{graph_dir} holds no {GRAPH_FILE}; build the graph stage first")
    work = out_dir / _WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    engine, result_file, request_file = out_dir / ENGINE_FILE, work / "result.json", work / "request.json"
    request = {
        "module": module,
        "graph": str(graph.resolve()),
        "engine": str(engine.resolve()),
        "result": str(result_file.resolve()),
        "compute_capability": capability,
        "optimization_level": plan.optimization_level,
        "profiles": [profile.to_dict() for profile in plan.profiles],
    }
    request_file.write_text(json.dumps(request, indent=2), encoding="utf-8")
    log = out_dir / LOG_FILE
    _run(request_file, _library_path(flavour, work), log, progress)
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    _require_bindings(plan.bindings, result.pop("bindings"), log)
    _require_plugins(engine, result["plugin_layers"], log)
    (out_dir / AGAIN_FILE).unlink()
    shutil.rmtree(work)
    return result | {"module": module, "bytes": engine.stat().st_size}


def compute_capability(flavour: Flavour, sku: Sku) -> int | None:
    """Return the architecture to build for, None for a flavour that builds for the GPU of this machine.

    Raises EngineBuildError when the flavour cannot serve the SKU, here or at all.
    """
    if sku.sm is None:
        raise EngineBuildError(
            f"backend '{flavour.backend}' builds for GPUs and SKU '{sku.name}' has none; set engine.backend=eager"
        )
    if not flavour.sms:
        here = gpu_sm()
        if here != sku.sm:
            found = "has no GPU" if here is None else f"has SM {here}"
            raise EngineBuildError(
                f"backend '{flavour.backend}' builds on the GPU that it builds for, SM {sku.sm} ({sku.name}), and this "
                f"machine {found}; build there, or set engine.backend=tensorrt-rtx or cuda"
            )
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


def _run(request_file: Path, library_path: str, log: Path, progress: Progress) -> None:
    """Run the child to its end. Raises EngineBuildError when that is not success."""
    command = [sys.executable, "-m", "sits_trt.engine.tensorrt_child", str(request_file.resolve())]
    again = log.with_name(AGAIN_FILE)
    again.write_text(f"#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(library_path)} exec {shlex.join(command)}\n")
    again.chmod(0o755)
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command,
            env=os.environ | {"LD_LIBRARY_PATH": library_path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                report = json.loads(line)
                progress(report["done"], report["total"], report["what"])
            status = child.wait()
        finally:
            # On an interrupt: the child builds for nobody.
            if child.poll() is None:
                child.kill()
                child.wait()
    if status != 0:
        raise EngineBuildError(
            f"the engine builder {_how_it_ended(status)}{_first_error(log)}; {again} repeats it", log
        )  # fmt: skip


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


def _require_bindings(declared: Sequence[Binding], found: list[list[Any]], log: Path) -> None:
    """Check that the network's inputs and outputs, as TensorRT inferred them, are the contract's."""
    expected = [[b.name, b.dtype, [d if isinstance(d, int) else -1 for d in b.shape]] for b in declared]
    for wanted, got in zip(expected, found, strict=False):
        if wanted != got:
            raise EngineBuildError(f"the graph's binding is {got} where the contract has {wanted}", log)
    if len(expected) != len(found):
        raise EngineBuildError(f"the graph has {len(found)} bindings where the contract has {len(expected)}", log)


def _require_plugins(engine: Path, layers: Mapping[str, int], log: Path) -> None:
    """Check that the engine calls the attention plugin and the others that the network has, by the engine's bytes."""
    for name in sorted({contract.ATTENTION_PLUGIN, *layers}):
        if not layers.get(name) or not names_plugin(engine, name):
            raise EngineBuildError(f"the engine does not call plugin {name}", log)
