"""What this machine has, and what it can build and run."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sits_plugins.tensorrt_flavours import FLAVOURS

from sits_trt.artifacts import installed_version
from sits_trt.recipe.skus import SKUS, Sku

PROGRAM_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Gpu:
    name: str
    sm: int
    memory_mb: int
    driver: str


@dataclass(frozen=True)
class Report:
    """The machine as `sits-trt doctor` sees it. A version is None where the thing is not installed."""

    gpus: tuple[Gpu, ...]
    cuda_driver: str | None
    nvcc: str | None
    torch: str | None
    tensorrt: str | None
    tensorrt_rtx: str | None
    openai_triton: str | None
    triton_server: str | None
    tritonclient: str | None
    cpus: int
    memory_free_gb: float
    disk_free_gb: float

    def can_build(self, sku: Sku) -> tuple[bool, str]:
        """Say whether an engine for `sku` can be built here, and by which backend or why not."""
        if sku.sm is None:
            return (self.torch is not None, "eager" if self.torch else "torch is not installed")
        if self.tensorrt and any(gpu.sm == sku.sm for gpu in self.gpus):
            return True, "tensorrt"
        if sku.sm not in FLAVOURS["tensorrt-rtx"].sms:
            return (self.torch is not None, "cuda" if self.torch else "torch is not installed")
        if self.tensorrt_rtx:
            return True, "tensorrt-rtx"
        return False, "neither TensorRT nor TensorRT for RTX is installed"

    def can_run(self, sku: Sku) -> tuple[bool, str]:
        """Say whether a build for `sku` can be served here, and by which runner or why not."""
        if sku.sm is not None and any(gpu.sm == sku.sm for gpu in self.gpus):
            return True, "on the GPU"
        if self.torch is None:
            return False, "torch is not installed"
        return True, "eager, on the CPU"

    def to_dict(self) -> dict[str, Any]:
        skus = {
            sku.name: {"build": self.can_build(sku), "run": self.can_run(sku)}
            for sku in SKUS.values()
        }  # fmt: skip
        return asdict(self) | {"skus": skus}


def examine(directory: Path) -> Report:
    """Look at this machine; `directory` is where builds would lie. Loads no GPU library and no torch."""
    return Report(
        gpus=_gpus(),
        cuda_driver=_cuda_driver(),
        nvcc=_nvcc(),
        torch=installed_version("torch"),
        tensorrt=installed_version("tensorrt"),
        tensorrt_rtx=installed_version("tensorrt-rtx-cu13-bindings") or installed_version("tensorrt-rtx"),
        openai_triton=installed_version("triton"),
        triton_server=_triton_server(),
        tritonclient=installed_version("tritonclient"),
        cpus=len(os.sched_getaffinity(0)),
        memory_free_gb=_memory_free_gb(),
        disk_free_gb=shutil.disk_usage(_existing(directory)).free / 1e9,
    )


def _output(*command: str) -> str | None:
    """Return a program's output, None where it is missing, fails or hangs, as nvidia-smi does on a broken driver."""
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def _gpus() -> tuple[Gpu, ...]:
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    text = _output("nvidia-smi", query, "--format=csv,noheader,nounits") or ""
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return tuple(Gpu(name, int(cap.replace(".", "")), int(mb), driver) for name, cap, mb, driver in rows)


def _cuda_driver() -> str | None:
    """Return the CUDA version that the driver supports."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _nvcc() -> str | None:
    text = _output("nvcc", "--version")
    return text.split("release ")[1].split(",")[0] if text and "release " in text else None


def _triton_server() -> str | None:
    if path := shutil.which("tritonserver"):
        return path
    packaged = installed_version("nvidia-pytriton")
    return f"inside nvidia-pytriton {packaged}" if packaged else None


def _memory_free_gb() -> float:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def _existing(directory: Path) -> Path:
    resolved = directory.resolve()
    return next(p for p in (resolved, *resolved.parents) if p.exists())
