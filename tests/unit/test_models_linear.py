"""Linear layers: dense, INT4, and fuse() in each of its branches against the parts side by side."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from sits_trt.models.linear import (
    DenseLinear,
    Linear,
    Parallel,
    QuantizedLinear,
    RoundedLinear,
    W4A16Linear,
    fuse,
)
from sits_trt.ops import decode_weight, dequantize
from sits_trt.ops.activation_rounding import round_activations
from sits_trt.quant.grid import compact_codes, encode, fit_grid, stored_codes
from sits_trt.spec import WeightFormat

WIDTH = 64


def dense(out: int, bias: bool, seed: int) -> DenseLinear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, WIDTH, generator=generator)
    return DenseLinear(weight, torch.randn(out, generator=generator) if bias else None)


def int4(
    out: int, bias: bool, seed: int, group: int = 32, zeros: bool = False, input_scale: Tensor | None = None
) -> W4A16Linear:
    generator = np.random.default_rng(seed)
    shape = (out, WIDTH // group)
    return W4A16Linear(
        torch.from_numpy(generator.integers(0, 256, (out, WIDTH // 2), dtype=np.uint8)),
        torch.from_numpy(generator.uniform(0.01, 0.1, shape).astype(np.float32)),
        torch.from_numpy(generator.integers(0, 16, shape, dtype=np.uint8)) if zeros else None,
        torch.from_numpy(generator.normal(size=out).astype(np.float32)) if bias else None,
        input_scale,
        group,
    )


def any_format(out: int, bias: bool, seed: int, form: WeightFormat, input_scale: Tensor | None = None) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    grid = fit_grid(torch.randn(out, WIDTH, generator=generator), form, None)
    codes = encode(torch.randn(out, WIDTH, generator=generator), grid)
    return QuantizedLinear(
        stored_codes(compact_codes(codes, form), form),
        grid.scales.half(),
        None if form.symmetric else grid.zeros.to(torch.uint8),
        torch.randn(out, generator=generator) if bias else None,
        input_scale,
        form,
    )


def rounded(out: int, bias: bool, seed: int, form: WeightFormat, input_scale: Tensor | None = None) -> Linear:
    layer = any_format(out, bias, seed, form, input_scale)
    assert isinstance(layer, QuantizedLinear)
    return layer.to_dense(torch.float16)


W8, FP8 = WeightFormat(8, 32, False), WeightFormat(8, -1, True, "float8_e4m3", "float8_e4m3")
W4A8, W4A4 = (WeightFormat(4, 32, False, activations=kind) for kind in ("float8_e4m3", "int4"))
SCALE, OTHER_SCALE = torch.linspace(0.5, 2, WIDTH), torch.linspace(2, 0.5, WIDTH)
Parts = Callable[[], list[Linear]]

CASES: dict[str, tuple[type, Parts]] = {
    "dense": (DenseLinear, lambda: [dense(8, False, 1), dense(4, False, 2), dense(4, False, 3)]),
    "dense with bias": (DenseLinear, lambda: [dense(8, True, 1), dense(4, True, 2)]),
    "bias on one only": (Parallel, lambda: [dense(8, True, 1), dense(4, False, 2)]),
    "int4": (W4A16Linear, lambda: [int4(8, False, 1), int4(4, False, 2)]),
    "int4 with all there is": (
        W4A16Linear,
        lambda: [
            int4(8, True, 1, zeros=True, input_scale=SCALE),
            int4(4, True, 2, zeros=True, input_scale=SCALE.clone()),
        ],
    ),
    "dense beside int4": (Parallel, lambda: [int4(8, False, 1), dense(4, False, 2)]),
    "other group size": (Parallel, lambda: [int4(8, False, 1, group=32), int4(4, False, 2, group=64)]),
    "zero points on one only": (Parallel, lambda: [int4(8, False, 1, zeros=True), int4(4, False, 2)]),
    "other input scale": (
        Parallel,
        lambda: [int4(8, False, 1, input_scale=SCALE), int4(4, False, 2, input_scale=OTHER_SCALE)],
    ),
    "input scale on one only": (Parallel, lambda: [int4(8, False, 1, input_scale=SCALE), int4(4, False, 2)]),
    "int8": (QuantizedLinear, lambda: [any_format(8, True, 1, W8), any_format(4, True, 2, W8)]),
    "fp8": (QuantizedLinear, lambda: [any_format(8, False, 1, FP8, SCALE), any_format(4, False, 2, FP8, SCALE)]),
    "fp8 beside int8": (Parallel, lambda: [any_format(8, False, 1, FP8), any_format(4, False, 2, W8)]),
    "decoded fp8": (RoundedLinear, lambda: [rounded(8, False, 1, FP8), rounded(4, False, 2, FP8)]),
    "decoded fp8 beside dense": (Parallel, lambda: [rounded(8, False, 1, FP8), dense(4, False, 2)]),
    "int4 bias on one only": (Parallel, lambda: [int4(8, True, 1), int4(4, False, 2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_fused_equals_its_parts_side_by_side(case: str) -> None:
    kind, make = CASES[case]
    parts = make()
    fused = fuse(parts)
    assert type(fused) is kind
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(9))
    # One matrix product in place of several: only the order of sums may differ.
    assert torch.allclose(fused(x), torch.cat([part(x) for part in parts], dim=-1), atol=1e-5)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("input_scale", [SCALE, None])
def test_to_dense_is_the_same_layer(zeros: bool, bias: bool, input_scale: Tensor | None) -> None:
    layer = int4(12, bias, 3, zeros=zeros, input_scale=input_scale)
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(layer.to_dense(torch.float32)(x), layer(x), atol=1e-4)
    assert layer.to_dense(torch.float16).weight.dtype == torch.float16


@pytest.mark.parametrize("form", [W8, FP8, W4A8, W4A4])
@pytest.mark.parametrize("input_scale", [SCALE, None])
def test_every_format_is_the_rounded_input_times_the_decoded_weight(
    form: WeightFormat, input_scale: Tensor | None
) -> None:
    """B25 too: the bias is added once, after the scales. The sums are float64's, of codes by hand."""
    layer = any_format(12, True, 3, form, input_scale)
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 7)[:, None]
    scaled = x if input_scale is None else x * input_scale
    inputs = round_activations(scaled, form.activations, 32).double()
    weight = decode_weight(layer.qweight, layer.scales, layer.zeros, form).double()
    expected = inputs @ weight.T + layer.bias.double()
    largest = inputs.abs() @ weight.abs().T
    # float32 sums of 64 products: a few of their roundings.
    assert bool(((layer(x) - expected).abs() <= 1e-6 * largest + 1e-6).all())
    dense = layer.to_dense(torch.float32)
    assert bool(((dense(x) - expected).abs() <= 1e-6 * largest + 1e-6).all())
    if form.activations != "float16":
        # Dropping the rounding would be seen.
        assert bool(((scaled.double() - inputs) @ weight.T).abs().mean() > 1e-3 * expected.abs().mean())


@pytest.mark.parametrize("form", [FP8, W4A8, W4A4])
def test_a_half_precision_model_rounds_as_a_float32_one(form: WeightFormat) -> None:
    layer = any_format(12, False, 3, form)
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(2)).half()
    for some in (layer, layer.to_dense(torch.float16)):
        assert some(x).dtype == torch.float16
        torch.testing.assert_close(some(x).float(), layer(x.float()), rtol=2**-10, atol=1e-4)


def test_dense_is_x_times_weight_transposed_plus_bias() -> None:
    layer = dense(3, True, 4)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2))
    expected = [[float(x[t] @ layer.weight[n] + layer.bias[n]) for n in range(3)] for t in range(2)]
    assert torch.allclose(layer(x), torch.tensor(expected), atol=1e-5)


def test_int4_layer_is_its_op() -> None:
    layer = int4(6, False, 5)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(layer(x), x @ dequantize(layer.qweight, layer.scales, None, 32).T, atol=1e-5)
