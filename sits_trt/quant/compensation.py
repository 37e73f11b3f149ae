"""Error compensation: codes chosen so that the layer's output error, not the weight's, is small.

All functions minimise tr((W - Q) H (W - Q)^T), with H = sum of x x^T over the inputs x of the calibration text:
the squared error of the layer's outputs. Q = decode(codes, grid) / factors, where `factors` [in] scale the layer's
input channels (`equalization`). Sources: the column-by-column elimination is GPTQ (Frantar et al. 2022), written as
the error feedback that it equals (LDLQ, Chee et al. 2023); the sweeps over codes are cyclic coordinate descent
(QuantEase, Behdin et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sits_trt.quant.grid import Grid, decode

_BLOCK = 64
"""Columns whose updates are gathered before they are applied to the rest in one matrix product."""


def damping(hessian: Tensor, part: float) -> float:
    """Return `part` of the mean diagonal of `hessian` [in, in]: what makes it positive definite when added there.

    Calibration text hardly has some directions: they must not be free.
    """
    mean = float(hessian.diagonal().mean())
    return part * mean if mean > 0 else 1.0


def cholesky_(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factor of a symmetric `matrix` [n, n] in its memory: large ones exist but once."""
    # LAPACK works on columns; a symmetric matrix is its own transpose.
    columns = matrix.mT
    torch.linalg.cholesky(columns, out=columns)
    return columns


def column_weights(hessian: Tensor) -> Tensor:
    """Return 1 / diag(H^-1), [in]: what a unit error of one input's weight costs once all others have made up for it.

    `hessian` must be positive definite.
    """
    factor = cholesky_(hessian.clone())
    return 1 / torch.cholesky_inverse(factor, out=factor).diagonal()


@dataclass(frozen=True)
class Feedback:
    """What rounding errors of inputs that are decided ask of those that are not.

    Inputs are decided from the last of `order` [in], the strongest, to its first, the weakest, while many are left to
    make up for the strong ones. `unit` [in, in] is unit lower triangular, in that order: an error of input `a` asks
    input `b`, before it in the order, for a change of unit[a, b] times the error.
    """

    order: Tensor
    unit: Tensor

    @classmethod
    def of(cls, hessian: Tensor) -> Feedback:
        """Return the feedback for a positive definite `hessian` [in, in], from one Cholesky factorization."""
        order = torch.argsort(hessian.diagonal(), stable=True)
        permuted = torch.empty_like(hessian)
        for start in range(0, len(order), _BLOCK):
            rows = order[start : start + _BLOCK]
            permuted[start : start + _BLOCK] = hessian[rows][:, order]
        unit = cholesky_(permuted)
        return cls(order, unit.div_(unit.diagonal().clone()))


def column_steps(grid: Grid, factors: Tensor) -> Tensor:
    """Return what one code is worth, [in, out]: the grid's scale over the input's factor; `factors` [in] or [out, in].

    Inputs as rows: the loops over inputs work on contiguous memory.
    """
    width = factors.shape[-1] // grid.scales.shape[1]
    return (grid.scales.repeat_interleave(width, 1) / factors).T.contiguous()


def eliminate(weight: Tensor, feedback: Feedback, grid: Grid, factors: Tensor) -> Tensor:
    """Return GPTQ's codes [out, in]: each column's rounding error is spread over the columns not yet decided.

    weight: float32 [out, in]. factors: [in], or [out, in] for each output its own.
    """
    order, unit = feedback.order, feedback.unit
    wanted = weight.T[order]
    rest, codes = wanted.clone(), torch.empty_like(wanted)
    steps, zeros = column_steps(grid, factors)[order], grid.zeros.T.contiguous()
    groups = (order // (weight.shape[1] // len(zeros))).tolist()
    for stop in range(len(order), 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        own, errors = unit[start:stop, start:stop].contiguous(), wanted[start:stop]
        for place in reversed(range(stop - start)):
            column, zero = start + place, zeros[groups[start + place]]
            chosen = grid.nearest_(rest[column] / steps[column], zero)
            codes[column] = chosen
            errors[place].sub_(chosen.sub_(zero).mul_(steps[column]))
            rest[start:column].addr_(own[place, :place], errors[place])
        rest[:start].addmm_(unit[start:stop, :start].T, errors)
    return codes[torch.argsort(order)].T.contiguous()


def descend(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, factors: Tensor) -> Tensor:
    """Return `codes` after one sweep that sets each column to its best codes while the others stay.

    The error never grows: each step minimises it over one column.
    """
    slope = hessian @ (weight - decode(codes, grid) / factors).T
    codes = codes.T.clone(memory_format=torch.contiguous_format)
    steps, zeros = column_steps(grid, factors), grid.zeros.T.contiguous()
    width = len(codes) // len(zeros)
    for start in range(0, len(codes), _BLOCK):
        stop = min(start + _BLOCK, len(codes))
        own = hessian[start:stop, start:stop].contiguous()
        changes = torch.empty_like(slope[start:stop])
        for column in range(start, stop):
            step, zero, now = steps[column], zeros[column // width], codes[column]
            place = column - start
            moves = slope[column] / (step * own[place, place])
            chosen = grid.nearest_(moves.add_(now).sub_(zero), zero)
            change = (chosen - now).mul_(step)
            codes[column] = chosen
            changes[place] = change
            slope[column:stop].addr_(own[place, place:], change, alpha=-1)
        slope[stop:].addmm_(hessian[stop:, start:stop], changes, alpha=-1)
    return codes.T.contiguous()


def refit_scales(weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, factors: Tensor) -> Grid:
    """Return `grid` with the scales that fit `codes` best: per output a least-squares problem over its groups."""
    rows, groups = grid.scales.shape
    flat = (codes.reshape(rows, groups, -1) - grid.zeros[..., None]).reshape(rows, -1) / factors
    steps = flat.reshape(rows, groups, -1)
    size = steps.shape[-1]
    system = torch.empty(rows, groups, groups)
    for group in range(groups):
        pulled = steps[:, group] @ hessian[group * size : (group + 1) * size]
        system[:, group] = pulled.mul_(flat).reshape(rows, groups, size).sum(-1)
    right = ((weight @ hessian) * flat).reshape(rows, groups, size).sum(-1)
    # A pull towards the present scales keeps groups without any non-zero code, or input, solvable.
    pull = 1e-3 * system.diagonal(dim1=1, dim2=2) + torch.finfo(torch.float32).tiny
    system.diagonal(dim1=1, dim2=2).add_(pull)
    solved = torch.linalg.solve(system, right + pull * grid.scales)
    sound = torch.isfinite(solved) & (solved > 0.5 * grid.scales) & (solved < 2 * grid.scales)
    return grid.with_scales(torch.where(sound, solved, grid.scales))


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """Return tr(D H D^T) of a weight difference D [out, in]."""
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))
