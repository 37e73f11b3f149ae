"""A launcher of CUDA C++ kernels whose device is the host: the calls of `BundleLauncher`, done at once."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from sits_plugins.kernel_spec import ARGUMENT_BYTES, CudaKernel, CudaModule

from tests.support.cuda_on_cpu.build import CpuBuilds

_PACKED = {"pointer": "Q", "i64": "q", "i32": "i", "f32": "f", "tensor_map": "4q"}


class KernelFault(AssertionError):
    """A kernel did what it must not do; the message ends with the seed that makes it happen again."""


class _Launch(ctypes.Structure):
    """`machine::Launch`."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("grid_x", "grid_y", "grid_z", "threads", "shared_bytes", "cluster", "resident", "seed")
    )


class CudaOnCpu:
    """Runs the kernels of `modules` on the CPU; addresses are of host memory.

    Up to `multiprocessors` blocks run at a time, a random number of them, in an order given by `seed`, a random one for
    each launch where it is None.
    """

    sm = 90

    def __init__(
        self, modules: Sequence[CudaModule], builds: CpuBuilds, multiprocessors: int = 5, seed: int | None = None
    ) -> None:
        self.multiprocessors, self.seed = multiprocessors, seed
        self._builds = builds
        self._kernels = {kernel.name: (module, kernel) for module in modules for kernel in module.kernels}

    def launch(
        self, name: str, grid: tuple[int, int, int] | None, args: Sequence[Any] | Mapping[str, Any], stream: int
    ) -> None:
        """Run kernel `name` to its end. Raises KernelFault."""
        module, kernel = self._kernels[name]
        function, cluster = self._builds.kernel(module, kernel)
        names = [argument for argument, _ in kernel.arguments]
        values = dict(zip(names, args, strict=True)) if isinstance(args, tuple | list) else {n: args[n] for n in names}
        grid = grid or tuple(axis.blocks(values) for axis in kernel.grid)
        seed = random.getrandbits(32) if self.seed is None else self.seed
        resident = random.Random(seed).randint(1, self.multiprocessors)
        print(f"{name}: seed={seed}")  # which a test that fails shows
        parameters = _Launch(*grid, kernel.threads, kernel.shared_bytes, cluster, resident, seed)
        fault = function(ctypes.byref(parameters), _packed(kernel, values))
        if fault:
            raise KernelFault(f"{name}, grid {grid}: {fault.decode()} (seed={seed}, {resident} resident blocks)")

    def zero(self, address: int, size_bytes: int, stream: int) -> None:
        ctypes.memset(address, 0, size_bytes)


def _packed(kernel: CudaKernel, values: Mapping[str, Any]) -> Any:
    """Return the array of the arguments' addresses, as the driver takes it; it keeps them alive."""
    addresses = (ctypes.c_void_p * len(kernel.arguments))()
    addresses.kept = []
    for place, (name, kind) in enumerate(kernel.arguments):
        fields = values[name] if kind == "tensor_map" else (values[name],)
        packed = struct.pack("=" + _PACKED[kind], *fields).ljust(ARGUMENT_BYTES[kind], b"\0")
        memory = ctypes.create_string_buffer(packed, len(packed))
        addresses.kept.append(memory)
        addresses[place] = ctypes.addressof(memory)
    return addresses
