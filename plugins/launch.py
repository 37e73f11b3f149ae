"""Launch a bundle's kernels through the CUDA driver API: no framework, no compiler, bare addresses and a stream."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

from cuda.bindings import driver as cuda
from sits_plugins.bundle import Kernel, KernelBundle
from sits_plugins.kernel_spec import ARGUMENT_BYTES
from sits_plugins.launcher import AttentionCall, LinearCall
from sits_plugins.tensor_map import encoded

from sits_trt.errors import ArtifactMismatch, PluginError

_PACKED = {"pointer": "Q", "i64": "q", "i32": "i4x", "f32": "f4x", "tensor_map": f"{ARGUMENT_BYTES['tensor_map']}s"}
"""Argument types in the language of `struct`, a multiple of 8 bytes each."""

Grid = tuple[int, int, int]


class _Loaded:
    """A kernel in memory, and all that a launch needs ready made: a prefill is hundreds of launches in a row."""

    def __init__(self, kernel: Kernel, function: Any, dependent: bool) -> None:
        self.kernel, self.function = kernel, function
        self.config = _launch_config(kernel, dependent)
        names = [name for name, _ in kernel.arguments]
        self._pick = itemgetter(*names) if len(names) > 1 else lambda values: tuple(values[name] for name in names)
        kinds = [kind for _, kind in kernel.arguments]
        self._pack = struct.Struct("=" + "".join(_PACKED[kind] for kind in kinds)).pack_into
        self._maps = [place for place, kind in enumerate(kinds) if kind == "tensor_map"]
        sizes = [struct.calcsize("=" + _PACKED[kind]) for kind in [*kinds, *["pointer"] * kernel.hidden_pointers]]
        self._arguments = (ctypes.c_uint64 * (sum(sizes) // 8))()
        begin = ctypes.addressof(self._arguments)
        places = [begin, *(begin + before for before in accumulate(sizes))]
        self._pointers = (ctypes.c_void_p * len(sizes))(*places[:-1])
        self.parameters = ctypes.addressof(self._pointers)
        known = {name for axis in kernel.grid for name, _ in axis.sizes} <= set(names)
        self._axes = known and [
            (axis.times, [(names.index(name), per) for name, per in axis.sizes]) for axis in kernel.grid
        ]  # fmt: skip

    def values(self, args: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
        """Return the arguments in the manifest's order. Raises PluginError where one is missing or too much."""
        arguments = self.kernel.arguments
        if not isinstance(args, tuple | list):
            try:
                return self._pick(args)
            except KeyError:
                absent = ", ".join(name for name, _ in arguments if name not in args)
                raise PluginError(f"launched without {absent}", f"kernel {self.kernel.name}") from None
        if len(args) != len(arguments):
            raise PluginError(f"takes {len(arguments)} arguments, got {len(args)}", f"kernel {self.kernel.name}")
        return args

    def grid(self, values: Sequence[Any]) -> Grid:
        """Return what the manifest's rule gives for these arguments."""
        assert self._axes, f"the grid of kernel {self.kernel.name} is not a matter of its arguments"
        found = []
        for blocks, sizes in self._axes:
            for place, per in sizes:
                blocks *= -(-values[place] // per)
            found.append(blocks)
        return found[0], found[1], found[2]

    def set(self, values: Sequence[Any]) -> None:
        """Write the arguments where `parameters`, the address that the driver takes, leads to."""
        if self._maps:
            values = list(values)
            for place in self._maps:
                values[place] = encoded(values[place])
        self._pack(self._arguments, 0, *values)


class BundleLauncher:
    """Launches the kernels of one bundle on the current CUDA device.

    A cubin is loaded when its first kernel is launched; `load_all` does it beforehand, as a CUDA graph capture needs.
    Safe to use from several threads.
    """

    def __init__(self, bundle: KernelBundle) -> None:
        """Raises PluginError where there is no CUDA driver, ArtifactMismatch where the GPU is not the bundle's."""
        self.bundle = bundle
        _ensure_context()
        self.sm, self.multiprocessors = _device()
        if self.sm // 10 != bundle.sm // 10 or self.sm < bundle.sm:
            raise ArtifactMismatch(
                f"kernel bundle {bundle.directory}", f"SM {self.sm}", f"SM {bundle.sm}", "build it for this GPU"
            )
        self._libraries: dict[str, Any] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._lock = threading.Lock()

    def launch(self, name: str, grid: Grid | None, args: Sequence[Any] | Mapping[str, Any], stream: int) -> None:
        """Launch kernel `name` on `stream` (a CUstream address, 0 for the default) and return without waiting.

        `args` are numbers in the manifest's order, or a mapping by name; pointers are byte addresses. Without
        `grid` the manifest's rule gives it. Raises PluginError when the kernel is unknown, an argument is missing,
        or the driver refuses the launch.
        """
        with self._lock:
            loaded = self._loaded.get(name) or self._load(name)
            values = loaded.values(args)
            grid = grid or loaded.grid(values)
            if 0 in grid:
                return
            loaded.set(values)
            config = loaded.config
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.hStream = stream
            (status,) = cuda.cuLaunchKernelEx(config, loaded.function, loaded.parameters, 0)
        if status != cuda.CUresult.CUDA_SUCCESS:
            _check(status, f"launch of kernel {name} with grid {grid}")

    def zero(self, address: int, size_bytes: int, stream: int) -> None:
        """Enqueue the zeroing of `size_bytes`, a multiple of 4, at a byte address."""
        (status,) = cuda.cuMemsetD32Async(address, 0, size_bytes // 4, stream)
        _check(status, f"zeroing of {size_bytes} bytes")

    def load_all(self, prefix: str = "") -> None:
        """Load every kernel whose name starts with `prefix`."""
        with self._lock:
            for name in self.bundle.kernels:
                if name.startswith(prefix) and name not in self._loaded:
                    self._load(name)

    def tiled_attention(self, call: AttentionCall, stream: int) -> None:
        """Enqueue tiled attention (`launcher.KernelLauncher`)."""
        from sits_plugins.attention_enqueue import enqueue_attention

        enqueue_attention(self, call, stream)

    def w4a16_linear(self, call: LinearCall, stream: int) -> None:
        """Enqueue the INT4 linear (`launcher.KernelLauncher`)."""
        from sits_plugins.linear_enqueue import enqueue_linear

        enqueue_linear(self, call, stream)

    def _load(self, name: str) -> _Loaded:
        kernel = self.bundle.kernel(name)
        if kernel.file not in self._libraries:
            image = (self.bundle.directory / kernel.file).read_bytes()
            what = f"loading of {kernel.file}"
            self._libraries[kernel.file] = _check(*cuda.cuLibraryLoadData(image, [], [], 0, [], [], 0), what)
        handle = _check(*cuda.cuLibraryGetKernel(self._libraries[kernel.file], kernel.entry.encode()), kernel.entry)
        function = _check(*cuda.cuKernelGetFunction(handle), kernel.entry)
        if kernel.shared_bytes:
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = cuda.cuFuncSetAttribute(function, attribute, kernel.shared_bytes)
            _check(status, f"{kernel.shared_bytes} bytes of shared memory for kernel {name}")
        self._loaded[name] = _Loaded(kernel, function, kernel.dependent and self.sm >= 90)
        return self._loaded[name]


def _launch_config(kernel: Kernel, dependent: bool) -> Any:
    """Return the driver's launch configuration of a kernel; grid and stream are set at each launch."""
    config = cuda.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    if dependent:
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def _check(status: Any, *rest: Any) -> Any:
    """Return the driver call's value, or raise PluginError; the last argument says what was being done."""
    *values, what = rest
    if status != cuda.CUresult.CUDA_SUCCESS:
        _, text = cuda.cuGetErrorString(status)
        reason = text.decode() if text else status.name
        raise PluginError(f"{what} failed: {reason}", "CUDA driver")
    return values[0] if values else None


def _ensure_context() -> None:
    """Make device 0's primary context current on this thread unless a context already is."""
    try:
        (status,) = cuda.cuInit(0)
    except RuntimeError as error:
        raise PluginError(
            f"not found ({error}); the kernels need a machine with an NVIDIA GPU", "CUDA driver"
        ) from None
    _check(status, "initialisation")
    if not int(_check(*cuda.cuCtxGetCurrent(), "look for a context")):
        context = _check(*cuda.cuDevicePrimaryCtxRetain(_check(*cuda.cuDeviceGet(0), "look for a GPU")), "context")
        (status,) = cuda.cuCtxSetCurrent(context)
        _check(status, "context")


def _device() -> tuple[int, int]:
    """Return the current device's SM (90, ...) and its number of multiprocessors."""
    device = _check(*cuda.cuCtxGetDevice(), "look for the current GPU")
    kinds = cuda.CUdevice_attribute
    major, minor, count = (
        int(_check(*cuda.cuDeviceGetAttribute(kind, device), "look at the GPU"))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    return major * 10 + minor, count
