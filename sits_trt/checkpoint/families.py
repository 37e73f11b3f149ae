"""The families that can be read, as data: which architecture means what, and which config keys decide its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Windows(StrEnum):
    """Which layers attend to a sliding window, where the config gives one."""

    NEVER = "never"
    EVERY_LAYER = "every layer"
    UPPER_LAYERS = "those of layer_types, else those from max_window_layers on, if use_sliding_window says so"
    WITHOUT_ROPE = "those of layer_types, else those without RoPE, if use_sliding_window says so"
    PATTERN = "those of layer_types, else all but every sliding_window_pattern-th"


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture.

    `defaults` are the values that transformers gives to keys which a config may leave out, where they differ
    from those of `config.COMMON_DEFAULTS`; `theta` and `local_theta` are those of RoPE. A bias is a constant, or
    the name of the config key that switches it. `keys` are config keys, besides the common ones, that this family
    reads. `renamed` maps parts of stored tensor names to canonical ones, `fused` the stored name of a matrix to
    the canonical names of the matrices that it holds one above the other.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    theta: float = 10000.0
    local_theta: float = 10000.0
    local_rope: bool = False
    partial_rotary: bool = False
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Windows = Windows.NEVER
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu", "swish": "silu"})
    norm_offset: float = 0.0
    post_norms: bool = False
    scaled_embedding: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh"}
_SANDWICH = {
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "attention_output_layernorm",
    "post_feedforward_layernorm": "mlp_output_layernorm",
}
"""Gemma 2 and 3 norm before and after; the canonical name of a norm says which matrices it feeds."""

_QWEN_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "llama",
            keys=("attention_bias", "mlp_bias"),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        Family(
            "MistralForCausalLM",
            "mistral",
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            keys=("sliding_window",),
            windows=Windows.EVERY_LAYER,
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            defaults=_QWEN_DEFAULTS,
            keys=_QWEN_WINDOW_KEYS,
            qkv_bias=True,
            windows=Windows.UPPER_LAYERS,
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            defaults={**_QWEN_DEFAULTS, "head_dim": 128},
            keys=("attention_bias", *_QWEN_WINDOW_KEYS),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows=Windows.UPPER_LAYERS,
        ),
        Family(
            "SmolLM3ForCausalLM",
            "smollm3",
            defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
            keys=(
                *("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
                *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
            ),
            theta=2e6,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            windows=Windows.WITHOUT_ROPE,
        ),
        Family(
            "Phi3ForCausalLM",
            "phi3",
            defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
            keys=("sliding_window",),
            partial_rotary=True,
            windows=Windows.EVERY_LAYER,
            fused={
                "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            },
        ),
        Family(
            "GemmaForCausalLM",
            "gemma",
            defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
            keys=("attention_bias",),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            # The first releases say "gelu" and mean the approximation; so does transformers.
            activations={**_GELU_TANH, "gelu": "gelu_tanh"},
            norm_offset=1.0,
            scaled_embedding=True,
        ),
        Family(
            "Gemma2ForCausalLM",
            "gemma2",
            defaults={
                **_GEMMA_DEFAULTS,
                "num_key_value_heads": 4,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            keys=(
                *("attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
                # Some releases also have sliding_window_size, which transformers does not read.
                *("sliding_window", "sliding_window_size", "layer_types"),
            ),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            windows=Windows.PATTERN,
            activation_key="hidden_activation",
            activations=_GELU_TANH,
            norm_offset=1.0,
            post_norms=True,
            scaled_embedding=True,
            renamed=_SANDWICH,
        ),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            defaults={
                **_GEMMA_DEFAULTS,
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
            },
            keys=(
                *("attention_bias", "query_pre_attn_scalar", "final_logit_softcapping"),
                *("sliding_window", "sliding_window_pattern", "layer_types", "rope_local_base_freq"),
            ),
            theta=1e6,
            local_rope=True,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows=Windows.PATTERN,
            activation_key="hidden_activation",
            activations=_GELU_TANH,
            norm_offset=1.0,
            post_norms=True,
            scaled_embedding=True,
            renamed=_SANDWICH,
        ),
    )
}
