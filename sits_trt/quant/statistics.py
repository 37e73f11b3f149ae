"""What the codes of one group of layers are chosen by: sums over the calibration text at their common input."""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.errors import QuantizationError
from sits_trt.ops.activation_rounding import round_activations
from sits_trt.spec import WeightFormat

_STRIPE = 256
"""Rows of the Hessian that are added to in one product."""


class Statistics:
    """Sums over tokens at the input x [tokens, in] of linear layers, as the quantized model computes and rounds it.

    hessian: [in, in], sum of x x^T. wanted: [out or in, in], sum of y x^T with y what the caller wants in place of
    the output, or of the input. mean_abs: [in]. All float32.
    """

    def __init__(self, name: str, form: WeightFormat | None) -> None:
        self.name, self.form = name, form
        self.tokens = 0

    def add(self, x: Tensor, y: Tensor, sizes: Tensor | None = None) -> None:
        """Add the tokens of one block, each divided by its entry of `sizes` [tokens, 1] where given.

        Raises QuantizationError, naming the layer, unless all values are finite.
        """
        if self.form is not None:
            x = round_activations(x, self.form.activations, self.form.group_width(x.shape[1]))
        if sizes is not None:
            x, y = x / sizes, y / sizes
        absolute = x.abs().sum(0)
        for values, whose in ((absolute, "quantized"), (y, "float")):
            if not torch.isfinite(values).all():
                raise QuantizationError(
                    f"activations at the input of {self.name} are not finite in the {whose} model on the "
                    "calibration text; check the checkpoint's weights, or ignore the layers before it"
                )
        if self.tokens == 0:
            self.hessian = torch.zeros(x.shape[1], x.shape[1])
            self.wanted = torch.zeros(y.shape[1], x.shape[1])
            self.absolute = torch.zeros(x.shape[1])
        # Of a symmetric matrix the part on and above the diagonal is enough; `finish` mirrors it.
        for start in range(0, x.shape[1], _STRIPE):
            self.hessian[start : start + _STRIPE, start:].addmm_(x[:, start : start + _STRIPE].T, x[:, start:])
        self.wanted.addmm_(y.T, x)
        self.absolute += absolute
        self.tokens += len(x)

    def finish(self) -> None:
        """Complete the sums; none can be added after this."""
        for start in range(0, len(self.hessian), _STRIPE):
            stop = start + _STRIPE
            self.hessian[stop:, start:stop] = self.hessian[start:stop, stop:].T
            # Not every processor's matrix product rounds the two halves alike.
            diagonal = self.hessian[start:stop, start:stop]
            diagonal.copy_(diagonal.triu() + diagonal.triu(1).T)

    @property
    def mean_abs(self) -> Tensor:
        return self.absolute / self.tokens
