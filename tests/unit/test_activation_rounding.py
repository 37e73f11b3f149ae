"""Rounding of activations against plain searches over all codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sits_trt.ops.activation_rounding import nearest_e4m3, round_activations


def e4m3_values() -> list[float]:
    """Every finite number of e4m3 by its definition: 4 bits of exponent, bias 7, 3 of fraction, no infinity."""
    values = {sign * code / 8 * 2.0**-6 for code in range(8) for sign in (1, -1)}
    for exponent in range(1, 16):
        for fraction in range(8):
            if (exponent, fraction) != (15, 7):
                values |= {sign * (1 + fraction / 8) * 2.0 ** (exponent - 7) for sign in (1, -1)}
    return sorted(values)


def test_nearest_e4m3_by_definition() -> None:
    values = e4m3_values()
    assert max(values) == 448
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 2000)
    for found, wanted in zip(nearest_e4m3(x).tolist(), x.tolist(), strict=True):
        assert found in values
        assert abs(found - wanted) == min(abs(value - wanted) for value in values)
    assert nearest_e4m3(torch.tensor([1e6, -1e6, 464.0])).tolist() == [448, -448, 448]
    # Half way: to the even fraction.
    assert nearest_e4m3(torch.tensor([1 + 1 / 16, 1 + 3 / 16])).tolist() == [1, 1.25]
    assert math.isnan(nearest_e4m3(torch.tensor([math.nan])).item())


def tokens(seed: int = 0) -> Tensor:
    """Activations with tokens of all magnitudes, a dead token and an outlier channel."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-6, 3, 6)[:, None]
    x[2] = 0
    x[:, 40] *= 50
    return x


@pytest.mark.parametrize(("kind", "width"), [("float8_e4m3", 64), ("int4", 32), ("int4", 64)])
def test_each_value_is_the_nearest_code_times_the_scale(kind: str, width: int) -> None:
    x = tokens()
    codes = torch.tensor(e4m3_values() if kind == "float8_e4m3" else range(-7, 8)).double()
    found = round_activations(x, kind, width)
    assert found.dtype == torch.float32
    for values, rounded in zip(x.reshape(-1, width), found.reshape(-1, width), strict=True):
        scale = values.abs().max().double() / codes.max()
        nearest = (values.double()[:, None] - codes * scale).abs().amin(1)
        slack = 1e-6 * values.abs().max()
        assert bool(((values - rounded).abs().double() <= nearest + slack).all())
        assert rounded.abs().max() == pytest.approx(values.abs().max().item(), rel=1e-6)
    assert bool((found[2] == 0).all())


def test_rounding_twice_changes_nothing_and_tokens_are_apart() -> None:
    x = tokens(1)
    for kind in ("float8_e4m3", "int4"):
        once = round_activations(x, kind, 32)
        torch.testing.assert_close(round_activations(once, kind, 32), once, rtol=1e-6, atol=0)
        assert torch.equal(once[1:2], round_activations(x[1:2], kind, 32))


def test_no_rounding_and_values_that_are_not_finite() -> None:
    x = tokens(2)
    assert torch.equal(round_activations(x.half(), "float16", 64), x.half().float())
    for kind in ("float8_e4m3", "int4"):
        for bad in (math.nan, math.inf):
            x[3, 5] = bad
            found = round_activations(x, kind, 32)
            assert not bool(torch.isfinite(found[3]).all())
            assert bool(torch.isfinite(found[4]).all())
