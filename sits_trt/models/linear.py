"""Linear layers of the decoder: dense, INT4, any other format, and the fusing of several that read the same input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sits_trt.ops.linear import dequantize, w4a16_linear
from sits_trt.ops.quantized_linear import decode_weight, quantized_linear, rounded_linear
from sits_trt.spec import WeightFormat


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


class _CodedLinear(nn.Module):
    """The buffers of a linear that is stored as codes: arguments of its op, with the same shapes."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, input_scale: Tensor | None
    ) -> None:
        super().__init__()
        self.register_buffer("qweight", qweight)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)


class W4A16Linear(_CodedLinear):
    """The INT4 linear: `ops.w4a16_linear`."""

    def __init__(
        self,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        input_scale: Tensor | None,
        group_size: int,
    ) -> None:
        super().__init__(qweight, scales, zeros, bias, input_scale)
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        return w4a16_linear(
            x, self.qweight, self.scales, self.zeros, self.bias, self.input_scale, self.group_size
        )  # fmt: skip

    def to_dense(self, dtype: torch.dtype) -> DenseLinear:
        """Return the layer with its weight dequantized once, the input scale multiplied into it."""
        return _dense(
            dequantize(self.qweight, self.scales, self.zeros, self.group_size), self.bias, self.input_scale, dtype
        )


class QuantizedLinear(_CodedLinear):
    """A linear of any format: `ops.quantized_linear`."""

    def __init__(
        self,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        input_scale: Tensor | None,
        form: WeightFormat,
    ) -> None:
        super().__init__(qweight, scales, zeros, bias, input_scale)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.qweight, self.scales, self.zeros, self.bias, self.input_scale, self.form)

    def to_dense(self, dtype: torch.dtype) -> DenseLinear | RoundedLinear:
        """Return the layer with its weight dequantized once; one that rounds its input keeps on doing so."""
        weight = decode_weight(self.qweight, self.scales, self.zeros, self.form)
        if self.form.activations == "float16":
            return _dense(weight, self.bias, self.input_scale, dtype)
        return RoundedLinear(weight, self.bias, self.input_scale, self.form)


class RoundedLinear(nn.Module):
    """A dense layer that rounds its input as `form.activations` says: `ops.quantized_linear` with its weight decoded.

    weight [out, in] is float32 whatever the model computes in: products of codes and their sums must stay exact.
    """

    weight: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, input_scale: Tensor | None, form: WeightFormat) -> None:
        super().__init__()
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return rounded_linear(x, self.weight, self.bias, self.input_scale, self.form)


class Parallel(nn.Module):
    """Several linears over one input, outputs side by side: for layers whose formats differ."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


Linear = DenseLinear | W4A16Linear | QuantizedLinear | RoundedLinear


def dequantize_(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace every quantized layer inside `module` by its dense equal, in place: the same result, faster."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, W4A16Linear | QuantizedLinear):
                setattr(parent, name, child.to_dense(dtype))


def fuse(parts: Sequence[Linear]) -> nn.Module:
    """Return one layer with the outputs of `parts` side by side, as one matrix where their formats allow."""
    if not all(_same_format(parts[0], part) for part in parts):
        return Parallel(parts)
    first = parts[0]
    bias = _stack([part.bias for part in parts])
    if isinstance(first, DenseLinear):
        return DenseLinear(_stacked(parts, "weight"), bias)
    if isinstance(first, RoundedLinear):
        return RoundedLinear(_stacked(parts, "weight"), bias, first.input_scale, first.form)
    qweight, scales = _stacked(parts, "qweight"), _stacked(parts, "scales")
    zeros = None if first.zeros is None else _stacked(parts, "zeros")
    if isinstance(first, W4A16Linear):
        return W4A16Linear(qweight, scales, zeros, bias, first.input_scale, first.group_size)
    return QuantizedLinear(qweight, scales, zeros, bias, first.input_scale, first.form)


def _dense(weight: Tensor, bias: Tensor | None, input_scale: Tensor | None, dtype: torch.dtype) -> DenseLinear:
    if input_scale is not None:
        weight = weight * input_scale.float()
    return DenseLinear(weight.to(dtype), None if bias is None else bias.to(dtype))


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.cat(present) if present else None


def _stacked(parts: Sequence[Linear], name: str) -> Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def _same_format(one: Linear, other: Linear) -> bool:
    """Say whether the two are of one kind and read their input alike: all but weights and biases is the same."""
    if type(one) is not type(other) or (one.bias is None) != (other.bias is None):
        return False
    if any(getattr(one, name, None) != getattr(other, name, None) for name in ("group_size", "form")):
        return False
    if (getattr(one, "zeros", None) is None) != (getattr(other, "zeros", None) is None):
        return False
    ours, theirs = getattr(one, "input_scale", None), getattr(other, "input_scale", None)
    return ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
