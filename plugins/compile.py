"""Compile the kernels for one SM into a bundle, on any machine: OpenAI Triton and NVRTC need no GPU for it."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sits_plugins.bundle import Kernel, KernelBundle
from sits_plugins.kernel_spec import ARGUMENT_BYTES, CudaModule, TritonKernel

from sits_trt.artifacts import file_digest, fingerprint, tool_versions
from sits_trt.contract import KERNEL_ABI
from sits_trt.errors import PluginError

SMS = (80, 86, 89, 90, 120)
"""SMs that bundles are made for."""

_CATALOGUES = ("linear_catalogue", "attention_catalogue", "fused_catalogue")
"""Modules of this package with `kernels(sm) -> list[TritonKernel | CudaModule]`."""

_HIDDEN_TRITON_POINTERS = 2
"""OpenAI Triton appends global scratch and profiler scratch to every kernel's arguments."""

Source = TritonKernel | CudaModule


def every_kernel(name: str) -> bool:
    """Want the kernel or module called `name`, whatever it is."""
    return True


def catalogue(sm: int, wanted: Callable[[str], bool] = every_kernel) -> list[Source]:
    """Return every kernel to compile for `sm` whose name is wanted. Imports OpenAI Triton."""
    found: list[Source] = []
    for name in _CATALOGUES:
        found += importlib.import_module(f"sits_plugins.{name}").kernels(sm)
    return [source for source in found if wanted(source.name)]


def compile_bundle(
    sm: int,
    out_dir: Path,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    wanted: Callable[[str], bool] = every_kernel,
) -> KernelBundle:
    """Compile the wanted kernels (`linear_catalogue.needed` knows a recipe's) into `out_dir` and return the bundle.

    Cubins of an earlier, unfinished call are overwritten; the manifest is written last. Raises PluginError for an
    SM that is not supported, a compiler that is not installed, and a kernel that does not compile.
    """
    if sm not in SMS:
        raise PluginError(f"no kernels for SM {sm}; supported: {', '.join(map(str, SMS))}", "kernel bundle")
    out_dir.mkdir(parents=True, exist_ok=True)
    sources = _catalogue_or_explain(sm, wanted)
    kernels: list[Kernel] = []
    for done, source in enumerate(sources):
        progress(done, len(sources), source.name)
        kernels += compile_source(source, sm, out_dir)
    progress(len(sources), len(sources), "")
    files = sorted({kernel.file for kernel in kernels})
    bundle = KernelBundle(
        directory=out_dir,
        sm=sm,
        abi=KERNEL_ABI,
        kernels={kernel.name: kernel for kernel in kernels},
        digests={name: file_digest(out_dir / name) for name in files},
        tools=tool_versions("triton", "nvidia-cuda-nvrtc"),
    )
    bundle.write_manifest()
    return bundle


def sources_fingerprint(sm: int) -> str:
    """Return the identity of everything that a bundle for `sm` is made from: sources, ABI and compiler versions."""
    here = Path(__file__).parent
    sources = {path.name: file_digest(path) for path in sorted(here.iterdir()) if path.suffix in (".py", ".cu", ".cuh")}
    return fingerprint([sm, KERNEL_ABI, sources, tool_versions("triton", "nvidia-cuda-nvrtc")])


def compile_source(source: Source, sm: int, out_dir: Path) -> list[Kernel]:
    """Compile one entry of the catalogue, write its cubin to `out_dir`, and return what the manifest says of it."""
    if isinstance(source, CudaModule):
        return _compile_cuda(source, sm, out_dir)
    return [_compile_triton(source, sm, out_dir)]


def _catalogue_or_explain(sm: int, wanted: Callable[[str], bool]) -> list[Source]:
    try:
        return catalogue(sm, wanted)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise PluginError("OpenAI Triton is not installed; pip install 'sits-trt[cpu]'", "kernel bundle") from None


