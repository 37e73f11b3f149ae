"""Equalization: factors, and folds that leave the float model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sits_trt.models import build_decoder
from sits_trt.quant.compensation import output_error
from sits_trt.quant.equalization import (
    channel_scales,
    fold_norm,
    fold_rows,
    pooled_by_kv_head,
    search_channel_scales,
    shared_by_queries,
)
from sits_trt.quant.grid import decode
from sits_trt.quant.rounding import Rounder
from sits_trt.recipe.schema import QuantizationSection
from tests.support.decode import whole_logits
from tests.support.quantized import FORMS
from tests.support.tiny import tiny_spec, tiny_tensors


def factors(size: int, seed: int = 0) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 3 + 0.25


def logits(tensors: dict[str, Tensor], **spec: object) -> Tensor:
    return whole_logits(build_decoder(tiny_spec(**spec), tensors, dtype=torch.float32), [5, 80, 3, 3, 41, 9])


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_b19_b20_folds_leave_the_float_model_unchanged(biases: bool, offset: float) -> None:
    switches = {"qkv_bias": biases, "mlp_bias": biases, "norm_offset": offset}
    spec = tiny_spec(**switches)
    tensors = tiny_tensors(spec)
    before = logits(tensors, **switches)
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        normed, v, up = factors(64, index), factors(spec.kv_size, index + 9), factors(96, index + 5)
        for norm, parts in (("input_layernorm", ("self_attn.q", "self_attn.k", "self_attn.v")),
                            ("post_attention_layernorm", ("mlp.gate", "mlp.up"))):  # fmt: skip
            tensors[f"{prefix}{norm}.weight"] = fold_norm(tensors[f"{prefix}{norm}.weight"], normed, offset)
            for part in parts:
                tensors[f"{prefix}{part}_proj.weight"] = tensors[f"{prefix}{part}_proj.weight"] * normed
        for producer, consumer, rows, columns in (
            ("self_attn.v_proj", "self_attn.o_proj", v, shared_by_queries(v, spec.num_heads, spec.head_dim)),
            ("mlp.up_proj", "mlp.down_proj", up, up),
        ):
            for kind in ("weight", "bias") if biases else ("weight",):
                tensors[f"{prefix}{producer}.{kind}"] = fold_rows(tensors[f"{prefix}{producer}.{kind}"], rows)
            tensors[f"{prefix}{consumer}.weight"] = tensors[f"{prefix}{consumer}.weight"] * columns
    # Float32 sums in another order of magnitude per channel.
    torch.testing.assert_close(logits(tensors, **switches), before, rtol=1e-4, atol=1e-4)


def test_b19_heads_are_repeated_in_a_row_not_tiled() -> None:
    own = torch.arange(4.0)
    assert shared_by_queries(own, 4, 2).tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert torch.equal(pooled_by_kv_head(shared_by_queries(own, 4, 2), 2, 2), own)
    assert pooled_by_kv_head(torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7]), 2, 2).tolist() == [1, 2, 5, 6]


def test_b20_norms_that_multiply_by_one_plus_weight() -> None:
    weight, divide, x = torch.randn(16) * 0.2, factors(16), torch.randn(5, 16)
    folded = fold_norm(weight, divide, 1.0)
    torch.testing.assert_close(x * (1 + folded) * divide, x * (1 + weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x * fold_norm(weight, divide) * divide, x * weight, rtol=1e-5, atol=1e-5)
    assert fold_norm(weight.half(), divide).dtype == torch.float16


def test_b14_a_fold_never_silences_a_channel() -> None:
    """B14: near -1, respectively 0, float16 has no value for a small product: the channel keeps its weight."""
    dead, weak = -1.0, torch.tensor(-0.99).half().item()
    folded = fold_norm(torch.tensor([weak, dead, 0.5]).half(), torch.full((3,), 64.0), 1.0)
    assert folded[:2].tolist() == [weak, dead]
    assert folded[2].item() == pytest.approx(1.5 / 64 - 1, abs=2**-11)
    assert fold_norm(torch.tensor([1e-6, 0.0]).half(), torch.full((2,), 64.0)).tolist() == torch.tensor(
        [1e-6, 0.0]
    ).half().tolist()  # fmt: skip


def test_b14_dead_channels_get_sound_factors() -> None:
    levels = torch.tensor([0.0, 1e-3, 1.0, 100.0])
    for ratio in (0.0, 0.5, 1.0):
        found = channel_scales(levels, ratio)
        assert bool((torch.isfinite(found) & (found > 0)).all())
        assert found[0] == found[1]
    assert torch.equal(channel_scales(torch.zeros(3), 0.5), torch.ones(3))


@pytest.mark.parametrize("compensation", [False, True])
def test_the_search_finds_factors_that_help_where_channels_differ(compensation: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 64, generator=generator)
    inputs[:, ::7] *= 30
    weight, hessian = torch.randn(32, 64, generator=generator), inputs.T @ inputs
    section = QuantizationSection(clip=False, compensation=compensation)
    rounder = Rounder(hessian, FORMS["int4"], section)
    found = search_channel_scales(weight, inputs.abs().mean(0), rounder)

    def error(scale: Tensor) -> float:
        codes, grid = rounder.round(weight, scale)
        return output_error(weight - decode(codes, grid) / scale, inputs.T @ inputs)

    assert error(found) < 0.7 * error(torch.ones(64))
