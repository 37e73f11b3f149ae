"""Families beyond Llama: what published configs say, and where their tensors lie."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sits_trt.checkpoint import materialize, open_checkpoint, write_quantized
from sits_trt.checkpoint.config import parse_config
from sits_trt.checkpoint.expected import expected_tensors
from sits_trt.checkpoint.names import partial_rotary_order
from sits_trt.errors import CheckpointError
from sits_trt.models import build_decoder
from sits_trt.ops.rope import apply_rope, rope_table
from sits_trt.spec import ModelSpec, RopeSpec, WeightFormat
from tests.support.decode import whole_logits
from tests.support.tiny import tiny_config, tiny_spec, write_checkpoint


def spec(architecture: str, **config: Any) -> ModelSpec:
    return parse_config(tiny_config(architecture, **config))


class TestPublishedConfigs:
    """Sizes are cut down; the keys and what they are set to are those of the published files."""

    def test_smollm3(self) -> None:
        model = spec(
            "SmolLM3ForCausalLM", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4,
            layer_types=["full_attention"] * 4, max_window_layers=28, use_sliding_window=False, sliding_window=None,
            rope_scaling=None, rope_theta=5e6, attention_bias=False, mlp_bias=False, pretraining_tp=2,
        )  # fmt: skip
        assert [model.layer_rope(index).kind for index in range(4)] == ["default", "default", "default", "none"]
        assert model.layer_windows == (0, 0, 0, 0)
        assert model.rope.theta == 5e6
        assert spec("SmolLM3ForCausalLM", rope_theta=...).rope.theta == 2e6
        assert model.one_layer(3).rope.kind == "none"

    def test_phi3_long(self) -> None:
        factors = [1.0 + index / 10 for index in range(8)]
        model = spec(
            "Phi3ForCausalLM", max_position_embeddings=131072, original_max_position_embeddings=4096,
            sliding_window=262144, rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": factors},
            auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, embd_pdrop=0.0, resid_pdrop=0.0,
            attention_bias=False, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
        )  # fmt: skip
        assert model.rope.kind == "longrope"
        assert model.rope.long_factor == tuple(factors)
        assert model.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
        assert model.layer_windows == (262144, 262144)
        assert spec("Phi3ForCausalLM", rms_norm_eps=...).norm_eps == 1e-5
        old_name = {"type": "su", "short_factor": [1.0] * 8, "long_factor": factors}
        assert spec("Phi3ForCausalLM", rope_scaling=old_name).rope.kind == "longrope"
        with pytest.raises(CheckpointError, match="full_attn_mod"):
            spec("Phi3ForCausalLM", full_attn_mod=2)

    def test_gemma(self) -> None:
        model = spec("GemmaForCausalLM", hidden_act="gelu", hidden_activation=None, tie_word_embeddings=...)
        assert (model.activation, model.norm_offset, model.embedding_scale) == ("gelu_tanh", 1.0, 8.0)
        assert model.tie_word_embeddings
        assert spec("GemmaForCausalLM", head_dim=...).head_dim == 256
        with pytest.raises(CheckpointError, match="hidden_activation"):
            spec("GemmaForCausalLM", hidden_activation="relu")

    def test_gemma2(self) -> None:
        model = spec(
            "Gemma2ForCausalLM", num_hidden_layers=4, hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid",
            query_pre_attn_scalar=144, sliding_window=8, sliding_window_size=8, attention_bias=False,
            attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        )  # fmt: skip
        assert model.layer_windows == (8, 0, 8, 0)
        assert (model.softmax_scale, model.attention_softcap, model.logit_softcap) == (1 / 12, 50.0, 30.0)
        assert model.post_norms
        assert spec("Gemma2ForCausalLM").attention_softcap == 50.0
        assert spec("Gemma2ForCausalLM", attn_logit_softcapping=None).attention_softcap == 0.0

    def test_gemma3(self) -> None:
        model = spec(
            "Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=512, sliding_window_pattern=6, rope_theta=1e6,
            rope_local_base_freq=1e4, rope_scaling={"factor": 8.0, "rope_type": "linear"}, query_pre_attn_scalar=256,
            attn_logit_softcapping=None, final_logit_softcapping=None, cache_implementation="hybrid",
        )  # fmt: skip
        assert model.layer_windows == (512, 512, 512, 512, 512, 0, 512)
        assert model.layer_rope(5) == RopeSpec("linear", 1e6, 8.0)
        assert model.layer_rope(0) == model.layer_rope(6) == RopeSpec("default", 1e4)
        new = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
               "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
        assert spec("Gemma3ForCausalLM", rope_parameters=new).rope == model.rope
        assert spec("Gemma3ForCausalLM", rope_theta=...).rope.theta == 1e6
        with pytest.raises(CheckpointError, match="rope_parameters"):
            spec("Gemma3ForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        with pytest.raises(CheckpointError, match="attn_logit_softcapping"):
            spec("Gemma3ForCausalLM", attn_logit_softcapping=50.0)

    def test_qwen_yarn(self) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        rope = spec("Qwen2ForCausalLM", rope_scaling=scaling, rope_theta=1e6).rope
        assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 128)
        assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
        scaling.pop("factor")
        assert spec("Qwen2ForCausalLM", rope_scaling=scaling).rope.factor == 512 / 128


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}, "short_factor.*8 numbers"),
        ({"rope_type": "default", "partial_rotary_factor": 0.7}, "splits a head of 16 unevenly"),
        ({"rope_type": "default", "partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ({"rope_type": "dynamic"}, "factor"),
    ],
)
def test_rope_settings_that_make_no_sense(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        spec("Phi3ForCausalLM", rope_parameters=rope)


class TestPartialRotation:
    def test_scores_equal_rotating_the_first_rows_only(self) -> None:
        model = tiny_spec(head_dim=16, rope=RopeSpec(rotary_dim=12))
        order = list(partial_rotary_order(model))
        assert sorted(order) == list(range(16))
        table = rope_table(model.rope, 16, 32)
        first = rope_table(RopeSpec(), 12, 32)
        q, k = torch.randn(5, 1, 16), torch.randn(5, 1, 16)
        at, other = torch.tensor([0, 3, 9, 30, 31]), torch.tensor([0, 1, 9, 2, 30])

        def turned(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return torch.cat((apply_rope(x[..., :12], first[position]), x[..., 12:]), dim=-1)

        expected = (turned(q, at) * turned(k, other)).sum(-1)
        got = (apply_rope(q[..., order], table[at]) * apply_rope(k[..., order], table[other])).sum(-1)
        assert torch.allclose(got, expected, atol=1e-5)

    def test_rows_that_stand_still_carry_no_attention_factor(self) -> None:
        table = rope_table(RopeSpec(rotary_dim=8, attention_factor=1.5), 16, 4)
        assert table[0].tolist() == [1.5] * 4 + [1.0] * 4 + [0.0] * 8
        assert torch.equal(table[:, 4:8], torch.ones(4, 4))

    def test_a_layer_without_rope_is_not_turned(self) -> None:
        x = torch.randn(4, 2, 8)
        assert torch.equal(apply_rope(x, rope_table(RopeSpec(kind="none"), 8, 4)), x)


PHI = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}


def phi3_files(directory: Path) -> Path:
    """Write a tiny Phi-3 as its published files are: fused, rows in its own order."""
    write_checkpoint(directory, "Phi3ForCausalLM", **PHI)
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        attention = [tensors.pop(f"{prefix}.self_attn.{part}_proj.weight") for part in "qkv"]
        feed_forward = [tensors.pop(f"{prefix}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{prefix}.self_attn.qkv_proj.weight"] = torch.cat(attention)
        tensors[f"{prefix}.mlp.gate_up_proj.weight"] = torch.cat(feed_forward)
    save_file(tensors, directory / "model.safetensors")
    return directory


class TestFused:
    def test_parts_are_cut_out_and_rows_of_q_and_k_reordered(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(phi3_files(tmp_path))
        assert set(checkpoint) == set(expected_tensors(checkpoint.spec, {}))
        stored = load_file(tmp_path / "model.safetensors")["model.layers.1.self_attn.qkv_proj.weight"]
        order = list(partial_rotary_order(checkpoint.spec))
        q = stored[:64].reshape(4, 16, 64)[:, order].reshape(64, 64)
        assert torch.equal(checkpoint["model.layers.1.self_attn.q_proj.weight"], q)
        assert torch.equal(checkpoint["model.layers.1.self_attn.v_proj.weight"], stored[96:])

    def test_rows_that_do_not_add_up(self, tmp_path: Path) -> None:
        phi3_files(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
        with pytest.raises(CheckpointError, match=r"qkv_proj.weight.*128 rows.*64 \+ 64 \+ 64"):
            open_checkpoint(tmp_path)

    def test_a_materialized_copy_keeps_the_published_layout(self, tmp_path: Path) -> None:
        phi3_files(tmp_path / "source")
        materialize(tmp_path / "source", tmp_path / "copy", "float32")
        source, copy = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "copy"))
        assert set(copy) == set(source)
        assert all(torch.equal(copy[name], source[name]) for name in source)

    @pytest.mark.parametrize("quantized", [True, False])
    def test_a_quantized_copy_is_not_reordered_again(self, tmp_path: Path, quantized: bool) -> None:
        source = open_checkpoint(phi3_files(tmp_path / "source"))
        formats, tensors = {}, dict(source)
        if quantized:
            name = "model.layers.0.mlp.down_proj"
            formats[name] = WeightFormat(4, 32, symmetric=True)
            tensors.pop(f"{name}.weight")
            tensors[f"{name}.qweight"] = torch.randint(0, 256, (64, 48), dtype=torch.uint8)
            tensors[f"{name}.scales"] = torch.rand(64, 3).half()
        write_quantized(tmp_path / "q", source, tensors.items(), formats)
        back = open_checkpoint(tmp_path / "q")
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
        decoder = build_decoder(back.spec, back, back.formats, torch.float32, 16)
        assert whole_logits(decoder, [3, 1, 4]).isfinite().all()


SANDWICH = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "attention_output_layernorm": "post_attention_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
}


def gemma_name(name: str) -> str:
    """Return the name that Gemma 2 and 3 files give to a canonical tensor."""
    return ".".join(SANDWICH.get(part, part) for part in name.split("."))


def canonical_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a Gemma 2 or 3 file by canonical name."""
    canonical = {stored: name for name, stored in SANDWICH.items()}
    stored = load_file(directory / "model.safetensors")
    return {".".join(canonical.get(part, part) for part in name.split(".")): t for name, t in stored.items()}


