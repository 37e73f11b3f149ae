"""The fused small kernels, run by OpenAI Triton's interpreter, against torch's separate operations."""

from __future__ import annotations

import pytest
import torch
from sits_plugins.compile import compile_source
from sits_plugins.fused_catalogue import kernels
from sits_plugins.fused_enqueue import NORM_BLOCKS, enqueue_norm, enqueue_silu
from torch.nn.functional import rms_norm, silu

from sits_trt.errors import PluginError
from sits_trt.ops import scale_recover
from tests.support.interpreter import interpreted
from tests.support.recording_launcher import RecordingLauncher

fused = interpreted("sits_plugins.fused_norm")


@pytest.mark.parametrize("hidden", [64, 576, 1008])
@pytest.mark.parametrize(("with_delta", "with_recover"), [(True, True), (True, False), (False, True), (False, False)])
def test_add_norm_equals_the_separate_operations(hidden, with_delta, with_recover):
    residual, delta = torch.randn(3, hidden).half(), torch.randn(3, hidden).half()
    recover, weight = 1 + 0.1 * torch.randn(hidden).half(), torch.randn(hidden).half()
    x = residual + delta if with_delta else residual
    x = scale_recover(x, recover) if with_recover else x
    want = rms_norm(x.double(), (hidden,), weight.double(), 1e-5)
    got, out = residual.clone(), torch.full((3, hidden), float("nan")).half()
    fused.add_norm[(3,)](
        got, delta, recover, weight, out, hidden, int(with_delta), int(with_recover), 1e-5, BLOCK=1024, DEPENDENT=False
    )  # fmt: skip
    assert torch.equal(got, x)
    # One rounding of the result to float16.
    assert (out.double() - want).norm() < 6e-4 * want.norm()


@pytest.mark.parametrize("size", [16, 1040])
def test_silu_mul_equals_the_separate_operations(size):
    gate_up = torch.randn(5, 2 * size).half()
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.full((5, size), float("nan")).half()
    fused.silu_mul[(5 * -(-size // 1024),)](gate_up, out, size, BLOCK=1024, DEPENDENT=False)
    want = silu(gate.double()) * up.double()
    # SiLU and the product are each rounded to float16.
    assert (out.double() - want).norm() < 1e-3 * want.norm()


def test_zero_row_stays_zero():
    zeros, out = torch.zeros(1, 64).half(), torch.full((1, 64), float("nan")).half()
    fused.add_norm[(1,)](zeros, zeros, zeros, torch.ones(64).half(), out, 64, 1, 0, 1e-5, BLOCK=1024, DEPENDENT=False)
    assert not out.any()


@pytest.mark.parametrize("sm", [80, 90])
def test_kernels_wait_where_they_may_start_early(sm, tmp_path):
    """A launch is dependent exactly where the kernel was compiled with the wait, which SM 8.0 does not have."""
    specs = kernels(sm)
    assert {spec.dependent for spec in specs if "DEPENDENT" in spec.constants} == {sm >= 90}
    for spec in specs:
        assert spec.constants.get("DEPENDENT", False) == spec.dependent
        if spec.name in ("fused_norm_fp16_1024", "fused_silu_bf16"):
            (kernel,) = compile_source(spec, sm, tmp_path)
            assert kernel.dependent == (sm >= 90)


def test_enqueue_launches_kernels_of_the_catalogue_with_their_arguments():
    launcher = RecordingLauncher()
    enqueue_norm(launcher, "float16", 7, 4096, 1e-5, 1, 0, 3, 4, 5, 0)
    enqueue_norm(launcher, "bfloat16", 7, 4112, 1e-5, 1, 2, 0, 4, 5, 0)
    enqueue_silu(launcher, "float16", 7, 14336, 1, 2, 0)
    enqueue_norm(launcher, "float16", 0, 64, 1e-5, 1, 0, 0, 4, 5, 0)
    names = [name for name, _, _ in launcher.launches]
    assert names == ["fused_norm_fp16_4096", "fused_norm_bf16_8192", "fused_silu_fp16"]
    specs = {spec.name: spec for spec in kernels(80)}
    for name, grid, args in launcher.launches:
        wanted = {key for key, kind in specs[name].signature.items() if kind != "constexpr"}
        assert wanted == set(args)
        assert grid == (7 * (14 if name == "fused_silu_fp16" else 1), 1, 1)
    assert [args["has_delta"] for _, _, args in launcher.launches[:2]] == [0, 1]


def test_more_tokens_than_a_grid_has_rows_are_taken():
    launcher = RecordingLauncher()
    enqueue_norm(launcher, "float16", 70000, 4096, 1e-5, 1, 0, 3, 4, 5, 0)
    enqueue_silu(launcher, "float16", 70000, 14336, 1, 2, 0)
    assert [grid for _, grid, _ in launcher.launches] == [(70000, 1, 1), (14 * 70000, 1, 1)]


@pytest.mark.parametrize("hidden", [NORM_BLOCKS[-1] + 16, 100])
def test_rows_that_no_kernel_takes_are_refused(hidden):
    with pytest.raises(PluginError, match=f"rows of {hidden} are not supported"):
        enqueue_norm(RecordingLauncher(), "float16", 1, hidden, 1e-5, 1, 2, 3, 4, 5, 0)
    with pytest.raises(PluginError, match="rows of 100 are not supported"):
        enqueue_silu(RecordingLauncher(), "float16", 1, 100, 1, 2, 0)
