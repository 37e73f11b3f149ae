"""Rounding of a linear layer's input to 8 or 4 bits, as hardware does it on the fly: scales come from the values."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"float8_e4m3": 448.0, "int4": 7.0}
"""Absolute value of the largest code."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A token of zeros stays zero instead of dividing by nothing."""


def round_activations(x: Tensor, kind: str, group_width: int) -> Tensor:
    """Return x [..., in] in float32 after rounding to `kind`: code * scale, code = x / scale to nearest, ties to even.

    "float16": no rounding. "float8_e4m3": one scale per token. "int4": one per token and `group_width` inputs.
    A scale is the largest absolute value under it over the largest code, in float32, so no code saturates.
    Values that are not finite stay not finite. Per-token e4m3 is what vLLM calls FP8 dynamic and TensorRT-LLM FP8
    rowwise.
    """
    wide = x.float()
    if kind == "float16":
        return wide
    grouped = wide.unflatten(-1, (-1, group_width)) if kind == "int4" else wide
    largest = LARGEST[kind]
    scale = (grouped.abs().amax(-1, keepdim=True) / largest).clamp(min=_SMALLEST_SCALE)
    codes = grouped / scale
    codes = nearest_e4m3(codes) if kind == "float8_e4m3" else codes.round().clamp(-largest, largest)
    return (codes * scale).reshape(x.shape)


def nearest_e4m3(x: Tensor) -> Tensor:
    """Return float32 x rounded to the nearest e4m3 value, saturated at +-448; NaN stays NaN."""
    largest = LARGEST["float8_e4m3"]
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn).float()
