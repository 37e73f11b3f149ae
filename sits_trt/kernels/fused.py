"""The fused small operations on the GPU: what stands between a decoder layer's matrix products."""

from __future__ import annotations

import torch
from sits_plugins.fused_enqueue import Launches, enqueue_norm, enqueue_silu
from torch import Tensor

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def add_norm(
    launcher: Launches,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    recover: Tensor | None = None,
) -> Tensor:
    """Return RMSNorm((residual + delta) * recover) * weight and leave what is normed in `residual`.

    residual, delta: [tokens, hidden] contiguous, float16 or bfloat16, hidden a multiple of 16; weight, recover:
    [hidden] of the same type. Both additions to the norm are optional. Rounds after each step, as separate
    operations do.
    """
    out = torch.empty_like(residual)
    enqueue_norm(
        launcher, _NAMES[residual.dtype], *residual.shape, eps, residual.data_ptr(), _address(delta),
        _address(recover), weight.data_ptr(), out.data_ptr(), torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    return out


def silu_mul(launcher: Launches, gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [tokens, size], of gate_up [tokens, 2 * size] contiguous, float16 or bfloat16."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    stream = torch.cuda.current_stream().cuda_stream
    enqueue_silu(launcher, _NAMES[gate_up.dtype], tokens, size, gate_up.data_ptr(), out.data_ptr(), stream)
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