def test_the_norm_before_the_feed_forward_network_has_the_canonical_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Gemma2ForCausalLM", query_pre_attn_scalar=16)
    tensors = canonical_tensors(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {gemma_name(name) for name in tensors}
    back = open_checkpoint(tmp_path)
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


class TestWrapped:
    @pytest.fixture
    def wrapped(self, tmp_path: Path) -> Path:
        """A model that reads images, as far as its language part goes."""
        write_checkpoint(tmp_path, "Gemma3ForCausalLM", query_pre_attn_scalar=16, tie_word_embeddings=True)
        inner = json.loads((tmp_path / "config.json").read_text())
        self.tensors = canonical_tensors(tmp_path)
        self.outer: dict[str, Any] = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [inner.pop("eos_token_id"), 5],
            "text_config": {key: value for key, value in inner.items() if key != "architectures"},
            "vision_config": {"hidden_size": 8},
            "mm_tokens_per_image": 256,
        }
        return tmp_path

    @pytest.mark.parametrize(
        ("language", "other"), [("language_model.model.", ""), ("model.language_model.", "model.")]
    )
    def test_only_the_language_part_is_read(self, wrapped: Path, language: str, other: str) -> None:
        stored = {f"{other}vision_tower.norm.weight": torch.ones(8), f"{other}multi_modal_projector.w": torch.ones(8)}
        for name, tensor in self.tensors.items():
            stored[language + gemma_name(name).removeprefix("model.")] = tensor
        save_file(stored, wrapped / "model.safetensors")
        (wrapped / "config.json").write_text(json.dumps(self.outer))
        checkpoint = open_checkpoint(wrapped)
        assert (checkpoint.spec.eos_token_ids, checkpoint.spec.family) == ((0, 5), "gemma3_text")
        assert set(checkpoint) == set(self.tensors)
        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in self.tensors.items())

    def test_keys_of_the_whole_count(self, wrapped: Path) -> None:
        (wrapped / "config.json").write_text(json.dumps({**self.outer, "quantization_config": {"quant_method": "fp8"}}))
        with pytest.raises(CheckpointError, match="already quantized"):
            open_checkpoint(wrapped)
        self.outer.pop("text_config")
        (wrapped / "config.json").write_text(json.dumps(self.outer))
        with pytest.raises(CheckpointError, match="text_config"):
            open_checkpoint(wrapped)
