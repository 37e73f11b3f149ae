"""config.json to ModelSpec: defaults, switches, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from sits_trt.checkpoint.config import parse_config
from sits_trt.checkpoint.families import FAMILIES
from sits_trt.errors import CheckpointError
from sits_trt.spec import ModelSpec, RopeSpec
from tests.support.tiny import tiny_config


def spec(architecture: str = "LlamaForCausalLM", **config: Any) -> ModelSpec:
    return parse_config(tiny_config(architecture, **config))


def test_b04_head_dim_is_read_or_the_familys_default() -> None:
    wide = spec(head_dim=32)
    assert (wide.head_dim, wide.q_size, wide.kv_size) == (32, 128, 64)
    assert spec(head_dim=...).head_dim == 16
    assert spec("MistralForCausalLM", head_dim=...).head_dim == 16
    assert spec("Qwen2ForCausalLM", head_dim=...).head_dim == 16
    assert spec("Qwen3ForCausalLM", head_dim=...).head_dim == 128


@pytest.mark.parametrize("key", ["unk_token_id", "sep_token_id", "mask_token_id", "cls_token_id"])
def test_ids_of_tokens_that_no_layer_reads_are_passed_over(key: str) -> None:
    assert spec(**{key: 3}) == spec()


def test_kv_heads_left_out() -> None:
    assert spec(num_key_value_heads=...).num_kv_heads == 4
    large = {"num_attention_heads": 32, "hidden_size": 512}
    assert spec("MistralForCausalLM", num_key_value_heads=..., **large).num_kv_heads == 8
    assert spec("Qwen2ForCausalLM", num_key_value_heads=..., **large).num_kv_heads == 32


def test_b08_biases_follow_the_switches_of_the_family() -> None:
    def biases(model: ModelSpec) -> tuple[bool, bool, bool]:
        return model.qkv_bias, model.o_bias, model.mlp_bias

    assert biases(spec()) == (False, False, False)
    assert biases(spec(attention_bias=True)) == (True, True, False)
    assert biases(spec(attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(spec("Qwen2ForCausalLM")) == (True, False, False)
    assert biases(spec("Qwen3ForCausalLM")) == (False, False, False)
    assert biases(spec("MistralForCausalLM")) == (False, False, False)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


class TestB09Rope:
    @pytest.mark.parametrize("kind_key", ["type", "rope_type"])
    def test_both_layouts_agree(self, kind_key: str) -> None:
        expected = RopeSpec("llama3", 5e5, 8.0, 1.0, 4.0, 32)
        assert spec(rope_theta=5e5, rope_scaling={kind_key: "llama3", **LLAMA3}).rope == expected
        new = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
        assert spec(rope_theta=..., rope_parameters=new).rope == expected
        assert spec(rope_theta=1e4, rope_parameters=new).rope == expected, "the nested value wins over a stale one"

    def test_linear_and_default(self) -> None:
        assert spec(rope_scaling={"type": "linear", "factor": 4.0}).rope == RopeSpec("linear", 1e4, 4.0)
        assert spec(rope_theta=...).rope == RopeSpec("default", 1e4)
        assert spec(rope_scaling=None, rope_theta=7.0).rope == RopeSpec("default", 7.0)
        assert spec(rope_parameters={"rope_type": "default", "rope_theta": 3.0}).rope == RopeSpec("default", 3.0)

    def test_original_length_defaults_to_the_model_s(self) -> None:
        scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
        assert spec(rope_scaling={"rope_type": "llama3", **scaling}).rope.original_max_position == 512

    @pytest.mark.parametrize(
        ("scaling", "named"),
        [
            ({"rope_type": "yarm", "factor": 2.0}, "yarm"),
            ({"rope_type": "linear"}, "rope_scaling.factor"),
            ({"rope_type": "linear", "factor": "4"}, "rope_scaling.factor"),
            ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor"),
            ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
            ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
            ({"rope_type": "default", "factor": 2.0}, "rope_scaling.factor"),
            ("linear", "rope_scaling"),
        ],
    )
    def test_what_is_not_understood_is_refused_by_name(self, scaling: Any, named: str) -> None:
        with pytest.raises(CheckpointError, match=named):
            spec(rope_scaling=scaling)

    def test_partial_rotation_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="partial_rotary_factor"):
            spec(partial_rotary_factor=0.5)


class TestB11Windows:
    def test_mistral(self) -> None:
        assert spec("MistralForCausalLM", sliding_window=None).layer_windows == (0, 0)
        assert spec("MistralForCausalLM").layer_windows == (4096, 4096), "left out means 4096"
        assert spec("MistralForCausalLM", sliding_window=8).layer_windows == (8, 8)

    @pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    def test_qwen(self, architecture: str) -> None:
        def windows(**config: Any) -> tuple[int, ...]:
            return spec(architecture, **config).layer_windows

        assert windows() == (0, 0)
        assert windows(sliding_window=8) == (0, 0), "the switch is off when it is left out"
        assert windows(sliding_window=8, use_sliding_window=False, max_window_layers=0) == (0, 0)
        assert windows(sliding_window=8, use_sliding_window=True, max_window_layers=1) == (0, 8)
        assert windows(sliding_window=8, use_sliding_window=True) == (0, 0), "max_window_layers left out means 28"
        assert windows(sliding_window=None, use_sliding_window=True, max_window_layers=0) == (0, 0)
        kinds = ["sliding_attention", "full_attention"]
        assert windows(sliding_window=8, use_sliding_window=True, layer_types=kinds) == (8, 0)
        assert windows(sliding_window=8, use_sliding_window=False, layer_types=kinds) == (0, 0)

    @pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "chunked_attention"], "full_attention"])
    def test_layer_types_that_make_no_sense(self, kinds: Any) -> None:
        with pytest.raises(CheckpointError, match="layer_types"):
            spec("Qwen2ForCausalLM", layer_types=kinds)


class TestUnknown:
    def test_architecture(self) -> None:
        with pytest.raises(CheckpointError, match=r"'LlamaForCausalLm'.*did you mean LlamaForCausalLM"):
            spec(architectures=["LlamaForCausalLm"])
        with pytest.raises(CheckpointError, match="model_type 'gpt_neox'"):
            spec(architectures=..., model_type="gpt_neox")
        with pytest.raises(CheckpointError, match="contradicts itself"):
            spec(model_type="qwen2")

    @pytest.mark.parametrize("architecture", FAMILIES)
    def test_family_by_model_type_alone(self, architecture: str) -> None:
        model = spec(architecture, architectures=...)
        assert model.family == FAMILIES[architecture].model_type

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("attn_logit_softcapping", 50.0),
            ("num_local_experts", 8),
            ("logit_scale", 0.5),
            ("residual_multiplier", 0.22),
            ("clip_qkv", 8),
            ("no_rope_layers", [1, 0]),
            ("hidden_act", "gelu"),
            ("a_key_of_tomorrow", "on"),
            ("use_sliding_window", True),
        ],
    )
    def test_key_that_may_change_the_result(self, key: str, value: Any) -> None:
        with pytest.raises(CheckpointError, match=f"'{key}'"):
            spec(**{key: value})

    def test_keys_that_are_off_or_only_bookkeeping_pass(self) -> None:
        plain = spec()
        assert plain == spec(
            attn_logit_softcapping=None, clip_qkv=False, moe={}, _name_or_path="x", transformers_version="4.40",
            torch_dtype="bfloat16", use_cache=True, initializer_range=0.1, temperature=0.6, auto_map={},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**70),
        ("hidden_act", []),
        ("hidden_size", ...),
        ("hidden_size", "64"),
        ("num_hidden_layers", 0),
        ("num_attention_heads", True),
        ("vocab_size", 97.0),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", 10**400),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("head_dim", 15),
        ("eos_token_id", "</s>"),
    ],
)
def test_wrong_types_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        spec(**{key: value})


def test_heads_that_cannot_be_shared_evenly() -> None:
    with pytest.raises(CheckpointError, match="4 attention heads cannot share 3"):
        spec(num_key_value_heads=3)


def test_token_ids_come_from_the_generation_config_first() -> None:
    config = tiny_config(eos_token_id=2, bos_token_id=1, pad_token_id=-1)
    assert parse_config(config).eos_token_ids == (2,)
    model = parse_config(config, {"eos_token_id": [5, 6], "temperature": 0.6})
    assert (model.eos_token_ids, model.bos_token_id, model.pad_token_id) == ((5, 6), 1, None)


def test_spec_survives_json() -> None:
    model = spec("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert ModelSpec.from_dict(model.to_dict()) == model
