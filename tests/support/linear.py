"""Random INT4 weights with every option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sits_trt.models.linear import W4A16Linear


@dataclass
class RandomWeight:
    """The arguments of `ops.w4a16_linear`; scales are float16, row 0's are all zero."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    group_size: int

    def reference(self, x: Tensor) -> Tensor:
        """Return the linear in float64, written out independently of the op."""
        codes = torch.stack((self.qweight & 0xF, self.qweight >> 4), dim=-1).flatten(1).double()
        shift = torch.full_like(self.scales, 8.0) if self.zeros is None else self.zeros
        per_code = [values.double().repeat_interleave(self.group_size, dim=1) for values in (shift, self.scales)]
        scaled = x.double() if self.input_scale is None else x.double() * self.input_scale.double()
        out = scaled @ ((codes - per_code[0]) * per_code[1]).T
        return out if self.bias is None else out + self.bias.double()

    def reference_gated(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up in float64, gate and up the halves of the linear."""
        gate, up = self.reference(x).chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up

    def layer(self) -> W4A16Linear:
        return W4A16Linear(self.qweight, self.scales, self.zeros, self.bias, self.input_scale, self.group_size)


def random_weight(
    rows: int,
    columns: int,
    group: int,
    options: Sequence[str] = (),
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> RandomWeight:
    """Return a weight [rows, columns] with some of the options 'zeros', 'bias' and 'input_scale'.

    With `dtype`, scales, bias and input scale are rounded to it first, so that a kernel can be held to them exactly.
    """
    real = dtype or torch.float16
    scales = (torch.rand(rows, columns // group, device=device) * 0.01 + 0.001).to(real)
    scales[0] = 0
    return RandomWeight(
        qweight=torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device),
        scales=scales,
        zeros=torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device) if "zeros" in options else None,
        bias=torch.randn(rows, device=device).to(real) if "bias" in options else None,
        input_scale=(torch.rand(columns, device=device) + 0.5).to(real) if "input_scale" in options else None,
        group_size=group,
    )
