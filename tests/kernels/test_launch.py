"""The launcher over a driver that only writes down what it is asked for: grids, arguments, attributes."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sits_plugins import launch as module
from sits_plugins.bundle import Kernel, KernelBundle
from sits_plugins.kernel_spec import ONE, Axis, per
from sits_plugins.launch import BundleLauncher
from sits_plugins.tensor_map import MatrixMap

from sits_trt.errors import PluginError

CTYPES: dict[str, Any] = {
    "pointer": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float,
}  # fmt: skip


def argument(kind: str, place: int) -> Any:
    return ctypes.string_at(place, 128) if kind == "tensor_map" else CTYPES[kind].from_address(place).value


class Driver:
    """The calls of `cuda.bindings.driver` that the launcher makes; the GPU is of SM 9.0."""

    def __init__(self, kernels: dict[str, Kernel]) -> None:
        self.kernels = kernels
        self.launches: list[tuple[str, tuple[int, int, int], int, list[Any], Any]] = []
        self.failure = 0
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace())
        self.CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
        self.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def cuLibraryLoadData(self, *args: Any) -> tuple[int, int]:
        return 0, 1

    def cuLibraryGetKernel(self, library: int, entry: bytes) -> tuple[int, str]:
        return 0, entry.decode()

    def cuKernelGetFunction(self, handle: str) -> tuple[int, str]:
        return 0, handle

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"out of luck"

    def cuLaunchKernelEx(self, config: Any, function: str, parameters: int, extra: int) -> tuple[int]:
        kernel = self.kernels[function]
        kinds = [kind for _, kind in kernel.arguments] + ["pointer"] * kernel.hidden_pointers
        places = (ctypes.c_void_p * len(kinds)).from_address(parameters)
        values = [argument(kind, place) for kind, place in zip(kinds, places, strict=True)]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self.launches.append((function, grid, config.hStream, values, getattr(config, "attrs", [])))
        return (self.failure,)


def kernel(name: str, arguments: str, grid: tuple[Axis, Axis, Axis], **options: Any) -> Kernel:
    pairs = tuple((pair.split(":")[0], pair.split(":")[1]) for pair in arguments.split())
    return Kernel(name, f"{name}.cubin", name, pairs, grid, 128, **options)


MIXED = (per(("n", 16), ("m", 2), times=3), per("m"), ONE)
KERNELS = {
    one.name: one
    for one in (
        kernel("mixed", "x:pointer n:i32 eps:f32 y:pointer big:i64 m:i32", MIXED),
        kernel("hidden", "x:pointer n:i32", (per("n"), ONE, ONE), hidden_pointers=2, dependent=True),
        kernel("single", "n:i32", (per("n"), ONE, ONE)),
        kernel("none", "", (ONE, ONE, ONE)),
        kernel("mapped", "n:i32 x:tensor_map y:pointer z:tensor_map m:i32", (per("n"), ONE, ONE), hidden_pointers=1),
        kernel("theirs", "x:pointer n:i32", (per("programs"), ONE, ONE)),
    )
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(KERNELS)
    monkeypatch.setattr(module, "cuda", made)
    monkeypatch.setattr(module, "_ensure_context", lambda: None)
    monkeypatch.setattr(module, "_device", lambda: (90, 132))
    return made


@pytest.fixture
def launcher(driver: Driver, tmp_path: Path) -> BundleLauncher:
    for name in KERNELS:
        (tmp_path / f"{name}.cubin").write_bytes(b"cubin")
    return BundleLauncher(KernelBundle(tmp_path, 90, (1, 0), KERNELS, {}, {}))


def test_arguments_reach_the_driver_by_place_and_by_name(launcher: BundleLauncher, driver: Driver) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = (int(value) for value in rng.integers(0, 2**63, 2))
        n, m = (int(value) for value in rng.integers(1, 2**15, 2))
        eps, big = float(np.float32(rng.normal())), -int(rng.integers(1, 2**62))
        want = [x, n, eps, y, big, m]
        grid = (3 * -(-n // 16) * -(-m // 2), m, 1)
        named = dict(zip(("m", "big", "y", "eps", "n", "x", "more"), (m, big, y, eps, n, x, 7), strict=True))
        launcher.launch("mixed", None, tuple(want), 5)
        launcher.launch("mixed", None, named, 6)
        launcher.launch("mixed", (7, 8, 9), want, 2**40)
        found = driver.launches[-3:]
        assert [values for _, _, _, values, _ in found] == [want] * 3
        assert [(given, stream) for _, given, stream, _, _ in found] == [(grid, 5), (grid, 6), ((7, 8, 9), 2**40)]


def test_numbers_at_the_edges_of_their_types_stay_what_they_are(launcher: BundleLauncher, driver: Driver) -> None:
    edges = (2**64 - 1, -(2**31), 0.0, 0, -(2**63), 2**31 - 1)
    launcher.launch("mixed", (1, 1, 1), edges, 0)
    assert driver.launches[-1][3] == list(edges)
    with pytest.raises(Exception, match="format requires"):
        launcher.launch("mixed", (1, 1, 1), (0, 2**31, 0.0, 0, 0, 0), 0)


def test_matrices_reach_the_driver_as_its_tensor_maps(
    launcher: BundleLauncher, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = {MatrixMap(256 * place, 5, 64, 16): bytes(range(place, place + 128)) for place in (1, 2)}
    monkeypatch.setattr(module, "encoded", maps.__getitem__)
    x, z = maps
    launcher.launch("mapped", None, (3, x, 2**60, z, -1), 0)
    launcher.launch("mapped", None, {"m": -1, "z": z, "y": 2**60, "x": x, "n": 3}, 0)
    want = [3, maps[x], 2**60, maps[z], -1, 0]
    assert [values for _, _, _, values, _ in driver.launches] == [want] * 2


def test_launches_of_several_threads_keep_their_arguments(
    launcher: BundleLauncher, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every argument of a launch says whose it is; threads change places before the driver reads them."""
    read = driver.cuLaunchKernelEx

    def late(*args: Any) -> tuple[int]:
        time.sleep(1e-5)
        return read(*args)

    def owners(index: int) -> list[Any]:
        return [index + 1, bytes([index] * 128), index, bytes([index] * 128), index, 0]

    monkeypatch.setattr(driver, "cuLaunchKernelEx", late)
    monkeypatch.setattr(module, "encoded", lambda matrix: bytes([matrix.address] * 128))

    def work(index: int) -> None:
        matrix = MatrixMap(index, 5, 64, 16)
        for _ in range(50):
            launcher.launch("mapped", None, (index + 1, matrix, index, matrix, index), index)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert Counter(stream for _, _, stream, _, _ in driver.launches) == dict.fromkeys(range(4), 50)
    for _, grid, stream, values, _ in driver.launches:
        assert (grid, values) == ((stream + 1, 1, 1), owners(stream))


