"""From one weight matrix and its input statistics to codes and a grid, as the recipe asks."""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.quant.compensation import damped, descend, eliminate, refit_scales
from sits_trt.quant.grid import Grid, encode, fit_grid
from sits_trt.recipe.schema import QuantizationSection

_REFINEMENTS = 2
"""Rounds of refitting scales and re-choosing codes after the elimination; more change little."""

_DRIFT_DAMPING = 0.1
"""As `damped`, for the drift correction: it has many free numbers, and must not fit the noise of a short text."""


def uses_clip(section: QuantizationSection) -> bool:
    return section.method == "awq" and section.clip


def uses_compensation(section: QuantizationSection) -> bool:
    return section.method == "awq" and section.compensation


def round_weight(weight: Tensor, hessian: Tensor, section: QuantizationSection) -> tuple[Tensor, Grid]:
    """Return codes [out, in] and grid of a weight float32 [out, in] whose inputs have `hessian` [in, in]."""
    importance = hessian.diagonal() if uses_clip(section) else None
    grid = fit_grid(weight, section.group_size, section.symmetric, importance)
    if not uses_compensation(section):
        return encode(weight, grid), grid
    solid = damped(hessian)
    codes = eliminate(weight, solid, grid, section.group_size)
    for _ in range(_REFINEMENTS):
        grid = refit_scales(weight, solid, codes, grid)
        codes = descend(weight, solid, codes, grid, section.group_size)
    return codes, grid


def correct_drift(weight: Tensor, hessian: Tensor, wanted: Tensor) -> Tensor:
    """Return the weight [out, in] whose outputs come nearest to what is wanted, held near `weight`.

    hessian: sum of x x^T over inputs x; wanted: sum of y x^T, [out, in], over wanted outputs y. Ridge regression
    around `weight`: with x and y of the same, unquantized model it returns `weight`.
    """
    factor = torch.linalg.cholesky(damped(hessian, _DRIFT_DAMPING))
    return weight + torch.cholesky_solve((wanted - weight @ hessian).T, factor).T
