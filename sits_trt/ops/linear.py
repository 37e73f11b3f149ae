"""The W4A16 linear op: INT4 weights with a scale per group, activations in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantize(qweight: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> Tensor:
    """Return float32 [out, in]: (code - zero) * scale.

    qweight: uint8 [out, in/2], low nibble first (`layouts.pack_sits`). scales: [out, in/group_size].
    zeros: uint8 [out, in/group_size], or None for the symmetric zero point 8.
    """
    codes = torch.stack((qweight & 0xF, qweight >> 4), dim=-1).reshape(qweight.shape[0], -1, group_size).float()
    shift = 8.0 if zeros is None else zeros.float()[:, :, None]
    return ((codes - shift) * scales.float()[:, :, None]).reshape(qweight.shape[0], -1)


@torch.library.custom_op("sits::w4a16_linear", mutates_args=())
def w4a16_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    group_size: int,
) -> Tensor:
    """Return (x * input_scale) @ dequantize(qweight).T + bias.

    x: [tokens, in] floating. qweight, scales, zeros: as in `dequantize`. bias: [out]. input_scale: [in].
    Returns [tokens, out] in x's dtype; arithmetic is float32, or float64 for float64 input.
    """
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(exact)
    if input_scale is not None:
        wide = wide * input_scale.to(exact)
    out = wide @ dequantize(qweight, scales, zeros, group_size).to(exact).T
    if bias is not None:
        out = out + bias.to(exact)
    return out.to(x.dtype)


@w4a16_linear.register_fake
def _(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    group_size: int,
) -> Tensor:
    return x.new_empty(x.shape[0], qweight.shape[0])
