"""Error compensation: codes chosen so that the layer's output error, not the weight's, is small.

All functions minimise tr((W - Q) H (W - Q)^T), with H = sum of x x^T over the inputs x of the calibration text:
the squared error of the layer's outputs. Sources: the column-by-column elimination is GPTQ (Frantar et al.
2022); the sweeps over codes are cyclic coordinate descent (QuantEase, Behdin et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.quant.grid import MAX_CODE, Grid, decode, to_stored_scale

_DAMPING = 0.01
"""Part of the mean diagonal that is added to H's, against directions that the calibration text hardly has."""

_BLOCK = 64
"""Columns whose updates are gathered before they are applied to the rest in one matrix product."""


def damped(hessian: Tensor, part: float = _DAMPING) -> Tensor:
    """Return `hessian` [in, in] with `part` of its mean diagonal added to the diagonal; positive definite."""
    mean = hessian.diagonal().mean()
    added = part * mean if mean > 0 else torch.ones(())
    return hessian + torch.eye(len(hessian)) * added


def eliminate(weight: Tensor, hessian: Tensor, grid: Grid, group_size: int) -> Tensor:
    """Return GPTQ's codes [out, in]: each column's rounding error is spread over the columns after it.

    `weight` [out, in] and a positive definite `hessian` [in, in], both float32.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    rest = weight.clone()
    codes = torch.empty_like(weight)
    for start in range(0, weight.shape[1], _BLOCK):
        stop = min(start + _BLOCK, weight.shape[1])
        block = rest[:, start:stop].clone()
        errors = torch.empty_like(block)
        for column in range(start, stop):
            here = column - start
            scales, zeros = grid.columns(column, group_size)
            chosen = (torch.round(block[:, here] / scales) + zeros).clamp_(0, MAX_CODE)
            codes[:, column] = chosen
            error = (block[:, here] - (chosen - zeros) * scales) / factor[column, column]
            errors[:, here] = error
            block.addr_(error, factor[column, start:stop], alpha=-1)
        rest[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return codes


def descend(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, group_size: int) -> Tensor:
    """Return `codes` after one sweep that sets each column to its best codes while the others stay.

    The error never grows: each step minimises it over one column.
    """
    codes = codes.clone()
    gradient = (weight - decode(codes, grid)) @ hessian
    diagonal = hessian.diagonal()
    for start in range(0, weight.shape[1], _BLOCK):
        stop = min(start + _BLOCK, weight.shape[1])
        block = gradient[:, start:stop].clone()
        changes = torch.empty_like(block)
        for column in range(start, stop):
            here = column - start
            scales, zeros = grid.columns(column, group_size)
            now = codes[:, column]
            wanted = (now - zeros) * scales + block[:, here] / diagonal[column]
            chosen = (torch.round(wanted / scales) + zeros).clamp_(0, MAX_CODE)
            change = (chosen - now) * scales
            codes[:, column] = chosen
            changes[:, here] = change
            block.addr_(change, hessian[column, start:stop], alpha=-1)
        gradient.addmm_(changes, hessian[start:stop], alpha=-1)
    return codes


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
    return Grid(to_stored_scale(torch.where(sound, solved, grid.scales)), grid.zeros)


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """Return tr(D H D^T) of a weight difference D [out, in]."""
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))
