"""What a linear layer of any weight format computes. INT4 with 16-bit activations is an op of its own: `ops.linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.ops.activation_rounding import round_activations
from sits_trt.ops.linear import dequantize
from sits_trt.spec import WeightFormat


def decode_weight(qweight: Tensor, scales: Tensor, zeros: Tensor | None, form: WeightFormat) -> Tensor:
    """Return float32 [out, in]: (code - zero) * scale.

    qweight: uint8 [out, in/2] (`layouts.pack_sits`) for 4 bits, uint8 [out, in] for 8 bits; 8-bit floats are given
    as their bytes and have no zero point. scales: [out, groups]. zeros: uint8 [out, groups], or None for the symmetric
    zero point 2**(bits-1).
    """
    in_features = qweight.shape[1] * 8 // form.bits
    width = form.group_width(in_features)
    if form.bits == 4:
        return dequantize(qweight, scales, zeros, width)
    stored = qweight.view(torch.float8_e4m3fn) if form.codes == "float8_e4m3" else qweight
    codes = stored.float().reshape(len(qweight), -1, width)
    if form.codes == "int":
        codes = codes - (128.0 if zeros is None else zeros.float()[:, :, None])
    return (codes * scales.float()[:, :, None]).reshape(len(qweight), -1)


def quantized_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    form: WeightFormat,
) -> Tensor:
    """Return round(x * input_scale) @ decode_weight(qweight).T + bias, [tokens, out] in x's dtype.

    x: [tokens, in] floating. qweight, scales, zeros: as in `decode_weight`. bias: [out]. input_scale: [in].
    The input is rounded as `form.activations` says; sums are float32.
    """
    return rounded_linear(x, decode_weight(qweight, scales, zeros, form), bias, input_scale, form)


def rounded_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, input_scale: Tensor | None, form: WeightFormat
) -> Tensor:
    """As `quantized_linear`, for a weight float32 [out, in] that has been decoded before."""
    wide = x.float() if input_scale is None else x.float() * input_scale.float()
    rounded = round_activations(wide, form.activations, form.group_width(x.shape[-1]))
    out = torch.nn.functional.linear(rounded, weight, None if bias is None else bias.float())
    return out.to(x.dtype)