def test_hidden_pointers_are_null_and_dependents_say_so(launcher: BundleLauncher, driver: Driver) -> None:
    launcher.launch("hidden", None, (9, 4), 0)
    launcher.launch("single", None, {"n": 3}, 0)
    launcher.launch("none", None, (), 0)
    (_, grid, _, hidden, attributes), (_, _, _, single, without), (_, one, _, none, _) = driver.launches
    assert (grid, hidden, single, one, none) == ((4, 1, 1), [9, 4, 0, 0], [3], (1, 1, 1), [])
    assert [attribute.value.programmaticStreamSerializationAllowed for attribute in attributes] == [1]
    assert without == []


def test_an_empty_grid_is_not_launched(launcher: BundleLauncher, driver: Driver) -> None:
    launcher.launch("hidden", None, (9, 0), 0)
    launcher.launch("hidden", (3, 0, 1), (9, 1), 0)
    assert driver.launches == []


def test_a_grid_that_no_argument_decides_must_be_given(launcher: BundleLauncher, driver: Driver) -> None:
    launcher.launch("theirs", (6, 1, 1), (9, 1), 0)
    assert driver.launches[-1][1] == (6, 1, 1)
    with pytest.raises(AssertionError, match="kernel theirs"):
        launcher.launch("theirs", None, (9, 1), 0)


def test_wrong_arguments_and_a_failing_driver_are_named(launcher: BundleLauncher, driver: Driver) -> None:
    with pytest.raises(PluginError, match=r"kernel mixed.*launched without eps, big"):
        launcher.launch("mixed", None, {"x": 1, "n": 1, "y": 1, "m": 1}, 0)
    for args in ((1,), (1, 2, 3)):
        with pytest.raises(PluginError, match=f"kernel hidden.*takes 2 arguments, got {len(args)}"):
            launcher.launch("hidden", None, args, 0)
    with pytest.raises(PluginError, match="kernel unheard"):
        launcher.launch("unheard", None, (), 0)
    driver.failure = 700
    with pytest.raises(PluginError, match=r"launch of kernel single with grid \(2, 1, 1\) failed: out of luck"):
        launcher.launch("single", None, (2,), 0)
