"""Linear layers of the decoder: dense, INT4, and the fusing of several that read the same input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sits_trt.ops.linear import dequantize, w4a16_linear


class DenseLinear(nn.Module):
    """y = x @ weight.T + bias; weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class W4A16Linear(nn.Module):
    """The INT4 linear. Buffers are the arguments of `ops.w4a16_linear`, with the same shapes."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        input_scale: Tensor | None,
        group_size: int,
    ) -> None:
        super().__init__()
        self.register_buffer("qweight", qweight)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        return w4a16_linear(
            x, self.qweight, self.scales, self.zeros, self.bias, self.input_scale, self.group_size
        )  # fmt: skip

    def to_dense(self, dtype: torch.dtype) -> DenseLinear:
        """Return the layer with its weight dequantized once, the input scale multiplied into it."""
        weight = dequantize(self.qweight, self.scales, self.zeros, self.group_size)
        if self.input_scale is not None:
            weight = weight * self.input_scale.float()
        return DenseLinear(weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class Parallel(nn.Module):
    """Several linears over one input, outputs side by side: for layers whose formats differ."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.cat(present) if present else None


def fuse(parts: Sequence[DenseLinear | W4A16Linear]) -> nn.Module:
    """Return one layer with the outputs of `parts` side by side, as one matrix where their formats allow."""
    if len({part.bias is None for part in parts}) > 1:
        return Parallel(parts)
    bias = _stack([part.bias for part in parts])
    dense = [part for part in parts if isinstance(part, DenseLinear)]
    int4 = [part for part in parts if isinstance(part, W4A16Linear)]
    if not int4:
        return DenseLinear(torch.cat([part.weight for part in dense]), bias)
    if dense or not all(_same_format(int4[0], part) for part in int4):
        return Parallel(parts)
    return W4A16Linear(
        torch.cat([part.qweight for part in int4]),
        torch.cat([part.scales for part in int4]),
        _stack([part.zeros for part in int4]),
        bias,
        int4[0].input_scale,
        int4[0].group_size,
    )


def _same_format(one: W4A16Linear, other: W4A16Linear) -> bool:
    if one.group_size != other.group_size or (one.zeros is None) != (other.zeros is None):
        return False
    if one.input_scale is None or other.input_scale is None:
        return one.input_scale is other.input_scale
    return torch.equal(one.input_scale, other.input_scale)
