"""ScaleRecover: bring the residual stream of a quantized decoder layer back to its fp16 scale."""

from __future__ import annotations

from torch import Tensor


def scale_recover(x: Tensor, scale: Tensor) -> Tensor:
    """Return the residual stream x [tokens, hidden] with each channel multiplied by scale [hidden]."""
    return x * scale
