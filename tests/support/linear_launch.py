"""One launch of a shape of the INT4 linear's kernels, and how near its results come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sits_plugins.launcher import LinearCall
from sits_plugins.linear_enqueue import enqueue_gated, enqueue_shape
from sits_plugins.linear_plan import Shape, flags_bytes, workspace
from torch import Tensor

from sits_trt.kernels.linear import KernelLinear
from tests.support.linear import RandomWeight, random_weight

TOLERANCE = {torch.float16: 8e-4, torch.bfloat16: 6e-3}
"""Result and, on the way to wgmma, weight times scale are rounded to 16 bits: 2**-12 and 2**-9 relative, each once."""

GATED_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Gate, up, SiLU of the gate and the product are rounded to 16 bits: 2**-11 and 2**-8 at most, four times."""

_GUARD_BYTES = 1 << 20
"""Behind the workspace, to be left alone: more than the sums of a few blocks."""


WeightFormat = tuple[torch.dtype, int, bool]
"""Activation type, group size, and whether there are zero points."""

Case = tuple[int, int, int, str]
"""Tokens, rows, columns, and options of `tests.support.linear.random_weight` in one text."""


def random_case(weight_format: WeightFormat, case: Case, device: str) -> tuple[RandomWeight, Tensor]:
    """Return a random weight and activations [tokens, columns]."""
    dtype, group, zeros = weight_format
    tokens, rows, columns, options = case
    chosen = [*options.split(), *(["zeros"] if zeros else [])]
    x = torch.randn(tokens, columns, device=device).to(dtype)
    return random_weight(rows, columns, group, chosen, device, dtype), x


def relative_error(out: Tensor, want: Tensor) -> float:
    return ((out.double() - want).norm() / want.norm()).item()


def check_shape(
    launcher: Any, shape: Shape, weight_format: WeightFormat, cases: Iterable[Case], device: str = "cpu"
) -> None:  # fmt: skip
    """Hold `shape` to the reference in every case. Options besides: 'flags', of which none may stay raised; 'gated'."""
    for case in cases:
        weight, x = random_case(weight_format, case, device)
        options = case[-1]
        gated = "gated" in options
        flags = torch.zeros(flags_bytes() // 4, dtype=torch.int32, device=device) if "flags" in options else None
        out = run_shape(launcher, shape, weight, x, gated, flags)
        error = relative_error(out, weight.reference_gated(x) if gated else weight.reference(x))
        assert error < (GATED_TOLERANCE if gated else TOLERANCE)[x.dtype], (shape, weight_format, case, error)
        assert flags is None or not flags.any(), "a flag was left raised"


def run_shape(
    launcher: Any, shape: Shape, weight: RandomWeight, x: Tensor, gated: bool = False, flags: Tensor | None = None
) -> Tensor:
    """Launch `shape` on poisoned memory, on the device of x, and return its output."""
    layer = KernelLinear(weight.layer(), x.dtype, launcher)
    size = (x.shape[0], layer.out_features, layer.in_features)
    scratch = workspace(shape, *size, launcher.multiprocessors, layer.input_scale is not None)
    memory = torch.full((scratch.total + _GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=x.device)
    out_features = layer.out_features // 2 if gated else layer.out_features
    out = torch.full((x.shape[0] + 1, out_features), float("nan"), dtype=x.dtype, device=x.device)
    call = LinearCall(
        **{
            name: 0 if tensor is None else tensor.data_ptr()
            for name, tensor in (
                ("qweight", layer.qweight), ("scales", layer.scales), ("zeros", layer.zeros), ("bias", layer.bias),
                ("input_scale", layer.input_scale), ("x", x), ("out", out), ("workspace", memory), ("flags", flags),
            )
        },
        dtype=str(x.dtype).removeprefix("torch."), tokens=size[0], in_features=size[2], out_features=size[1],
        group_size=layer.group_size,
    )  # fmt: skip
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
    if gated:
        enqueue_gated(launcher, call, shape, stream)
    else:
        enqueue_shape(launcher, call, shape, scratch, stream)
    if x.is_cuda:
        torch.cuda.synchronize()
    assert (memory[scratch.total :] == 0xFF).all(), "wrote behind the workspace"
    assert out[-1].isnan().all(), "wrote behind the last token"
    return out[:-1]
