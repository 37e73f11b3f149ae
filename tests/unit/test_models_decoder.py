"""The decoder: independence of batching and chunks, INT4 layers, ScaleRecover, and tensors without a place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sits_trt.errors import CheckpointError
from sits_trt.layouts import pack_sits
from sits_trt.models import build_decoder
from sits_trt.models.decoder import RmsNorm
from sits_trt.models.linear import W4A16Linear
from sits_trt.ops import dequantize
from sits_trt.spec import CODED_KV_DTYPES, ModelSpec, WeightFormat
from tests.support.decode import ScatteredRun, chunked_logits, whole_logits
from tests.support.tiny import tiny_spec, tiny_tensors

# float32 sums in another order; logits are of size 3.
TOLERANCE = 1e-4


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def quantize(spec: ModelSpec, names: dict[str, WeightFormat]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tensors with random INT4 weights under `names`, and the same model with those weights dequantized."""
    tensors = tiny_tensors(spec)
    plain = dict(tensors)
    generator = np.random.default_rng(0)
    for name, form in names.items():
        out, width = tensors.pop(f"{name}.weight").shape
        codes = generator.integers(0, 16, (out, width), dtype=np.uint8)
        scales = torch.from_numpy(generator.uniform(0.01, 0.05, (out, width // form.group_size)).astype(np.float16))
        tensors[f"{name}.qweight"], tensors[f"{name}.scales"] = torch.from_numpy(pack_sits(codes)), scales
        if not form.symmetric:
            zeros = generator.integers(0, 16, (out, width // form.group_size), dtype=np.uint8)
            tensors[f"{name}.zeros"] = torch.from_numpy(zeros)
        plain[f"{name}.weight"] = dequantize(
            tensors[f"{name}.qweight"], scales, tensors.get(f"{name}.zeros"), form.group_size
        )
    return tensors, plain


def test_chunks_do_not_change_the_logits() -> None:
    spec = tiny_spec(layer_windows=(0, 7))
    decoder = build_decoder(spec, tiny_tensors(spec), dtype=torch.float32)
    whole = whole_logits(decoder, ids(40))
    for chunks in ((16, 16), (15, 1, 1, 17), (1, 38), (33,)):
        assert torch.allclose(chunked_logits(decoder, ids(40), chunks), whole, atol=TOLERANCE)


def test_company_does_not_change_a_sequence() -> None:
    spec = tiny_spec()
    decoder = build_decoder(spec, tiny_tensors(spec), dtype=torch.float32)
    prompts = [ids(30, 1), ids(1, 2), ids(17, 3)]
    run = ScatteredRun(decoder, 3)
    first = run.step([prompts[0][:20], prompts[1], []])
    second = run.step([prompts[0][20:], [], prompts[2]])
    together = [torch.cat((first[0], second[0])), first[1], second[2]]
    for prompt, logits in zip(prompts, together, strict=True):
        assert torch.allclose(logits, whole_logits(decoder, prompt), atol=TOLERANCE)


@pytest.mark.parametrize("kv_dtype", CODED_KV_DTYPES)
def test_keys_and_values_of_a_token_are_coded_alike_in_chunks_and_at_once(kv_dtype: str) -> None:
    """Float64 keeps sums of other orders from falling on the other side of a code's bound."""
    spec = tiny_spec(layer_windows=(0, 9))
    decoder = build_decoder(spec, tiny_tensors(spec), dtype=torch.float64)
    prompt = ids(50)
    whole, chunked = (ScatteredRun(decoder, 1, 4, kv_dtype=kv_dtype) for _ in range(2))
    (expected,) = whole.step([prompt])
    parts = [chunked.step([prompt[start:end]])[0] for start, end in ((0, 7), (7, 33), (33, 34), (34, 50))]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=1e-5)
    used = whole.table[0].long()
    rows = (used[torch.arange(50) // 16], torch.arange(50) % 16)
    for one, other in ((whole.pool, chunked.pool), (whole.scales, chunked.scales)):
        assert one is not None
        assert other is not None
        one, other = (t.view(torch.uint8)[rows[0], :, :, :, rows[1]] for t in (one, other))
        assert torch.equal(one, other)


def test_finer_codes_are_nearer_to_the_float_pool() -> None:
    spec = tiny_spec()
    decoder = build_decoder(spec, tiny_tensors(spec), dtype=torch.float32)
    exact = whole_logits(decoder, ids(60))
    errors = [
        float((whole_logits(decoder, ids(60), kv_dtype) - exact).norm() / exact.norm())
        for kv_dtype in ("int8", "float8_e4m3", "int4")
    ]
    # A step is 1/127, about 1/16 and 1/7 of a row's largest value: every error is there, and none is a mistake.
    assert 1e-3 < errors[0] < errors[1] / 2 < errors[2] / 4 < 0.1


def test_only_the_wanted_logits_are_computed() -> None:
    spec = tiny_spec()
    decoder = build_decoder(spec, tiny_tensors(spec), dtype=torch.float32)
    run = ScatteredRun(decoder, 1)
    arguments = (torch.tensor(ids(9), dtype=torch.int32), run.pool, run.table, torch.zeros(1, dtype=torch.int32))
    starts = torch.tensor([0, 9], dtype=torch.int32)
    picked = decoder(*arguments, starts, torch.tensor([8, 2], dtype=torch.int32))
    assert picked.shape == (2, 97)
    assert picked.dtype == torch.float32
    assert torch.allclose(picked, whole_logits(decoder, ids(9))[[8, 2]], atol=TOLERANCE)


FORMATS = {
    "model.layers.0.self_attn.q_proj": WeightFormat(4, 32, True),
    "model.layers.0.self_attn.k_proj": WeightFormat(4, 32, True),
    "model.layers.0.self_attn.v_proj": WeightFormat(4, 32, True),
    "model.layers.0.mlp.gate_proj": WeightFormat(4, 64, False),
    "model.layers.0.mlp.up_proj": WeightFormat(4, 32, False),
    "model.layers.1.self_attn.o_proj": WeightFormat(4, 64, False),
    "model.layers.1.mlp.down_proj": WeightFormat(4, 32, True),
    "lm_head": WeightFormat(4, 64, True),
}


@pytest.mark.parametrize("tied", [True, False])
def test_int4_layers_equal_the_dense_model_of_their_weights(tied: bool) -> None:
    spec = tiny_spec(tie_word_embeddings=tied)
    tensors, plain = quantize(tiny_spec(), FORMATS)
    decoder = build_decoder(spec, tensors, FORMATS, torch.float32)
    expected = whole_logits(build_decoder(tiny_spec(), plain, dtype=torch.float32), ids(20))
    assert torch.allclose(whole_logits(decoder, ids(20)), expected, atol=TOLERANCE)
    assert any(isinstance(module, W4A16Linear) for module in decoder.modules())
    decoder.dequantize_(torch.float32)
    assert not any(isinstance(module, W4A16Linear) for module in decoder.modules())
    assert torch.allclose(whole_logits(decoder, ids(20)), expected, atol=TOLERANCE)


def test_scale_recover_multiplies_the_residual_stream_after_its_layer() -> None:
    spec = tiny_spec()
    tensors = tiny_tensors(spec)
    plain = whole_logits(build_decoder(spec, tensors, dtype=torch.float32), ids(12))
    ones = {**tensors, "model.layers.1.scale_recover": torch.ones(64)}
    assert torch.equal(whole_logits(build_decoder(spec, ones, dtype=torch.float32), ids(12)), plain)
    scale = torch.linspace(0.5, 1.5, 64)
    scaled = build_decoder(spec, {**tensors, "model.layers.1.scale_recover": scale}, dtype=torch.float32)
    seen: list[Tensor] = []
    scaled.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    whole_logits(scaled, ids(12))
    unscaled = build_decoder(spec, tensors, dtype=torch.float32)
    unscaled.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    whole_logits(unscaled, ids(12))
    assert torch.allclose(seen[0], seen[1] * scale, atol=TOLERANCE)


def test_rms_norm() -> None:
    x, weight = torch.randn(3, 5), torch.rand(5)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    assert torch.allclose(RmsNorm(weight, 1e-3)(x), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
def test_b12_a_missing_tensor_is_named(name: str) -> None:
    tensors = tiny_tensors(tiny_spec())
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        build_decoder(tiny_spec(), tensors)


def test_b08_a_tensor_that_nobody_uses_is_named() -> None:
    tensors = tiny_tensors(tiny_spec())
    tensors["model.layers.0.self_attn.attention_sink"] = torch.ones(4)
    with pytest.raises(CheckpointError, match="attention_sink"):
        build_decoder(tiny_spec(), tensors)


def test_b08_every_bias_is_used() -> None:
    spec = tiny_spec(qkv_bias=True, o_bias=True, mlp_bias=True)
    tensors = tiny_tensors(spec)
    biases = [name for name in tensors if name.endswith(".bias")]
    assert len(biases) == 14
    plain = whole_logits(build_decoder(spec, tensors, dtype=torch.float32), ids(6))
    for name in biases:
        changed = {**tensors, name: torch.zeros_like(tensors[name])}
        difference = whole_logits(build_decoder(spec, changed, dtype=torch.float32), ids(6)) - plain
        # Even that of k counts: RoPE turns it by each token's position.
        assert difference.abs().max() > 1e-4, name
