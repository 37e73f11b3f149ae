"""From weights that share their inputs, and statistics of those, to codes and grids, as the recipe asks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sits_trt.quant.compensation import (
    Feedback,
    cholesky_,
    column_weights,
    damping,
    descend,
    eliminate,
    output_error,
    refit_scales,
)
from sits_trt.quant.grid import Grid, decode, encode, fit_grid
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import WeightFormat

_DAMPING = 0.01
"""Part of the mean diagonal that is added to the Hessian's."""

_DRIFT_DAMPING = 0.3
"""The same for the drift correction: it has many free numbers, and must not fit the noise of a short text."""

_REFINEMENTS, _SWEEPS = 2, 2
"""Rounds of refitting scales after the elimination, and sweeps over the codes in each; more change little."""

_TRIAL_ROWS = 256
"""Outputs that factors are tried on under compensation: outputs are independent, and a sample is enough."""

_SLICE_WEIGHTS = 1 << 21
"""Weights that are worked on at a time: a few tensors of this many float32 beside the layer's own."""


def uses_clip(section: QuantizationSection) -> bool:
    return section.method == "awq" and section.clip


def uses_compensation(section: QuantizationSection) -> bool:
    return section.method == "awq" and section.compensation


def output_slices(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of the outputs of a weight [rows, columns], each of a bounded number of weights."""
    size = max(1, _SLICE_WEIGHTS // columns)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class DriftCorrection:
    """Moves weights so that their outputs come nearest to what is wanted, held near the original weights.

    hessian: [in, in], sum of x x^T over inputs x. Ridge regression around the weight: with inputs x and wanted
    outputs of the same, unquantized model it changes nothing.
    """

    def __init__(self, hessian: Tensor) -> None:
        self.hessian = hessian
        solid = hessian.clone()
        solid.diagonal().add_(damping(hessian, _DRIFT_DAMPING))
        self.factor = cholesky_(solid)

    def __call__(self, weight: Tensor, wanted: Tensor) -> Tensor:
        """Return the corrected weight [out, in]; wanted: sum of y x^T over wanted outputs y, [out, in]."""
        half = torch.linalg.solve_triangular(self.factor.mT, wanted - weight @ self.hessian, upper=True, left=False)
        return torch.linalg.solve_triangular(self.factor, half, upper=False, left=False).add_(weight)


class Rounder:
    """Rounds weights [out, in] whose inputs have `hessian` [in, in], which compensation damps in place."""

    def __init__(self, hessian: Tensor, form: WeightFormat, section: QuantizationSection) -> None:
        self.hessian, self.form = hessian, form
        self.feedback: Feedback | None = None
        self.damping = 0.0
        self.importance: Tensor | None = None
        if uses_compensation(section):
            self.damping = damping(hessian, _DAMPING)
            hessian.diagonal().add_(self.damping)
        if uses_clip(section):
            self.importance = column_weights(hessian) if uses_compensation(section) else hessian.diagonal().clone()
        if uses_compensation(section):
            self.feedback = Feedback.of(hessian)

    def round(self, weight: Tensor, factors: Tensor) -> tuple[Tensor, Grid]:
        """Return codes [out, in] and grid of weight * factors, for inputs divided by `factors` [in]."""
        grid = self._fit(weight, factors)
        if self.feedback is None:
            return encode(weight * factors, grid), grid
        codes = eliminate(weight, self.feedback, grid, factors)
        for _ in range(_REFINEMENTS):
            grid = refit_scales(weight, self.hessian, codes, grid, factors)
            for _ in range(_SWEEPS):
                codes = descend(weight, self.hessian, codes, grid, factors)
        return codes, grid

    def trial_errors(self, weight: Tensor, trials: Tensor) -> list[float]:
        """Return the output error after rounding for each row of factors in `trials` [trials, in].

        Without compensation over all outputs, with it over a sample and without refinement.
        """
        if self.feedback is None:
            return [self._plain_error(weight, factors) for factors in trials]
        weight = weight[:: -(-len(weight) // _TRIAL_ROWS)]
        together = max(1, _SLICE_WEIGHTS // weight.numel())
        return [error for some in trials.split(together) for error in self._eliminated_errors(weight, some)]

    def _eliminated_errors(self, weight: Tensor, trials: Tensor) -> list[float]:
        """Return the error of each trial after elimination, all in one pass over the inputs."""
        assert self.feedback is not None
        grids = [self._fit(weight, factors) for factors in trials]
        grid = Grid(torch.cat([own.scales for own in grids]), torch.cat([own.zeros for own in grids]), self.form)
        factors = trials.repeat_interleave(len(weight), 0)
        repeated = weight.repeat(len(trials), 1)
        codes = eliminate(repeated, self.feedback, grid, factors)
        return [self.error(part) for part in (repeated - decode(codes, grid) / factors).split(len(weight))]

    def error(self, difference: Tensor) -> float:
        """Return the output error of a weight difference [out, in], without the damping's share."""
        damped = output_error(difference, self.hessian)
        return max(0.0, damped - self.damping * float(difference.square().sum(dtype=torch.float64)))

    def _plain_error(self, weight: Tensor, factors: Tensor) -> float:
        error = 0.0
        for rows in output_slices(*weight.shape):
            codes, grid = self.round(weight[rows], factors)
            error += self.error(weight[rows] - decode(codes, grid) / factors)
        return error

    def _fit(self, weight: Tensor, factors: Tensor) -> Grid:
        importance = None if self.importance is None else self.importance / factors.square()
        return fit_grid(weight * factors, self.form, importance)
