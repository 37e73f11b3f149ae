"""From one weight matrix and its input statistics to codes and a grid, as the recipe asks."""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.quant.compensation import column_weights, damped, descend, eliminate, output_error, refit_scales
from sits_trt.quant.grid import Grid, decode, encode, fit_grid
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import WeightFormat

_REFINEMENTS = 2
"""Rounds of refitting scales and re-choosing codes after the elimination; more change little."""

_DRIFT_DAMPING = 0.3
"""As `damped`, for the drift correction: it has many free numbers, and must not fit the noise of a short text."""

_TRIAL_ROWS = 256
"""Outputs that factors are tried on under compensation: outputs are independent, and a sample is enough."""


def uses_clip(section: QuantizationSection) -> bool:
    return section.method == "awq" and section.clip


def uses_compensation(section: QuantizationSection) -> bool:
    return section.method == "awq" and section.compensation


def round_weight(
    weight: Tensor, hessian: Tensor, form: WeightFormat, section: QuantizationSection
) -> tuple[Tensor, Grid]:
    """Return codes [out, in] and grid of a weight float32 [out, in] whose inputs have `hessian` [in, in]."""
    codes, grid = _first_round(weight, hessian, form, section)
    if uses_compensation(section):
        solid = damped(hessian)
        for _ in range(_REFINEMENTS):
            grid = refit_scales(weight, solid, codes, grid)
            codes = descend(weight, solid, codes, grid, form.group_width(weight.shape[1]))
    return codes, grid


def trial_error(
    weight: Tensor, factors: Tensor, hessian: Tensor, form: WeightFormat, section: QuantizationSection
) -> float:
    """Return the output error of a weight that is rounded after its inputs' channels are scaled by `factors` [in].

    Without compensation over all outputs, with it over a sample and without refinement.
    """
    if uses_compensation(section):
        weight = weight[:: -(-len(weight) // _TRIAL_ROWS)]
    scaled, scaled_hessian = scale_inputs(weight, hessian, factors)
    codes, grid = _first_round(scaled, scaled_hessian, form, section)
    return output_error(scaled - decode(codes, grid), scaled_hessian)


def scale_inputs(weight: Tensor, hessian: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [out, in] and hessian [in, in] for inputs divided by `factors` [in]: the same outputs."""
    return weight * factors, hessian / (factors[:, None] * factors)


def correct_drift(weight: Tensor, hessian: Tensor, wanted: Tensor) -> Tensor:
    """Return the weight [out, in] whose outputs come nearest to what is wanted, held near `weight`.

    hessian: sum of x x^T over inputs x; wanted: sum of y x^T, [out, in], over wanted outputs y. Ridge regression
    around `weight`: with x and y of the same, unquantized model it returns `weight`.
    """
    factor = torch.linalg.cholesky(damped(hessian, _DRIFT_DAMPING))
    return weight + torch.cholesky_solve((wanted - weight @ hessian).T, factor).T


def _first_round(
    weight: Tensor, hessian: Tensor, form: WeightFormat, section: QuantizationSection
) -> tuple[Tensor, Grid]:
    clip = uses_clip(section)
    if not uses_compensation(section):
        grid = fit_grid(weight, form, hessian.diagonal() if clip else None)
        return encode(weight, grid), grid
    solid = damped(hessian)
    grid = fit_grid(weight, form, column_weights(solid) if clip else None)
    return eliminate(weight, solid, grid, form.group_width(weight.shape[1])), grid
