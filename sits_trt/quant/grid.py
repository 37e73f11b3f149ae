"""INT4 grids: one scale and zero point per group of inputs, chosen by search; codes from weights and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CODE = 15
SYMMETRIC_ZERO = 8
SMALLEST_SCALE = 2.0**-24
"""The smallest positive float16: a scale must not become zero when it is stored."""

_SHRINKS = 20
_SMALLEST_SHRINK = 0.5


@dataclass(frozen=True)
class Grid:
    """A weight [out, in]'s scales and zero points, float32 [out, groups].

    Scales are float16 values above zero, zero points whole numbers 0..15.
    """

    scales: Tensor
    zeros: Tensor


def to_stored_scale(scales: Tensor) -> Tensor:
    """Return `scales` as float16 will hold them, in float32 and above zero."""
    return scales.clamp(min=SMALLEST_SCALE).half().float()


def fit_grid(weight: Tensor, group_size: int, symmetric: bool, importance: Tensor | None) -> Grid:
    """Return the grid of a weight float32 [out, in].

    Without `importance` each group's grid spans its values and zero. With it, [in] and not negative, the span
    is shrunk in steps to where the error, squared and weighted by importance, is smallest: clipping.
    """
    grouped = weight.reshape(weight.shape[0], -1, group_size)
    # Zero belongs to the range, or a group of one sign could not be represented by a zero point in 0..15.
    high, low = grouped.amax(-1).clamp(min=0), grouped.amin(-1).clamp(max=0)
    search = _GridSearch(grouped, None if importance is None else importance.reshape(-1, group_size))
    shrinks = [1.0] if importance is None else torch.linspace(1.0, _SMALLEST_SHRINK, _SHRINKS).tolist()
    for shrink in shrinks:
        if symmetric:
            search.consider(torch.maximum(high, -low) * (shrink / 7), torch.full_like(high, SYMMETRIC_ZERO))
        else:
            scales = to_stored_scale((high - low) * (shrink / MAX_CODE))
            middle = torch.round(-low * shrink / scales)
            for shift in (0,) if importance is None else (0, -1, 1):
                search.consider(scales, (middle + shift).clamp(0, MAX_CODE))
    if symmetric and importance is not None:
        # The code range -8..7 is one longer below: a group whose largest weight is negative can use it.
        search.consider(torch.maximum(high / 7, -low / 8), torch.full_like(high, SYMMETRIC_ZERO))
    return search.best()


class _GridSearch:
    """Keeps the best candidate grid of every group."""

    def __init__(self, grouped: Tensor, importance: Tensor | None) -> None:
        self.grouped, self.importance = grouped, importance
        self.error: Tensor | None = None

    def consider(self, scales: Tensor, zeros: Tensor) -> None:
        scales = to_stored_scale(scales)
        codes = (torch.round(self.grouped / scales[..., None]) + zeros[..., None]).clamp_(0, MAX_CODE)
        squares = ((codes - zeros[..., None]) * scales[..., None] - self.grouped).square_()
        error = (squares if self.importance is None else squares.mul_(self.importance)).sum(-1)
        if self.error is None:
            self.error, self.scales, self.zeros = error, scales, zeros
            return
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scales = torch.where(better, scales, self.scales)
        self.zeros = torch.where(better, zeros, self.zeros)

    def best(self) -> Grid:
        return Grid(self.scales, self.zeros)


def encode(weight: Tensor, grid: Grid) -> Tensor:
    """Return the nearest codes, float32 whole numbers [out, in], of a weight [out, in]."""
    grouped = weight.reshape(*grid.scales.shape, -1)
    codes = torch.round(grouped / grid.scales[..., None]) + grid.zeros[..., None]
    return codes.clamp_(0, MAX_CODE).reshape(weight.shape)


def decode(codes: Tensor, grid: Grid) -> Tensor:
    """Return the weight float32 [out, in] that codes [out, in] stand for."""
    grouped = codes.reshape(*grid.scales.shape, -1)
    return ((grouped - grid.zeros[..., None]) * grid.scales[..., None]).reshape(codes.shape)
