"""What a kernel is before it is compiled, and what the bundle's manifest says of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REALS = {"float16": "fp16", "bfloat16": "bf16"}
"""Types of activations, with their names in kernels' names and in OpenAI Triton."""

ARGUMENT_BYTES = {"pointer": 8, "i64": 8, "i32": 4, "f32": 4, "tensor_map": 128}
"""Argument types of the launcher, with their sizes."""


@dataclass(frozen=True)
class Axis:
    """One grid dimension: `times` the product over `sizes`, (argument name, per), of ceil(argument / per)."""

    sizes: tuple[tuple[str, int], ...] = ()
    times: int = 1

    def blocks(self, arguments: Mapping[str, Any]) -> int:
        count = self.times
        for name, per in self.sizes:
            count *= -(-int(arguments[name]) // per)
        return count


@dataclass(frozen=True)
class CudaKernel:
    """One `extern "C"` kernel of a CUDA C++ source. `arguments` are (name, type), types of ARGUMENT_BYTES.

    With `template`, the source's macro KERNEL(name, *template) makes the kernel; else the source has it already.
    A `dependent` kernel executes griddepcontrol.wait before it touches what earlier kernels wrote or may still read.
    """

    name: str
    arguments: tuple[tuple[str, str], ...]
    grid: tuple[Axis, Axis, Axis]
    threads: int
    template: tuple[Any, ...] = ()
    shared_bytes: int = 0
    dependent: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CudaModule:
    """A CUDA C++ source of this package and its kernels, compiled into one cubin. It may include the package's *.cuh.

    `architecture_specific` asks for the sm_90a kind of target, whose code runs on that SM alone.
    """

    name: str
    source: str
    kernels: tuple[CudaKernel, ...]
    defines: Mapping[str, Any] = field(default_factory=dict)
    architecture_specific: bool = False


@dataclass(frozen=True)
class TritonKernel:
    """One specialisation of a kernel in OpenAI Triton.

    `signature` maps every argument of `function`, in order, to OpenAI Triton's type name ('*fp16', 'i32',
    'fp32', ...) or 'constexpr'; `constants` gives the latter. `aligned` names the pointers and integers
    that are multiples of 16, without which the compiler does not use 16-byte accesses. `dependent`: as of `CudaKernel`.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    grid: tuple[Axis, Axis, Axis]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    dependent: bool = False


def per(*sizes: tuple[str, int] | str, times: int = 1) -> Axis:
    """Return the axis of ceil(name / per) for each (name, per); a bare name counts itself."""
    return Axis(tuple((size, 1) if isinstance(size, str) else size for size in sizes), times)


ONE = Axis()
"""A grid dimension of one block."""
