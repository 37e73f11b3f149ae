"""Sums over calibration tokens against their definitions."""

from __future__ import annotations

import pytest
import torch

from sits_trt.errors import QuantizationError
from sits_trt.quant.statistics import Statistics


@pytest.mark.parametrize("width", [7, 256, 600])
def test_sums_over_blocks_are_those_over_the_text(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, y = (torch.randn(50, size, generator=generator) for size in (width, 5))
    sizes = torch.rand(50, 1, generator=generator) + 0.5
    for divided in (None, sizes):
        statistics = Statistics("layer", None)
        for rows in (slice(0, 20), slice(20, 21), slice(21, 50)):
            statistics.add(x[rows], y[rows], None if divided is None else divided[rows])
        statistics.finish()
        inputs, wanted = (t.double() / (1 if divided is None else divided) for t in (x, y))
        torch.testing.assert_close(statistics.hessian.double(), inputs.T @ inputs, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(statistics.wanted.double(), wanted.T @ inputs, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(statistics.mean_abs.double(), inputs.abs().mean(0), rtol=1e-5, atol=1e-5)
        assert torch.equal(statistics.hessian, statistics.hessian.T)


def test_values_that_are_not_finite_are_refused_by_layer() -> None:
    with pytest.raises(QuantizationError, match=r"layer.* not finite in the float model"):
        Statistics("layer", None).add(torch.ones(2, 3), torch.full((2, 3), float("nan")))
