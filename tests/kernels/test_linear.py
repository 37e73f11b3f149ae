"""The INT4 linear's kernels: their choice, their arguments, and the dense product in OpenAI Triton's interpreter."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from sits_plugins.kernel_spec import CudaModule, TritonKernel
from sits_plugins.launcher import LinearCall
from sits_plugins.linear_catalogue import kernels, needed
from sits_plugins.linear_enqueue import enqueue_gated, enqueue_linear, enqueue_shape
from sits_plugins.linear_plan import DenseShape, choose_gated, choose_shape, workspace, workspace_bound
from sits_plugins.linear_shapes import GATED, HOPPER, HOPPER_ROWS, StreamShape

from sits_trt.ops import w4a16_linear
from tests.support.interpreter import interpreted
from tests.support.linear import random_weight

dense = interpreted("sits_plugins.linear_dense")

LLAMA_3_8B = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)]
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""Of a grid, in x, y and z."""


@pytest.mark.parametrize(("tokens", "rows", "columns", "bias"), [(5, 33, 96, True), (37, 16, 40, False)])
def test_dense_kernel_is_a_matrix_product_with_strided_rows(tokens, rows, columns, bias):
    x, w = torch.randn(tokens, columns).half(), torch.randn(rows, columns).half()
    b = torch.randn(rows).half()
    out = torch.full((tokens, rows + 7), float("nan")).half()
    dense.dense[(-(-tokens // 16), -(-rows // 16))](
        x, w, b, out, tokens, rows, columns, rows + 7, int(bias), BM=16, BN=16, BK=32
    )
    want = x.double() @ w.double().T + (b.double() if bias else 0)
    assert (out[:, :rows].double() - want).norm() < 1e-3 * want.norm()
    assert out[:, rows:].isnan().all()


def catalogue_arguments(sm):
    found = {}
    for source in kernels(sm):
        if isinstance(source, CudaModule):
            found |= {kernel.name: (kernel.arguments, kernel.grid) for kernel in source.kernels}
        else:
            arguments = tuple((n, k) for n, k in source.signature.items() if k != "constexpr")
            found[source.name] = (arguments, source.grid)
    return found


class RecordingLauncher:
    """Checks what is launched against the catalogue: names, numbers of arguments, and grids."""

    def __init__(self, sm, multiprocessors):
        self.sm, self.multiprocessors = sm, multiprocessors
        self.known = catalogue_arguments(sm)
        self.names, self.arguments, self.zeroed = [], [], []

    def zero(self, address, size_bytes, stream):
        assert address
        assert size_bytes % 4 == 0
        self.zeroed.append((address, size_bytes))

    def launch(self, name, grid, args, stream):
        arguments, rule = self.known[name]
        assert len(args) == len(arguments), name
        if grid is None:
            by_name = dict(zip([n for n, _ in arguments], args, strict=True))
            grid = tuple(axis.blocks(by_name) for axis in rule)
        assert all(1 <= size <= most for size, most in zip(grid, MOST_BLOCKS, strict=True)), (name, grid)
        self.names.append(name)
        self.arguments.append(args)


@pytest.mark.parametrize(("sm", "multiprocessors"), [(80, 108), (86, 84), (89, 142), (90, 132), (120, 170)])
def test_every_choice_launches_kernels_of_the_bundle_with_their_arguments(sm, multiprocessors):
    launcher = RecordingLauncher(sm, multiprocessors)
    tokens = (1, 8, 9, 16, 17, 40, 64, 65, 200, 513, 1024, 4096, 100_000)
    sizes = [*LLAMA_3_8B, (576, 1536), (960, 576)]
    for scale, count, (rows, columns) in product((0, 1280), tokens, sizes):
        call = LinearCall(
            x=256, qweight=512, scales=768, zeros=1024, bias=0, input_scale=scale, out=2048, workspace=4096,
            dtype="float16", tokens=count, in_features=columns, out_features=rows, group_size=64,
        )  # fmt: skip
        enqueue_linear(launcher, call, 0)
    kinds = {name.split("_")[1] for name in launcher.names}
    assert kinds == ({"stream", "scale", "hopper"} if sm == 90 else {"stream", "dequantize", "dense"})


@pytest.mark.parametrize(("sm", "multiprocessors"), [(80, 108), (86, 84), (89, 142), (90, 132), (120, 170)])
@pytest.mark.parametrize("zeros", [0, 1024])
def test_gated_linears_are_kernels_of_the_bundle(sm, multiprocessors, zeros):
    launcher = RecordingLauncher(sm, multiprocessors)
    for tokens in (1, 8, 9, 16, 17, 40, 64):
        for rows, columns in [(28672, 4096), (3072, 576), (32, 64)]:
            shape = choose_gated(tokens, rows, columns, sm, multiprocessors)
            if shape is None:
                continue
            call = LinearCall(
                x=256, qweight=512, scales=768, zeros=zeros, bias=0, input_scale=0, out=2048, workspace=0,
                dtype="bfloat16", tokens=tokens, in_features=columns, out_features=rows, group_size=64,
            )  # fmt: skip
            enqueue_gated(launcher, call, shape, 0)
    assert {name.rsplit("_", 3)[0] for name in launcher.names} == {
        f"linear_gated_bf16_g64_{'asym' if zeros else 'sym'}"
    }


def test_silu_goes_into_the_linear_where_that_is_faster():
    for tokens in (1, 8, 16):
        gated = choose_gated(tokens, 28672, 4096, 90, 132)
        assert gated in GATED
        assert gated == choose_shape(tokens, 28672, 4096, 90, 132)
    assert choose_gated(64, 28672, 4096, 90, 132) is None, "the Hopper kernels and a SiLU of its own"
    assert choose_gated(65, 28672, 4096, 80, 108) is None
    assert choose_gated(1, 28672 + 16, 4096, 90, 132) is None, "no whole blocks of gate rows and of up rows"


@pytest.mark.parametrize(("rows", "columns"), [*LLAMA_3_8B, (8192, 8192)])
def test_choice_has_no_cliff_on_an_h200(rows, columns):
    """More tokens never gain more than 5 % by the model: else the larger shape would have served the fewer tokens."""
    counts = sorted({*range(1, 65), *range(65, 4097, 61)})
    times = [
        choose_shape(m, rows, columns, 90, 132).total_us(m, rows, columns, 132) for m in counts
    ]  # fmt: skip
    for smaller, larger in pairwise(times):
        assert larger > 0.95 * smaller


def test_choice_follows_the_number_of_tokens():
    assert isinstance(choose_shape(1, 4096, 4096, 90, 132), StreamShape)
    assert not isinstance(choose_shape(512, 4096, 4096, 90, 132), StreamShape | DenseShape)
    assert isinstance(choose_shape(4096, 28672, 4096, 80, 108), DenseShape)
    assert not isinstance(choose_shape(4095, 28672, 4096, 90, 132, library_gemm=True), DenseShape)
    assert isinstance(choose_shape(4096, 28672, 4096, 90, 132, library_gemm=True), DenseShape)


@pytest.mark.parametrize("sm", [80, 90])
def test_workspace_bound_holds_for_every_choice(sm):
    for rows, columns in LLAMA_3_8B:
        for scaled in (False, True):
            bound = workspace_bound(1000, rows, columns, scaled)
            for tokens in (1, 17, 64, 65, 500, 999, 1000):
                shape = choose_shape(tokens, rows, columns, sm, 132)
                assert workspace(shape, tokens, rows, columns, 132, scaled).total <= bound


@pytest.mark.parametrize("flags", [0, 2**40])
@pytest.mark.parametrize("scale", [0, 1280])
def test_what_lies_in_the_workspace_does_not_overlap(flags, scale):
    """Scaled activations, sums and flags, in this order; flags there are zeroed, those of the layer are left alone."""
    rows, columns, multiprocessors, begin = 1000, 1056, 132, 2**20
    for shape, tokens in product((s for s in HOPPER if s.share_tiles), (1, 33, 300)):
        size = (tokens, rows, columns)
        call = LinearCall(
            x=256, qweight=512, scales=768, zeros=1024, bias=0, input_scale=scale, out=2048, workspace=begin,
            dtype="float16", tokens=tokens, in_features=columns, out_features=rows, group_size=32,
            flags=flags,
        )  # fmt: skip
        launcher = RecordingLauncher(90, multiprocessors)
        enqueue_shape(launcher, call, shape, workspace(shape, *size, multiprocessors, scale != 0), 0)
        blocks = shape.blocks(*size, multiprocessors)
        matrix, *_, sums, found, _, _, _, shares, launched = launcher.arguments[-1]
        assert (shares, launched) == (1, blocks)
        assert matrix == (begin if scale else 256, tokens, columns, shape.tokens)
        assert sums >= begin + (tokens * columns * 2 if scale else 0)
        end = sums + blocks * shape.tokens * HOPPER_ROWS * 4
        if flags:
            assert (found, launcher.zeroed) == (flags, [])
        else:
            assert launcher.zeroed == [(found, blocks * 4)]
            assert found >= end
            end = found + blocks * 4
        assert end <= begin + workspace_bound(*size, scale != 0)


def test_a_build_needs_only_the_linears_of_its_format():
    wanted = needed("bfloat16", 32, symmetric=False)
    names = [source.name for source in kernels(90) if wanted(source.name)]
    assert sorted(names) == sorted(
        [
            "linear_stream_bf16_g32_asym", "linear_gated_bf16_g32_asym",
            "linear_dequantize_bf16_g32_asym", "linear_hopper_bf16_g32_asym",
            "linear_scale_bf16", "linear_dense_bf16",
        ]
    )  # fmt: skip
    assert wanted("attention_anything")


def test_specialisations_have_unique_names():
    for sm in (80, 90):
        names = [s.name for s in kernels(sm) if isinstance(s, TritonKernel)]
        names += [k.name for s in kernels(sm) if isinstance(s, CudaModule) for k in s.kernels]
        assert len(names) == len(set(names))


def test_reference_is_what_the_op_says():
    weight = random_weight(9, 64, 32, ["zeros", "bias", "input_scale"])
    x = torch.randn(4, 64, dtype=torch.float64)
    out = w4a16_linear(x, weight.qweight, weight.scales, weight.zeros, weight.bias, weight.input_scale, 32)
    assert np.allclose(out.numpy(), weight.reference(x).numpy(), rtol=1e-6)
