"""The CUDA C++ of the INT4 linear, run on the CPU, poisoned outputs, against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from sits_plugins import linear_catalogue
from sits_plugins.kernel_spec import CudaModule
from sits_plugins.launcher import LinearCall
from sits_plugins.linear_enqueue import enqueue_dequantize
from sits_plugins.linear_plan import choose_shape, flags_bytes
from sits_plugins.linear_shapes import GATED, HOPPER, STREAM, HopperShape

from sits_trt.kernels.linear import KernelLinear
from tests.support.cuda_on_cpu.build import CpuBuilds, build_machine, compiler
from tests.support.cuda_on_cpu.launcher import CudaOnCpu
from tests.support.linear import random_weight
from tests.support.linear_launch import TOLERANCE, check_shape, run_shape

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="needs a C++ compiler that knows _Float16: g++ 12, clang++ 15 or newer"
)

FORMATS = list(product((torch.float16, torch.bfloat16), (32, 64, 128), (False, True)))
"""Activation type, group size, and whether there are zero points."""

TOKENS = (32, 128, 176)
"""Of Hopper tiles: the fewest, the most whose ring has two chunks of activations, and one whose ring has one."""


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kernels")
    return CpuBuilds(directory, build_machine(directory))


def launcher_of(builds, multiprocessors=5):
    modules = [module for module in linear_catalogue.kernels(90) if isinstance(module, CudaModule)]
    return CudaOnCpu(modules, builds, multiprocessors)


@pytest.mark.parametrize(("place", "shape"), list(enumerate(STREAM)), ids=lambda value: getattr(value, "suffix", ""))
def test_stream_equals_the_reference(builds, place, shape):
    weight_format = FORMATS[place % len(FORMATS)]
    group, tile = weight_format[1], 8 * shape.tiles
    cases = [
        (1, 53, 5 * group, ""),
        (3, 17, group, "bias"),
        (tile + 3, 100, 9 * group, "bias input_scale"),
        (tile, 33, 1280, "input_scale"),
    ]
    check_shape(launcher_of(builds), shape, weight_format, cases)


@pytest.mark.parametrize(("place", "shape"), list(enumerate(GATED)), ids=lambda value: getattr(value, "suffix", ""))
def test_gated_equals_the_reference(builds, place, shape):
    weight_format = FORMATS[-1 - place % len(FORMATS)]
    group, tile = weight_format[1], 8 * shape.tiles
    cases = [(1, 32, 5 * group, "gated"), (tile + 3, 96, 9 * group, "gated bias input_scale")]
    check_shape(launcher_of(builds), shape, weight_format, cases)


def hopper_cases(tile, group):
    return [
        (1, 53, 5 * group, "flags"),
        (3, 17, group, "bias"),
        (tile + 3, 260, 9 * group, "bias input_scale flags"),
        (2 * tile + 17, 333, 640, "bias"),
    ]


@pytest.mark.parametrize("place", range(len(FORMATS)))
def test_hopper_equals_the_reference(builds, place):
    dtype, group, zeros = FORMATS[place]
    launcher = launcher_of(builds, multiprocessors=(3, 7)[place % 2])
    tile = TOKENS[(place + place // 3) % 3]
    for split, share_tiles in ((1, False), (1, True), (2, False)):
        check_shape(launcher, HopperShape(tile, split, share_tiles), (dtype, group, zeros), hopper_cases(tile, group))


@pytest.mark.slow
@pytest.mark.parametrize("shape", HOPPER, ids=lambda shape: f"{shape.suffix}{'_shared' * shape.share_tiles}")
def test_every_hopper_shape_equals_the_reference(builds, shape):
    for place in (shape.tokens // 16 % 12, (shape.tokens // 16 + 7) % 12):
        check_shape(launcher_of(builds), shape, FORMATS[place], hopper_cases(shape.tokens, FORMATS[place][1]))


@pytest.mark.parametrize("multiprocessors", [1, 2, 5])
def test_shared_tiles_are_the_same_bits_in_any_order_of_threads(builds, multiprocessors):
    """Sums of other blocks are added in a fixed order, whoever was first; a tile may be shared by several blocks."""
    weight = random_weight(200, 2304, 64, ["bias"], dtype=torch.float16)
    x = torch.randn(20, 2304).half()
    flags = torch.zeros(flags_bytes() // 4, dtype=torch.int32)
    launcher = launcher_of(builds, multiprocessors)
    runs = [run_shape(launcher, HopperShape(32, 1, True), weight, x, flags=flags) for _ in range(8)]
    want = weight.reference(x)
    assert (runs[0].double() - want).norm() < TOLERANCE[torch.float16] * want.norm()
    assert all(torch.equal(out, runs[0]) for out in runs[1:])
    assert not flags.any()


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "group", "options"),
    [
        (1, 33, 96, 32, ""),
        (2, 64, 128, 64, "zeros"),
        (3, 40, 256, 128, "zeros bias"),
        (17, 24, 160, 32, "bias input_scale"),
        (64, 50, 192, 64, "zeros bias input_scale"),
        (130, 20, 128, 128, "input_scale"),
    ],
)
def test_what_is_chosen_equals_the_reference(builds, tokens, rows, columns, group, options):
    launcher = launcher_of(builds)
    shape = choose_shape(tokens, rows, columns, launcher.sm, launcher.multiprocessors)
    check_shape(launcher, shape, (torch.float16, group, "zeros" in options), [(tokens, rows, columns, options)])


@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_b25_bias_is_added_once_in_every_shape(builds, tokens):
    """Same packed weight with bias 0 and bias 1..N: the difference is the bias."""
    launcher = launcher_of(builds)
    weight = random_weight(96, 512, 64, ["zeros"], dtype=torch.float16)
    x = torch.randn(tokens, 512).half()
    hopper = [HopperShape(32, split, share_tiles) for split, share_tiles in ((1, False), (1, True), (2, False))]
    for shape in (STREAM[0], STREAM[8], *hopper):
        weight.bias = torch.zeros(96).half()
        without = run_shape(launcher, shape, weight, x).float()
        weight.bias = torch.arange(1.0, 97.0).half()
        difference = run_shape(launcher, shape, weight, x).float() - without
        # Sums of up to 512 terms are rounded to 2**-11 of their size, some tens.
        assert torch.allclose(difference, weight.bias.float().expand_as(difference), atol=0.1), shape


@pytest.mark.parametrize(("dtype", "group", "zeros"), FORMATS)
def test_dequantized_weights_are_exact(builds, dtype, group, zeros):
    """(code - zero) is exact; times the scale, and times the input scale, it is rounded once each, as torch rounds."""
    rows, columns = 37, 9 * group
    weight = random_weight(rows, columns, group, ["input_scale", *(["zeros"] if zeros else [])], dtype=dtype)
    launcher = launcher_of(builds)
    layer = KernelLinear(weight.layer(), dtype, launcher)
    codes = torch.stack((weight.qweight & 0xF, weight.qweight >> 4), dim=-1).flatten(1).to(dtype)
    shift = 8 if weight.zeros is None else weight.zeros.to(dtype).repeat_interleave(group, dim=1)
    want = (codes - shift) * weight.scales.repeat_interleave(group, dim=1)
    for input_scale in (None, layer.input_scale):
        out = torch.full((rows + 1, columns), float("nan"), dtype=dtype)
        call = LinearCall(
            x=0, qweight=layer.qweight.data_ptr(), scales=layer.scales.data_ptr(),
            zeros=0 if layer.zeros is None else layer.zeros.data_ptr(), bias=0,
            input_scale=0 if input_scale is None else input_scale.data_ptr(), out=0, workspace=0,
            dtype=str(dtype).removeprefix("torch."), tokens=0, in_features=columns, out_features=rows,
            group_size=group,
        )  # fmt: skip
        enqueue_dequantize(launcher, call, out.data_ptr(), 0, rows, 0)
        assert torch.equal(out[:-1], want if input_scale is None else want * input_scale)
        assert out[-1].isnan().all()
