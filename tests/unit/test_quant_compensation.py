"""Error compensation against its defining problem on small matrices."""

from __future__ import annotations

import itertools

import pytest
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
from sits_trt.quant.rounding import DriftCorrection, Rounder
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import WeightFormat
from tests.support.quantized import FORMS


def problem(rows: int = 24, columns: int = 160, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, correlated inputs with outlier channels, and their Hessian."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + 0.5 * torch.eye(columns)
    inputs = torch.randn(400, columns, generator=generator) @ mixing
    inputs[:, 7] *= 10
    return torch.randn(rows, columns, generator=generator), inputs, inputs.T @ inputs


def damped(hessian: Tensor) -> Tensor:
    return hessian + damping(hessian, 0.01) * torch.eye(len(hessian))


def factors_of(columns: int, seed: int = 0) -> Tensor:
    return torch.rand(columns, generator=torch.Generator().manual_seed(seed)) * 3 + 0.25


def test_the_factorization_in_place_is_the_factorization() -> None:
    _, _, hessian = problem()
    solid = damped(hessian)
    factor = cholesky_(solid)
    assert factor.data_ptr() == solid.data_ptr()
    assert torch.equal(factor, torch.linalg.cholesky(damped(hessian)))


def test_output_error_is_the_error_of_the_outputs() -> None:
    weight, inputs, hessian = problem()
    other = weight + 0.1 * torch.randn(weight.shape)
    expected = (inputs.double() @ (weight - other).double().T).square().sum().item()
    assert output_error(weight - other, hessian) == pytest.approx(expected, rel=1e-3)


def nearest(values: Tensor, form: WeightFormat) -> Tensor:
    """Return the nearest representable differences from the zero point, by comparing with each of them."""
    if form.codes == "float8_e4m3":
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        every = every[every.isfinite()]
    else:
        every = torch.arange(-(2**form.bits), 2**form.bits).double()
    return every[(values[:, None] - every).abs().argmin(1)]


def plain_elimination(weight: Tensor, hessian: Tensor, grid: Grid, factors: Tensor) -> Tensor:
    """Optimal Brain Quantization from the strongest input to the weakest, with explicit inverses in float64.

    Of weights that are multiplied by `factors` [in], for inputs that are divided by them.
    """
    order, group_size = hessian.diagonal().argsort(descending=True), len(hessian) // grid.scales.shape[1]
    rest, hessian = weight.double() * factors, hessian.double() / (factors[:, None] * factors)
    codes = torch.empty_like(rest)
    for place, column in enumerate(order.tolist()):
        left = order[place:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        scales, zeros = grid.scales[:, column // group_size].double(), grid.zeros[:, column // group_size].double()
        codes[:, column] = nearest(rest[:, column] / scales, grid.form) + zeros
        if grid.form.codes == "int":
            codes[:, column].clamp_(0, 2**grid.form.bits - 1)
        error = (rest[:, column] - (codes[:, column] - zeros) * scales) / inverse[0, 0]
        rest[:, left] -= error[:, None] * inverse[0]
    return codes.float()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_elimination_equals_its_plain_twin(form: WeightFormat) -> None:
    weight, _, hessian = problem(seed=1)
    factors, solid = factors_of(160), damped(hessian)
    grid = fit_grid(weight * factors, form, None)
    fast = eliminate(weight, Feedback.of(solid), grid, factors)
    slow = plain_elimination(weight, solid, grid, factors)
    # Float32 may round a near tie the other way, after which the row goes on differently: rows are compared.
    # With 8 bits there are 16 times as many ties to come near to.
    same = (fast == slow).all(1).float().mean()
    assert same >= (0.9 if form.bits == 4 else 0.6)
    assert output_error(weight - decode(fast, grid) / factors, hessian) == pytest.approx(
        output_error(weight - decode(slow, grid) / factors, hessian), rel=0.02
    )


def test_outputs_may_have_factors_of_their_own() -> None:
    weight, _, hessian = problem(seed=1)
    feedback, grid = Feedback.of(damped(hessian)), fit_grid(weight, FORMS["int4"], None)
    each = torch.stack([factors_of(160, seed) for seed in range(len(weight))])
    together = eliminate(weight, feedback, grid, each)
    for row in range(len(weight)):
        own = Grid(grid.scales[row : row + 1], grid.zeros[row : row + 1], grid.form)
        alone = eliminate(weight[row : row + 1], feedback, own, each[row])
        # Sums in another order for one row alone: a near tie may round the other way.
        assert (together[row] == alone[0]).float().mean() > 0.9


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_each_step_lowers_the_output_error(form: WeightFormat) -> None:
    weight, _, hessian = problem(seed=2)
    solid = damped(hessian)
    factors = factors_of(160, seed=1)
    grid = fit_grid(weight * factors, form, hessian.diagonal() / factors.square())

    def error(codes: Tensor, grid: Grid) -> float:
        return output_error(weight - decode(codes, grid) / factors, solid)

    codes = eliminate(weight, Feedback.of(solid), grid, factors)
    errors = [error(encode(weight * factors, grid), grid), error(codes, grid)]
    for _ in range(2):
        grid = refit_scales(weight, solid, codes, grid, factors)
        errors.append(error(codes, grid))
        codes = descend(weight, solid, codes, grid, factors)
        errors.append(error(codes, grid))
    assert errors[1] < 0.7 * errors[0]
    # Scales are rounded to float16 after the fit.
    assert all(later <= earlier * 1.001 for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.95 * errors[1]


def test_column_weights_price_a_columns_error_after_compensation() -> None:
    _, _, hessian = problem(rows=1, columns=20, seed=6)
    solid = damped(hessian)
    for column in (0, 7, 19):
        others = [index for index in range(20) if index != column]
        # The least error left when this weight is one off and all others are free to make up for it.
        made_up = torch.linalg.solve(solid[others][:, others].double(), solid[others, column].double())
        least = solid[column, column].double() - solid[column, others].double() @ made_up
        assert column_weights(solid)[column].item() == pytest.approx(least.item(), rel=1e-3)


def test_a_sweep_ends_where_no_single_code_can_be_better() -> None:
    weight, _, hessian = problem(rows=3, columns=64, seed=3)
    solid, grid = damped(hessian), fit_grid(weight, FORMS["int4"], None)
    codes = encode(weight, grid)
    for _ in range(50):
        after = descend(weight, solid, codes, grid, torch.ones(64))
        if torch.equal(after, codes):
            break
        codes = after
    best = output_error(weight - decode(codes, grid), solid)
    for row, column, change in itertools.product(range(3), range(64), (-1, 1)):
        other = codes.clone()
        other[row, column] = (other[row, column] + change).clamp(0, 15)
        assert output_error(weight - decode(other, grid), solid) >= best * (1 - 1e-5)


def test_refitted_scales_solve_the_least_squares_problem() -> None:
    weight, inputs, hessian = problem(rows=4, columns=64, seed=4)
    codes = torch.randint(0, 16, (4, 64), generator=torch.Generator().manual_seed(0)).float()
    start = Grid(torch.full((4, 2), 0.2), torch.full((4, 2), 8.0), FORMS["int4"])
    factors = factors_of(64)
    refitted = refit_scales(weight, hessian, codes, start, factors)
    for row in range(4):
        parts = ((codes[row] - 8) * inputs / factors).reshape(-1, 2, 32).sum(-1).double()
        target = inputs.double() @ weight[row].double()
        expected = torch.linalg.lstsq(parts, target).solution.float()
        for found, wanted in zip(refitted.scales[row], expected, strict=True):
            # Within the bounds of half to twice the start, and up to the pull of 1e-3 and float16.
            if 0.1 < wanted < 0.4:
                assert found == pytest.approx(wanted.item(), rel=5e-3)
            else:
                assert found == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_degenerate_inputs_give_finite_results(form: WeightFormat) -> None:
    """B14: dead channels, a Hessian of rank one, and none at all."""
    weight, inputs, _ = problem(rows=6, columns=64)
    section = QuantizationSection(group_size=32)
    inputs[:, :40] = 0
    for some in (inputs, inputs[:1], torch.zeros(4, 64)):
        codes, grid = Rounder(some.T @ some, form, section).round(weight, torch.ones(64))
        assert bool(torch.isfinite(decode(codes, grid)).all())
        assert bool((grid.scales > 0).all())
        low, high = (-448, 448) if form.codes == "float8_e4m3" else (0, 2**form.bits - 1)
        assert bool(((codes >= low) & (codes <= high)).all())


def test_drift_correction_makes_up_for_scaled_inputs_and_leaves_equal_ones_alone() -> None:
    weight, inputs, hessian = problem(rows=8, columns=32, seed=5)
    same = DriftCorrection(hessian)(weight, weight @ hessian)
    torch.testing.assert_close(same, weight, rtol=1e-3, atol=1e-3)
    drifted = inputs * 0.9
    corrected = DriftCorrection(drifted.T @ drifted)(weight, weight @ inputs.T @ drifted)
    before = (inputs @ weight.T - drifted @ weight.T).square().sum()
    after = (inputs @ weight.T - drifted @ corrected.T).square().sum()
    assert after < 0.2 * before


@pytest.mark.parametrize("compensation", [False, True])
def test_slices_of_outputs_are_rounded_as_the_whole(compensation: bool) -> None:
    weight, _, hessian = problem(rows=40, seed=7)
    rounder = Rounder(hessian, FORMS["int4"], QuantizationSection(compensation=compensation))
    factors = factors_of(160)
    whole, grid = rounder.round(weight, factors)
    parts = [rounder.round(weight[rows], factors) for rows in (slice(0, 17), slice(17, 40))]
    # Products of fewer rows may sum in another order: a near tie may round the other way.
    assert (torch.cat([codes for codes, _ in parts]) == whole).float().mean() > 0.98
    scales = torch.cat([part.scales for _, part in parts])
    assert ((scales - grid.scales).abs() <= 0.05 * grid.scales).float().mean() > 0.98
    error = rounder.error(weight - decode(whole, grid) / factors)
    undamped = hessian - rounder.damping * torch.eye(160)
    assert error == pytest.approx(output_error(weight - decode(whole, grid) / factors, undamped), rel=1e-3)
