"""Scales and zero points of groups, and codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sits_trt.layouts import pack_sits
from sits_trt.ops import dequantize
from sits_trt.quant.grid import Grid, decode, encode, fit_grid


def random_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def check_storable(grid: Grid) -> None:
    assert torch.equal(grid.scales.half().float(), grid.scales)
    assert bool((grid.scales > 0).all())
    assert bool(torch.isfinite(grid.scales).all())
    assert torch.equal(grid.zeros, grid.zeros.round().clamp(0, 15))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_decode_equals_the_op_on_packed_codes(symmetric: bool, clip: bool) -> None:
    weight = random_weight(5, 96)
    grid = fit_grid(weight, 32, symmetric, torch.rand(96) if clip else None)
    codes = encode(weight, grid)
    check_storable(grid)
    packed = torch.from_numpy(pack_sits(codes.to(torch.uint8).numpy()))
    zeros = None if symmetric else grid.zeros.to(torch.uint8)
    assert torch.equal(dequantize(packed, grid.scales.half(), zeros, 32), decode(codes, grid))


@pytest.mark.parametrize("symmetric", [True, False])
def test_without_importance_every_weight_is_within_half_a_step(symmetric: bool) -> None:
    weight = random_weight(64, 128, seed=1)
    grid = fit_grid(weight, 64, symmetric, None)
    error = (decode(encode(weight, grid), grid) - weight).abs().reshape(64, 2, 64)
    # The scale is rounded to float16, by which the outermost of 15 steps moves by up to 15 * 2**-11 of a step.
    assert bool((error <= grid.scales[..., None] * (0.5 + 15 * 2**-11)).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_never_raises_the_weighted_error(symmetric: bool) -> None:
    weight, importance = random_weight(64, 128, seed=2), torch.rand(128, generator=torch.Generator().manual_seed(3))
    weight[:, 5] *= 6

    def weighted(grid: Grid) -> Tensor:
        squares = (decode(encode(weight, grid), grid) - weight).square() * importance
        return squares.reshape(64, 2, 64).sum(-1)

    plain = weighted(fit_grid(weight, 64, symmetric, None))
    clipped = weighted(fit_grid(weight, 64, symmetric, importance))
    assert bool((clipped <= plain * (1 + 1e-5)).all())
    assert clipped.sum() < 0.95 * plain.sum()


def test_b15_groups_of_one_sign_include_zero() -> None:
    for weight in (torch.arange(6.25, 8.1, 0.25)[None], -torch.arange(6.25, 8.1, 0.25)[None]):
        grid = fit_grid(weight, 8, False, None)
        assert abs(grid.scales.item() - 0.5333) < 1e-3
        error = (decode(encode(weight, grid), grid) - weight).abs().max()
        assert error <= 0.2501
        searched = fit_grid(weight, 8, False, torch.ones(8))
        assert bool(((decode(encode(weight, searched), searched) - weight).abs() <= 0.27).all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_b14_zero_and_tiny_groups_have_positive_scales(symmetric: bool, clip: bool) -> None:
    weight = random_weight(4, 128)
    weight[0, :32] = 0
    weight[1, 32:64] = 1e-7
    weight[2, 64:96] = -1e-7
    weight[3, 96:] = 1e-12
    importance = torch.rand(128)
    importance[:40] = 0  # dead inputs
    grid = fit_grid(weight, 32, symmetric, importance if clip else None)
    check_storable(grid)
    decoded = decode(encode(weight, grid), grid)
    assert bool(torch.isfinite(decoded).all())
    assert bool((decoded[0, :32] == 0).all())
    # The smallest float16 is 6e-8: tiny groups may vanish or keep their size, but never grow.
    assert bool((decoded[1, 32:64].abs() <= 1.3e-7).all())
    assert bool((decoded[3, 96:].abs() <= 1e-7).all())
