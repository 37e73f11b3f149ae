"""Scales and zero points of groups, and codes, of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sits_trt.ops import decode_weight
from sits_trt.quant.grid import Grid, compact_codes, decode, encode, fit_grid, stored_codes
from sits_trt.spec import WeightFormat
from tests.support.quantized import FORMS

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
EIGHT = WeightFormat(4, 8, False)


def random_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def check_storable(grid: Grid) -> None:
    assert torch.equal(grid.scales.half().float(), grid.scales)
    assert bool((grid.scales > 0).all())
    assert bool(torch.isfinite(grid.scales).all())
    assert torch.equal(grid.zeros, grid.zeros.round().clamp(0, 2**grid.form.bits - 1))


@every_form
@pytest.mark.parametrize("clip", [True, False])
def test_decode_equals_the_op_on_stored_codes(form: WeightFormat, clip: bool) -> None:
    weight = random_weight(5, 96)
    grid = fit_grid(weight, form, torch.rand(96) if clip else None)
    codes = encode(weight, grid)
    check_storable(grid)
    stored = stored_codes(compact_codes(codes, form), form)
    assert stored.dtype == torch.uint8
    assert stored.shape == (5, 96 * form.bits // 8)
    zeros = None if form.symmetric else grid.zeros.to(torch.uint8)
    assert torch.equal(decode_weight(stored, grid.scales.half(), zeros, form), decode(codes, grid))


@every_form
def test_without_importance_every_weight_is_within_half_a_step(form: WeightFormat) -> None:
    weight = random_weight(64, 128, seed=1)
    grid = fit_grid(weight, form, None)
    error = (decode(encode(weight, grid), grid) - weight).abs().reshape(*grid.scales.shape, -1)
    if form.codes == "float8_e4m3":
        # Three bits of fraction: half a step is 2**-4 of the value, and 2**-10 of a scale below the smallest normal.
        steps = torch.maximum(weight.abs().reshape_as(error) * 2**-4, grid.scales[..., None] * 2**-10)
        assert bool((error <= steps * (1 + 1e-4)).all())
        return
    # The scale is rounded to float16, by which the outermost of n steps moves by up to n * 2**-11 of a step.
    assert bool((error <= grid.scales[..., None] * (0.5 + 2**form.bits * 2**-11)).all())


@every_form
def test_clipping_never_raises_the_weighted_error(form: WeightFormat) -> None:
    weight, importance = random_weight(64, 128, seed=2), torch.rand(128, generator=torch.Generator().manual_seed(3))
    weight[:, 5] *= 6

    def weighted(grid: Grid) -> Tensor:
        squares = (decode(encode(weight, grid), grid) - weight).square() * importance
        return squares.reshape(*grid.scales.shape, -1).sum(-1)

    plain = weighted(fit_grid(weight, form, None))
    clipped = weighted(fit_grid(weight, form, importance))
    assert bool((clipped <= plain * (1 + 1e-5)).all())
    assert clipped.sum() < (0.95 if form.bits == 4 else 1) * plain.sum()


def test_b15_groups_of_one_sign_include_zero() -> None:
    for weight in (torch.arange(6.25, 8.1, 0.25)[None], -torch.arange(6.25, 8.1, 0.25)[None]):
        grid = fit_grid(weight, EIGHT, None)
        assert abs(grid.scales.item() - 0.5333) < 1e-3
        error = (decode(encode(weight, grid), grid) - weight).abs().max()
        assert error <= 0.2501
        searched = fit_grid(weight, EIGHT, torch.ones(8))
        assert bool(((decode(encode(weight, searched), searched) - weight).abs() <= 0.27).all())


@every_form
@pytest.mark.parametrize("clip", [True, False])
def test_b14_zero_and_tiny_groups_have_positive_scales(form: WeightFormat, clip: bool) -> None:
    weight = random_weight(5, 128)
    weight[0, :32] = 0
    weight[1, 32:64] = 1e-7
    weight[2, 64:96] = -1e-7
    weight[3] = 1e-12
    weight[4] = 0
    importance = torch.rand(128)
    importance[:40] = 0  # dead inputs
    grid = fit_grid(weight, form, importance if clip else None)
    check_storable(grid)
    decoded = decode(encode(weight, grid), grid)
    assert bool(torch.isfinite(decoded).all())
    assert bool((decoded[0, :32] == 0).all())
    assert bool((decoded[4] == 0).all())
    # The smallest float16 is 6e-8: tiny groups may vanish or keep their size, but never grow.
    assert bool((decoded[1, 32:64].abs() <= 1.3e-7).all())
    assert bool((decoded[3].abs() <= 1e-7).all())


def test_b14_an_outlier_in_a_channel_saturates_nothing() -> None:
    """One weight of 1000 among normal ones: e4m3 keeps it and its neighbours, whole numbers keep it alone."""
    weight = random_weight(3, 64, seed=4)
    weight[1, 9] = 1000.0
    for form in (FORMS["fp8"], FORMS["int8"]):
        grid = fit_grid(weight, form, None)
        decoded = decode(encode(weight, grid), grid)
        assert decoded[1, 9] == pytest.approx(1000, rel=0.01)
        others = (decoded - weight)[1].abs()[torch.arange(64) != 9]
        assert (others.max() < 0.3) == (form.codes == "float8_e4m3")
