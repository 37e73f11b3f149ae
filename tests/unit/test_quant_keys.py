"""Smoothing of keys: the float model stays what it is, and codes of keys get steps that fit all channels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sits_trt.models.decoder import build_layer
from sits_trt.ops.kv_quant import dequantize_kv, quantize_kv
from sits_trt.quant.keys import key_factors, smoothed_keys
from sits_trt.quant.streams import BlockRunner
from sits_trt.spec import ModelSpec, RopeSpec
from tests.support.tiny import tiny_spec, tiny_tensors

SPECS = {
    "llama": tiny_spec(num_layers=1),
    "qwen2": tiny_spec(num_layers=1, qkv_bias=True, layer_windows=(7,)),
    "qwen3": tiny_spec(num_layers=1, qk_norm=True, head_dim=32),
    "gemma3": tiny_spec(num_layers=1, qk_norm=True, norm_offset=1.0, post_norms=True, embedding_scale=8.0),
    "partial": tiny_spec(num_layers=1, rope=RopeSpec(rotary_dim=8)),
    "no rope": tiny_spec(num_layers=1, rope=RopeSpec("none")),
}
PREFIX = "model.layers.0."


def layer_of(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    tensors = tiny_tensors(spec, seed)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def built(spec: ModelSpec, tensors: dict[str, Tensor]) -> torch.nn.Module:
    return build_layer(spec, 0, {PREFIX + name: tensor for name, tensor in tensors.items()}, torch.float32)


@pytest.mark.parametrize("name", SPECS)
def test_the_layer_computes_what_it_did(name: str) -> None:
    spec, stream = SPECS[name], torch.randn(40, 64)
    tensors = layer_of(spec)
    layer = built(spec, tensors)
    factors = key_factors(layer, [stream[:25], stream[25:]])
    changed = smoothed_keys(spec, tensors, factors)
    assert changed, "a head has its norms, or its weights, with or without a bias"
    assert all(not torch.equal(tensor, tensors[key]) for key, tensor in changed.items())
    runner = BlockRunner(spec, 40)
    smooth = runner.run(built(spec, tensors | changed), stream)
    torch.testing.assert_close(smooth, runner.run(layer, stream), rtol=1e-4, atol=1e-4)


def keys_of(spec: ModelSpec, tensors: dict[str, Tensor], stream: Tensor) -> Tensor:
    """Return keys [tokens, kv_heads, head_dim] before RoPE."""
    layer = built(spec, tensors)
    heads = layer.qkv(layer.input_norm(stream)).reshape(len(stream), -1, spec.head_dim)
    return heads[:, spec.num_heads : spec.num_heads + spec.num_kv_heads]


def test_channels_that_rope_turns_into_each_other_share_a_factor_that_follows_their_size() -> None:
    spec, stream = SPECS["llama"], torch.randn(64, 64)
    tensors = layer_of(spec)
    rows = tensors["self_attn.k_proj.weight"].reshape(spec.num_kv_heads, spec.head_dim, -1)
    rows[0, 3] *= 100
    factors = key_factors(built(spec, tensors), [stream])
    assert factors.shape == (spec.num_kv_heads, spec.head_dim)
    assert torch.equal(factors[:, : spec.head_dim // 2], factors[:, spec.head_dim // 2 :])
    assert factors[0].argmax() == 3
    assert factors[0, 3] > 10 * factors[0, :3].max()
    assert factors[1].max() < 10 * factors[1].min()


@pytest.mark.parametrize(("kind", "gain"), [("int4", 2), ("int8", 2)])
def test_a_large_channel_no_longer_rounds_the_others_away(kind: str, gain: float) -> None:
    """Errors of scores: keys times queries, whose large channels are the small ones of the keys."""
    spec, stream = SPECS["llama"], torch.randn(64, 64)
    tensors = layer_of(spec)
    for name, factor in (("k", 30.0), ("q", 1 / 30)):
        weight = tensors[f"self_attn.{name}_proj.weight"]
        weight.reshape(-1, spec.head_dim, 64)[:, 5] *= factor
    smooth = tensors | smoothed_keys(spec, tensors, key_factors(built(spec, tensors), [stream]))
    errors = []
    for held in (tensors, smooth):
        keys = keys_of(spec, held, stream)
        layer = built(spec, held)
        queries = layer.qkv(layer.input_norm(stream)).reshape(64, -1, spec.head_dim)[:, : spec.num_heads : 2]
        off = dequantize_kv(*quantize_kv(keys, kind), kind) - keys
        errors.append(float(torch.einsum("qhd,khd->hqk", queries, off).square().mean()))
    assert errors[1] * gain**2 < errors[0]


def test_b14_dead_key_channels_give_finite_factors() -> None:
    spec = SPECS["llama"]
    tensors = layer_of(spec)
    rows = tensors["self_attn.k_proj.weight"].reshape(spec.num_kv_heads, spec.head_dim, -1)
    rows[0] = 0
    rows[1, [2, 10]] = 0
    factors = key_factors(built(spec, tensors), [torch.randn(20, 64)])
    assert torch.isfinite(factors).all()
    assert (factors > 0).all()
    assert torch.equal(factors[0], torch.ones(spec.head_dim))


def test_heads_that_share_a_norm_share_factors() -> None:
    spec = replace(SPECS["qwen3"], num_kv_heads=2)
    factors = key_factors(built(spec, layer_of(spec)), [torch.randn(20, 64)])
    assert torch.equal(factors[0], factors[1])
