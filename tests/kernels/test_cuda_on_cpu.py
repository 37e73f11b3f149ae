"""The emulated GPU finds what it is there to find: faults put into copies of the real kernels, and unknown PTX."""

from __future__ import annotations

import shutil

import pytest
import torch
from sits_plugins import linear_catalogue
from sits_plugins.kernel_spec import CudaModule
from sits_plugins.linear_plan import flags_bytes
from sits_plugins.linear_shapes import STREAM, HopperShape

from tests.support.cuda_on_cpu.build import PLUGINS, CpuBuilds, build_machine, compiler
from tests.support.cuda_on_cpu.launcher import CudaOnCpu, KernelFault
from tests.support.cuda_on_cpu.translate import UnknownInstruction, translate
from tests.support.linear import random_weight
from tests.support.linear_launch import TOLERANCE, run_shape

SHARED, ALONE, CLUSTER = HopperShape(32, 1, True), HopperShape(32, 1, False), HopperShape(32, 2, False)

FAULTS = {
    "no arrival: weights": (
        SHARED, "linear_hopper.cu", "barrier_arrive_if(speaks, rings.weights_empty + weights_stage * 8);", "",
        "deadlock",
    ),
    "no arrival: a tile's last inputs": (
        SHARED, "linear_hopper.cu", "barrier_arrive_if(speaks && before, before);\n#pragma", "\n#pragma", "deadlock",
    ),
    "no wait for inputs": (
        ALONE, "linear_hopper.cu", "if (step == 0) barrier_wait_unless(input_ready, full + place * 8, full_phase);", "",
        "under way",
    ),
    "wrong phase: producer": (
        CLUSTER, "linear_hopper.cu", "int stage = 0, phase = 1;", "int stage = 0, phase = 0;", "deadlock",
    ),
    "wrong phase: consumer": (ALONE, "linear_hopper.cu", "phase ^= set == 0;", "", "under way|deadlock"),
    "inputs released one product early": (
        ALONE, "linear_hopper.cu", "if (step == AHEAD - 1) {", "if (step == AHEAD - 2) {", "under way",
    ),
    "registers overwritten under a product": (
        HopperShape(176, 1, True), "linear_hopper.cu", '"n"(AHEAD)', '"n"(AHEAD + 1)', "error|under way",
    ),
    "too few bytes expected": (
        ALONE, "linear_hopper.cu", "* (ZEROS ? 48 : 32)", "* 32", "deadlock|under way",
    ),
    "a run's end, one too low": (
        SHARED, "linear_hopper.cuh", "(int)(end - (long)last_tile * chunks)",
        "(int)(end - (long)last_tile * chunks) - 1", "flag|error|deadlock",
    ),
    "a run's beginning, one too low": (
        HopperShape(176, 1, True), "linear_hopper.cuh", "units * block / gridDim.x - (long)tile * chunks",
        "units * block / gridDim.x - (long)tile * chunks - 1", "flag|error|deadlock",
    ),
    "a flag stays raised": (SHARED, "linear_hopper.cuh", "flags[block] = 0;", "", "flag"),
    "staged tokens read early": (
        ALONE, "linear_hopper.cuh", "        threads_sync(1 + warp / 4, 128);\n        const", "        const", "error",
    ),
    "sums over inputs that others still read": (
        CLUSTER, "linear_hopper.cuh", "    threads_sync(1, WARPS * 32);\n    float", "    float", "error",
    ),
    "a cluster's block ends early": (
        CLUSTER, "linear_hopper.cuh", "    cluster_sync();\n}", "}", "a block that has ended",
    ),
    "stream's warps do not wait": (STREAM[-1], "linear_stream.cu", "    __syncthreads();\n", "", "error"),
}  # fmt: skip
"""What is wrong, the shape that shows it, the file, its text and what stands there instead, and what is to be said."""

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="needs a C++ compiler that knows _Float16: g++ 12, clang++ 15 or newer"
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return build_machine(tmp_path_factory.mktemp("machine"))


def launcher_of(directory, machine, sources, seed=None):
    modules = [module for module in linear_catalogue.kernels(90) if isinstance(module, CudaModule)]
    return CudaOnCpu(modules, CpuBuilds(directory, machine, sources), multiprocessors=5, seed=seed)


def faulty(directory, file, right, wrong):
    """Return a copy of the sources with one text replaced."""
    sources = directory / "sources"
    sources.mkdir()
    for path in PLUGINS.glob("*.cu*"):
        shutil.copy(path, sources)
    text = (sources / file).read_text()
    assert right in text, f"{file} has changed: {right}"
    (sources / file).write_text(text.replace(right, wrong))
    return sources


def check(launcher, shape):
    """Run a shape three times, as a fault may need an unlucky order, and raise AssertionError for what is wrong."""
    weight = random_weight(260, 1344, 64, ["zeros"], dtype=torch.float16)
    x = torch.randn(50, 1344).half()
    want = weight.reference(x)
    for _ in range(3):
        flags = torch.zeros(flags_bytes() // 4, dtype=torch.int32)
        out = run_shape(launcher, shape, weight, x, flags=flags)
        assert not flags.any(), "a flag is left raised"
        error = ((out.double() - want).norm() / want.norm()).item()
        assert error < TOLERANCE[torch.float16], f"error {error}"


@needs_compiler
@pytest.mark.parametrize(("shape", "file", "right", "wrong", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_in_a_kernel_is_found(tmp_path, machine, shape, file, right, wrong, said):
    launcher = launcher_of(tmp_path, machine, faulty(tmp_path, file, right, wrong))
    with pytest.raises(AssertionError, match=said):
        check(launcher, shape)


@needs_compiler
def test_a_seed_repeats_a_fault(tmp_path, machine):
    shape, *fault, _ = FAULTS["inputs released one product early"]
    sources = faulty(tmp_path, *fault)
    found = []
    for _ in range(2):
        with pytest.raises(KernelFault) as caught:
            check(launcher_of(tmp_path, machine, sources, seed=5), shape)
        found.append(str(caught.value))
    assert found[0] == found[1]
    assert "seed=5" in found[0]


def test_unknown_ptx_is_named():
    with pytest.raises(UnknownInstruction, match=r"cp\.async\.wait_everything"):
        translate('asm volatile("cp.async.wait_everything;" ::: "memory");')


def test_ptx_becomes_calls():
    ptx = "{ .reg .pred p; again: setp.ne.u32 p, %1, 0; @!p bra again; mov.u32 %0, %1; }"
    assert translate(f'asm("{ptx}" : "=r"(to) : "r"(f(x, y)));') == (
        "{ bool register_p; again_0: ptx::setp_ne_u32(register_p, (f(x, y)), 0); "
        "if (!register_p) goto again_0; ptx::mov_u32((to), (f(x, y))); }"
    )
