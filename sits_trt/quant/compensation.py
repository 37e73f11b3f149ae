"""Error compensation: codes chosen so that the layer's output error, not the weight's, is small.

All functions minimise tr((W - Q) H (W - Q)^T), with H = sum of x x^T over the inputs x of the calibration text:
the squared error of the layer's outputs. Sources: the column-by-column elimination is GPTQ (Frantar et al.
2022); the sweeps over codes are cyclic coordinate descent (QuantEase, Behdin et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.quant.grid import Grid, decode

_DAMPING = 0.01
"""Part of the mean diagonal that is added to H's, against directions that the calibration text hardly has."""

_BLOCK = 64
"""Columns whose updates are gathered before they are applied to the rest in one matrix product."""


def damped(hessian: Tensor, part: float = _DAMPING) -> Tensor:
    """Return `hessian` [in, in] with `part` of its mean diagonal added to the diagonal; positive definite."""
    mean = hessian.diagonal().mean()
    added = part * mean if mean > 0 else torch.ones(())
    return hessian + torch.eye(len(hessian)) * added


def column_weights(hessian: Tensor) -> Tensor:
    """Return 1 / diag(H^-1), [in]: what a unit error of one input's weight costs once all others have made up for it.

    `hessian` must be positive definite.
    """
    return 1 / torch.cholesky_inverse(torch.linalg.cholesky(hessian)).diagonal()


def eliminate(weight: Tensor, hessian: Tensor, grid: Grid, group_size: int) -> Tensor:
    """Return GPTQ's codes [out, in]: each column's rounding error is spread over the columns not yet decided.

    Columns are decided from the strongest input to the weakest, while many are left to make up for the strong
    ones. `weight` [out, in] and a positive definite `hessian` [in, in], both float32.
    """
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True)
    # Inputs as rows from here on: each step then works on contiguous memory.
    rest = weight.T[order]
    scales, zeros = grid.scales.T.contiguous(), grid.zeros.T.contiguous()
    groups = (order // group_size).tolist()
    codes = torch.empty_like(rest)
    for start in range(0, len(order), _BLOCK):
        stop = min(start + _BLOCK, len(order))
        errors = torch.empty_like(rest[start:stop])
        for place in range(start, stop):
            scale, zero, value = scales[groups[place]], zeros[groups[place]], rest[place]
            chosen = grid.nearest_(value / scale, zero)
            codes[place] = chosen
            error = value.sub(chosen.sub_(zero).mul_(scale)).div_(factor[place, place])
            errors[place - start] = error
            rest[place:stop].addr_(factor[place, place:stop], error, alpha=-1)
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return codes[torch.argsort(order)].T.contiguous()


def descend(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, group_size: int) -> Tensor:
    """Return `codes` after one sweep that sets each column to its best codes while the others stay.

    The error never grows: each step minimises it over one column.
    """
    # Inputs as rows, as in `eliminate`.
    slope = hessian @ (weight - decode(codes, grid)).T
    codes = codes.T.clone(memory_format=torch.contiguous_format)
    scales, zeros = grid.scales.T.contiguous(), grid.zeros.T.contiguous()
    for start in range(0, len(codes), _BLOCK):
        stop = min(start + _BLOCK, len(codes))
        changes = torch.empty_like(slope[start:stop])
        for column in range(start, stop):
            scale, zero, now = scales[column // group_size], zeros[column // group_size], codes[column]
            steps = slope[column] / (scale * hessian[column, column])
            chosen = grid.nearest_(steps.add_(now).sub_(zero), zero)
            change = (chosen - now).mul_(scale)
            codes[column] = chosen
            changes[column - start] = change
            slope[column:stop].addr_(hessian[column, column:stop], change, alpha=-1)
        slope[stop:].addmm_(hessian[stop:, start:stop], changes, alpha=-1)
    return codes.T.contiguous()


def refit_scales(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid) -> Grid:
    """Return `grid` with the scales that fit `codes` best: per output a least-squares problem over its groups."""
    rows, groups = grid.scales.shape
    steps = (codes.reshape(rows, groups, -1) - grid.zeros[..., None]).reshape(rows, groups, -1)
    size = steps.shape[-1]
    flat = steps.reshape(rows, -1)
    system = torch.empty(rows, groups, groups)
    for group in range(groups):
        pulled = steps[:, group] @ hessian[group * size : (group + 1) * size]
        system[:, group] = (pulled * flat).reshape(rows, groups, size).sum(-1)
    right = ((weight @ hessian) * flat).reshape(rows, groups, size).sum(-1)
    # A pull towards the present scales keeps groups without any non-zero code, or input, solvable.
    pull = 1e-3 * system.diagonal(dim1=1, dim2=2) + torch.finfo(torch.float32).tiny
    solved = torch.linalg.solve(system + torch.diag_embed(pull), right + pull * grid.scales)
    sound = torch.isfinite(solved) & (solved > 0.5 * grid.scales) & (solved < 2 * grid.scales)
    return grid.with_scales(torch.where(sound, solved, grid.scales))


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """Return tr(D H D^T) of a weight difference D [out, in]."""
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))
