"""One kernel of a plugin's source as a shared object for the CPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import sits_plugins
from sits_plugins.kernel_spec import CudaKernel, CudaModule

from tests.support.cuda_on_cpu.translate import translate

HERE = Path(__file__).parent
PLUGINS = Path(sits_plugins.__file__).parent

_FLAGS = ("-std=c++20", "-O2", "-march=native", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fvisibility=hidden", f"-I{HERE}")
"""The fibers jump between stacks, which the C library's checks would take for an error."""

_ENTRY = """
extern "C" __attribute__((visibility("default"))) const char *run_on_cpu(
    const machine::Launch *launch, void **arguments) {{
    return machine::run(*launch, [](void **values) {{ machine::call({name}, values); }}, arguments);
}}
"""


@lru_cache(maxsize=1)
def compiler() -> str | None:
    """Return the first C++ compiler here that has C++20 and 16-bit floats, or None where there is none."""
    probe = ("-std=c++20", "-fsyntax-only", "-x", "c++", "-")
    for name in filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        if not subprocess.run([name, *probe], input=b"_Float16 half;", capture_output=True, check=False).returncode:
            return name
    return None


def build_machine(directory: Path) -> list[Path]:
    """Compile the emulated GPU, which kernels share, into `directory`; return its object files."""
    objects = []
    for source in sorted(HERE.glob("*.cpp")):
        objects.append(directory / f"{source.stem}.o")
        _compile(*_FLAGS, "-ftree-vectorize", "-c", source, "-o", objects[-1])
    return objects


def _compile(*arguments: str | Path) -> str:
    found = compiler()
    assert found, "no C++ compiler"
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[:4000]
    return done.stdout


class CpuBuilds:
    """Kernels compiled into `directory`, each when it is first asked for. `sources` holds the .cu and .cuh files."""

    def __init__(self, directory: Path, machine: list[Path], sources: Path = PLUGINS) -> None:
        self.directory, self.sources = directory, sources
        self._machine = machine
        self._loaded: dict[str, tuple[Any, int]] = {}

    def kernel(self, module: CudaModule, kernel: CudaKernel) -> tuple[Any, int]:
        """Return the C function that runs `kernel`, and the number of blocks in its clusters."""
        if kernel.name not in self._loaded:
            self._loaded[kernel.name] = self._build(module, kernel)
        return self._loaded[kernel.name]

    def _build(self, module: CudaModule, kernel: CudaKernel) -> tuple[Any, int]:
        macro = f"KERNEL({', '.join(map(str, (kernel.name, *kernel.template)))})" if kernel.template else ""
        source, translated, library = (self.directory / f"{kernel.name}.{kind}" for kind in ("cu", "cpp", "so"))
        source.write_text((self.sources / module.source).read_text(encoding="utf-8") + macro, encoding="utf-8")
        defines = [f"-D{name}={value}" for name, value in {"__CUDA_ARCH__": 900, **module.defines}.items()]
        text = _compile("-std=c++20", "-E", "-P", "-w", f"-I{self.sources}", *defines, "-x", "c++", source)
        cluster = re.search(r"__cluster_dims__\((\d+), 1, 1\)", text)
        entry = _ENTRY.format(name=kernel.name)
        translated.write_text(f'#include "cuda.h"\n{translate(text)}{entry}', encoding="utf-8")
        _compile(*_FLAGS, "-shared", translated, *self._machine, "-o", library)
        function = ctypes.CDLL(str(library)).run_on_cpu
        function.restype = ctypes.c_char_p
        return function, int(cluster[1]) if cluster else 1