def _compile_triton(source: TritonKernel, sm: int, out_dir: Path) -> Kernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = list(source.signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in source.aligned}
    dialect = GluonASTSource if source.function.is_gluon() else ASTSource
    ast = dialect(source.function, dict(source.signature), dict(source.constants), attributes)
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True}
    try:
        compiled = triton.compile(ast, target=GPUTarget("cuda", sm, 32), options=options)
    except triton.CompilationError as error:
        raise PluginError(f"does not compile for SM {sm}: {error}", f"kernel {source.name}") from error
    (out_dir / f"{source.name}.cubin").write_bytes(compiled.asm["cubin"])
    metadata: Any = compiled.metadata
    arguments = [(name, _launch_type(kind)) for name, kind in source.signature.items() if kind != "constexpr"]
    constants, hidden = dict(source.constants), _HIDDEN_TRITON_POINTERS
    if metadata.global_scratch_size:
        # The first hidden pointer is in use: the launching room gives it, so many bytes a block.
        arguments.append(("scratch", "pointer"))
        constants["SCRATCH_BYTES"] = metadata.global_scratch_size
        hidden -= 1
    return Kernel(
        name=source.name,
        file=f"{source.name}.cubin",
        entry=metadata.name,
        arguments=tuple(arguments),
        grid=source.grid,
        threads=(getattr(metadata, "total_num_warps", None) or metadata.num_warps) * 32,
        shared_bytes=metadata.shared,
        hidden_pointers=hidden,
        dependent=source.dependent,
        constants=constants,
    )


def _launch_type(triton_type: str) -> str:
    if triton_type.startswith("*"):
        return "pointer"
    kind = {"fp32": "f32"}.get(triton_type, triton_type)
    if kind not in ARGUMENT_BYTES:
        raise PluginError(f"argument type {triton_type} is not one of the launcher's", "kernel bundle")
    return kind


def _compile_cuda(module: CudaModule, sm: int, out_dir: Path) -> list[Kernel]:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        message = "cuda-bindings is not installed; pip install 'sits-trt[cpu]'"
        raise PluginError(message, "kernel bundle") from None
    here = Path(__file__).parent
    lines = [f"KERNEL({', '.join(map(str, (k.name, *k.template)))})" for k in module.kernels if k.template]
    text = (here / module.source).read_bytes() + "\n".join(["", *lines, ""]).encode()
    headers = sorted(here.glob("*.cuh"))
    suffix = "a" if module.architecture_specific else ""
    options = [f"--gpu-architecture=sm_{sm}{suffix}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in module.defines.items()]
    status, program = nvrtc.nvrtcCreateProgram(
        text,
        module.source.encode(),
        len(headers),
        [h.read_bytes() for h in headers],
        [h.name.encode() for h in headers],
    )
    if int(status) != 0:
        raise PluginError(f"NVRTC failed: {status.name}", f"kernel {module.name}")
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status) != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise PluginError(f"does not compile for SM {sm}: {log.decode().strip()}", f"kernel {module.name}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    (out_dir / f"{module.name}.cubin").write_bytes(cubin)
    return [
        Kernel(
            name=kernel.name,
            file=f"{module.name}.cubin",
            entry=kernel.name,
            arguments=kernel.arguments,
            grid=kernel.grid,
            threads=kernel.threads,
            shared_bytes=kernel.shared_bytes,
            dependent=kernel.dependent,
            constants=asdict(kernel)["constants"],
        )
        for kernel in module.kernels
    ]


def main(arguments: Sequence[str]) -> None:
    """Write a bundle; errors end the process with exit code 2."""
    parser = argparse.ArgumentParser("python -m sits_plugins.compile", description="Compile kernels into a bundle.")
    parser.add_argument("sm", type=int, choices=SMS, help="the GPU's SM, as 90 for 9.0")
    parser.add_argument("directory", type=Path, help="where the bundle goes")
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression: only kernels that match it")
    given = parser.parse_args(arguments)
    try:
        pattern = re.compile(given.pattern)
        bundle = compile_bundle(given.sm, given.directory, wanted=lambda name: pattern.search(name) is not None)
    except (PluginError, re.error) as error:
        parser.exit(2, f"{error}\n")
    print(f"{len(bundle.kernels)} kernels, digest {bundle.digest()}")


if __name__ == "__main__":
    main(sys.argv[1:])
