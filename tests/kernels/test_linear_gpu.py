"""Every shape of the INT4 linear's kernels on a real GPU, poisoned outputs, against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from sits_plugins.linear_plan import DenseShape, choose_shape
from sits_plugins.linear_shapes import GATED, HOPPER, STREAM, StreamShape

from sits_trt.kernels.fused import silu_mul
from sits_trt.kernels.linear import KernelLinear
from tests.support.gpu_launcher import gpu_launcher
from tests.support.linear import random_weight
from tests.support.linear_launch import (
    GATED_TOLERANCE,
    TOLERANCE,
    check_shape,
    random_case,
    relative_error,
    run_shape,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    return gpu_launcher(tmp_path_factory.mktemp("kernels"), lambda name: name.startswith(("linear_", "fused_silu")))


def shapes_of(launcher):
    return [*STREAM, DenseShape(), *(HOPPER if launcher.sm == 90 else ())]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "zeros"), list(product((32, 64, 128), (False, True))))
def test_every_shape_equals_the_reference(launcher, dtype, group, zeros):
    for shape in shapes_of(launcher):
        tile = 8 * shape.tiles if isinstance(shape, StreamShape) else getattr(shape, "tokens", 64)
        cases = [
            (1, 53, 5 * group, ""),
            (3, 17, group, "bias"),
            (tile + 3, 260, 33 * group, "bias input_scale"),
            (2 * tile + 17, 1001, 1024, "bias"),
        ]
        check_shape(launcher, shape, (dtype, group, zeros), cases, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "zeros"), list(product((32, 64, 128), (False, True))))
def test_every_gated_shape_equals_the_reference_and_the_separate_kernels(launcher, dtype, group, zeros):
    for shape in GATED:
        tile = 8 * shape.tiles
        cases = [
            (1, 32, 5 * group, ""),
            (tile + 3, 288, 33 * group, "bias input_scale"),
            (2 * tile + 1, 992, 1024, "bias"),
        ]
        for case in cases:
            weight, x = random_case((dtype, group, zeros), case, "cuda")
            out, want = run_shape(launcher, shape, weight, x, gated=True), weight.reference_gated(x)
            error = relative_error(out, want)
            assert error < GATED_TOLERANCE[dtype], (shape, case, error)
            # The same sums in the same order; exponential and quotient may differ in their last bit.
            separate = silu_mul(launcher, run_shape(launcher, shape, weight, x)).double()
            difference = ((out.double() - separate).norm() / want.norm()).item()
            assert difference < GATED_TOLERANCE[dtype] / 4, (shape, case, difference)


@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 17, 24, 64, 65, 200])
@pytest.mark.parametrize("options", [["zeros"], ["bias", "input_scale"]])
def test_gated_layer_equals_the_reference_inside_and_outside_a_graph(launcher, tokens, options):
    weight = random_weight(1088, 1024, 128, options, device="cuda")
    layer = KernelLinear(weight.layer(), torch.float16, launcher)
    x = torch.randn(tokens, 1024, device="cuda").half()
    out = layer.silu_gated(x)
    assert out.shape == (tokens, 544)
    if not tokens:
        return
    want = weight.reference_gated(x)
    assert (out.double() - want).norm() < GATED_TOLERANCE[torch.float16] * want.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.silu_gated(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        want = weight.reference_gated(x)
        assert (captured.double() - want).norm() < GATED_TOLERANCE[torch.float16] * want.norm()


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_b25_bias_is_added_once_in_every_shape(launcher, tokens):
    """Same packed weight with bias 0 and bias 1..N: the difference is the bias."""
    weight = random_weight(96, 512, 64, ["zeros"], device="cuda")
    x = torch.randn(tokens, 512, device="cuda").half()
    for shape in shapes_of(launcher):
        weight.bias = torch.zeros(96, device="cuda").half()
        without = run_shape(launcher, shape, weight, x).float()
        weight.bias = torch.arange(1.0, 97.0, device="cuda").half()
        difference = run_shape(launcher, shape, weight, x).float() - without
        assert torch.allclose(difference, weight.bias.float().expand_as(difference), atol=0.1), shape


@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 17, 64, 65, 200, 513, 2100])
def test_layer_equals_the_op_inside_and_outside_a_graph(launcher, tokens):
    weight = random_weight(640, 1024, 128, ["zeros", "bias", "input_scale"], device="cuda")
    layer = KernelLinear(weight.layer(), torch.float16, launcher)
    x = torch.randn(tokens, 1024, device="cuda").half()
    want = weight.reference(x)
    out = layer(x)
    assert out.shape == want.shape
    if not tokens:
        return
    assert (out.double() - want).norm() < TOLERANCE[torch.float16] * want.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        want = weight.reference(x)
        assert (captured.double() - want).norm() < TOLERANCE[torch.float16] * want.norm()


def test_more_tokens_than_a_grid_has_rows(launcher):
    """Scaling of activations and SiLU: a grid's y and z hold 65,535 blocks."""
    weight = random_weight(64, 64, 64, ["input_scale"], device="cuda")
    x = torch.randn(70_000, 64, device="cuda").half()
    shape = choose_shape(70_000, 64, 64, launcher.sm, launcher.multiprocessors)
    out, want = run_shape(launcher, shape, weight, x), weight.reference(x)
    assert (out.double() - want).norm() < TOLERANCE[torch.float16] * want.norm()
    want = weight.reference_gated(x)
    assert (silu_mul(launcher, out).double() - want).norm() < GATED_TOLERANCE[torch.float16] * want.norm()


def test_results_do_not_depend_on_timing(launcher):
    """Split sums are added in a fixed order: the same input gives the same bits, launch after launch."""
    weight = random_weight(4096, 4096, 128, device="cuda")
    layer = KernelLinear(weight.layer(), torch.float16, launcher)
    for tokens in (1, 16, 60, 250, 700):
        x = torch.randn(tokens, 4096, device="cuda").half()
        first = layer(x)
        for _ in range(5):
            assert torch.equal(layer(x), first)
