"""Grids of codes: one scale and zero point per group of inputs, chosen by search; codes from weights and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sits_trt.layouts import pack_sits
from sits_trt.ops.activation_rounding import LARGEST, nearest_e4m3
from sits_trt.spec import WeightFormat

SMALLEST_SCALE = 2.0**-24
"""The smallest positive float16: a scale must not become zero when it is stored."""

_SHRINKS = 12
_SMALLEST_SHRINK = 0.5
_CACHED_WEIGHTS = 1 << 17


@dataclass(frozen=True)
class Grid:
    """A weight [out, in]'s scales and zero points, float32 [out, groups], and the format of its codes.

    Scales are float16 values above zero, zero points whole numbers that are codes. 8-bit floats are their own codes,
    with zero points 0.
    """

    scales: Tensor
    zeros: Tensor
    form: WeightFormat

    def nearest_(self, scaled: Tensor, zeros: Tensor) -> Tensor:
        """Return, in place, the codes nearest to weights over scales; `zeros` are their zero points."""
        return nearest_codes_(scaled, zeros, self.form)

    def with_scales(self, scales: Tensor) -> Grid:
        return replace(self, scales=to_stored_scale(scales))


def nearest_codes_(scaled: Tensor, zeros: Tensor, form: WeightFormat) -> Tensor:
    """As `Grid.nearest_`."""
    if form.codes == "float8_e4m3":
        return scaled.copy_(nearest_e4m3(scaled))
    return scaled.round_().add_(zeros).clamp_(0, 2**form.bits - 1)


def to_stored_scale(scales: Tensor) -> Tensor:
    """Return `scales` as float16 will hold them, in float32 and above zero."""
    return scales.clamp(min=SMALLEST_SCALE).half().float()


def fit_grid(weight: Tensor, form: WeightFormat, importance: Tensor | None) -> Grid:
    """Return the grid of a weight float32 [out, in] in `form`.

    Without `importance` each group's grid spans its values and zero. With it, [in] and not negative, the span
    is shrunk in steps to where the error, squared and weighted by importance, is smallest: clipping.
    """
    # As many outputs at a time as stay in a core's cache over the steps.
    parts = weight.split(max(1, _CACHED_WEIGHTS // weight.shape[1]))
    grids = [_fit(part, form, importance) for part in parts]
    return Grid(torch.cat([grid.scales for grid in grids]), torch.cat([grid.zeros for grid in grids]), form)


def _fit(weight: Tensor, form: WeightFormat, importance: Tensor | None) -> Grid:
    width = form.group_width(weight.shape[1])
    grouped = weight.reshape(len(weight), -1, width)
    # Zero belongs to the range, or a group of one sign could not be represented by a zero point that is a code.
    high, low = grouped.amax(-1).clamp(min=0), grouped.amin(-1).clamp(max=0)
    search = _GridSearch(grouped, form, None if importance is None else importance.reshape(-1, width))
    zero, above, below = _symmetric_range(form)
    for shrink in [1.0] if importance is None else torch.linspace(1.0, _SMALLEST_SHRINK, _SHRINKS).tolist():
        if form.symmetric:
            search.consider(torch.maximum(high, -low) * (shrink / above), torch.full_like(high, zero))
            continue
        largest = 2**form.bits - 1
        scales = to_stored_scale((high - low) * (shrink / largest))
        middle = torch.round(-low * shrink / scales)
        shifts = (0,) if importance is None else (0, -1, 1)
        search.consider(scales, *((middle + shift).clamp(0, largest) for shift in shifts))
    if form.symmetric and importance is not None:
        # Whole numbers reach one further below zero: a group whose largest weight is negative can use it.
        search.consider(torch.maximum(high / above, -low / below), torch.full_like(high, zero))
    return search.best()


def _symmetric_range(form: WeightFormat) -> tuple[float, float, float]:
    """Return the zero point of symmetric codes, and how far they reach above and below it."""
    if form.codes == "float8_e4m3":
        return 0, LARGEST["float8_e4m3"], LARGEST["float8_e4m3"]
    half = 2 ** (form.bits - 1)
    return half, half - 1, half


class _GridSearch:
    """Keeps the best candidate grid of every group."""

    def __init__(self, grouped: Tensor, form: WeightFormat, importance: Tensor | None) -> None:
        self.grouped, self.form, self.importance = grouped, form, importance
        self.error: Tensor | None = None

    def consider(self, scales: Tensor, *zeros: Tensor) -> None:
        """Take what of `scales` with each of `zeros` is better than all before."""
        scales = to_stored_scale(scales)
        scaled = self.grouped / scales[..., None]
        for own in zeros:
            codes = nearest_codes_(scaled.clone(), own[..., None], self.form)
            # In steps of the scale: the error is a group's sum times its scale squared.
            squares = codes.sub_(own[..., None]).sub_(scaled).square_()
            if self.importance is not None:
                squares.mul_(self.importance)
            self._take(squares.sum(-1).mul_(scales).mul_(scales), scales, own)

    def _take(self, error: Tensor, scales: Tensor, zeros: Tensor) -> None:
        if self.error is None:
            self.error, self.scales, self.zeros = error, scales, zeros
            return
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scales = torch.where(better, scales, self.scales)
        self.zeros = torch.where(better, zeros, self.zeros)

    def best(self) -> Grid:
        return Grid(self.scales, self.zeros, self.form)


def encode(weight: Tensor, grid: Grid) -> Tensor:
    """Return the nearest codes, float32 [out, in], of a weight [out, in]."""
    grouped = weight.reshape(*grid.scales.shape, -1)
    return grid.nearest_(grouped / grid.scales[..., None], grid.zeros[..., None]).reshape(weight.shape)


def decode(codes: Tensor, grid: Grid) -> Tensor:
    """Return the weight float32 [out, in] that codes [out, in] stand for."""
    grouped = codes.reshape(*grid.scales.shape, -1)
    return ((grouped - grid.zeros[..., None]) * grid.scales[..., None]).reshape(codes.shape)


def compact_codes(codes: Tensor, form: WeightFormat) -> Tensor:
    """Return codes [out, in] in one byte each: uint8, or float8_e4m3fn."""
    return codes.to(torch.float8_e4m3fn if form.codes == "float8_e4m3" else torch.uint8)


def stored_codes(compact: Tensor, form: WeightFormat) -> Tensor:
    """Return `compact_codes` as a checkpoint holds them: uint8, 4-bit ones packed, 8-bit floats as their bytes."""
    if form.bits == 4:
        return torch.from_numpy(pack_sits(compact.numpy()))
    return compact.view(torch.uint8)
