"""The W4A16 linear op against explicit dequantization, one weight at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sits_trt.layouts import pack_sits
from sits_trt.ops import dequantize, w4a16_linear


def random_weight(
    out: int, width: int, group: int, symmetric: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return random qweight, scales and zeros in the op's shapes, every code present."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 16, (out, width), dtype=np.uint8)
    scales = torch.from_numpy(generator.uniform(0.01, 0.1, (out, width // group)).astype(np.float16))
    zeros = None if symmetric else torch.from_numpy(generator.integers(0, 16, (out, width // group), dtype=np.uint8))
    return torch.from_numpy(pack_sits(codes)), scales, zeros


def explicit(qweight: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Tensor:
    """The twin: each weight from its byte, nibble, scale and zero point. float64 [out, in]"""
    out, width = qweight.shape[0], qweight.shape[1] * 2
    weight = torch.empty(out, width, dtype=torch.float64)
    for row in range(out):
        for column in range(width):
            byte = int(qweight[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            zero = 8 if zeros is None else int(zeros[row, column // group])
            weight[row, column] = (code - zero) * float(scales[row, column // group])
    return weight


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("out", "width", "group"), [(1, 32, 32), (7, 96, 32), (5, 128, 64), (3, 256, 128)])
def test_dequantize(out: int, width: int, group: int, symmetric: bool) -> None:
    packed = random_weight(out, width, group, symmetric)
    # A code times a half-precision scale is exact in float32.
    assert torch.equal(dequantize(*packed, group).double(), explicit(*packed, group))


@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
@pytest.mark.parametrize("with_scale", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_linear_equals_explicit_arithmetic(tokens: int, with_scale: bool, symmetric: bool) -> None:
    out, width, group = 6, 64, 32
    packed = random_weight(out, width, group, symmetric, seed=tokens)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator)
    bias = torch.randn(out, generator=generator)
    scale = torch.rand(width, generator=generator) + 0.5 if with_scale else None
    scaled = x.double() * scale.double() if scale is not None else x.double()
    expected = scaled @ explicit(*packed, group).T + bias.double()
    got = w4a16_linear(x, *packed, bias, scale, group)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), expected, atol=1e-5)
    assert torch.allclose(w4a16_linear(x.double(), *packed, bias, scale, group), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_output_is_rounded_once(dtype: torch.dtype) -> None:
    packed = random_weight(6, 64, 32, symmetric=False)
    x = torch.randn(5, 64).to(dtype)
    got = w4a16_linear(x, *packed, None, None, 32)
    assert got.dtype == dtype
    assert torch.equal(got, (x.float() @ dequantize(*packed, 32).T).to(dtype))


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_b25_output_with_bias_minus_output_without_equals_the_bias(tokens: int) -> None:
    packed = random_weight(8, 64, 64, symmetric=True)
    bias = torch.arange(1.0, 9.0)
    x = torch.randn(tokens, 64)
    difference = w4a16_linear(x, *packed, bias, None, 64) - w4a16_linear(x, *packed, None, None, 64)
    assert torch.allclose(difference, bias.expand(tokens, 8), atol=1e-5)


def test_schema_and_fake_agree_with_the_body() -> None:
    arguments = (torch.randn(3, 64), *random_weight(8, 64, 32, symmetric=False), torch.randn(8), torch.rand(64), 32)
    torch.library.opcheck(torch.ops.sits.w4a16_linear.default, arguments, test_utils=("test_schema", "test_faketensor"))
