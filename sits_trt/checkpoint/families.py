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
    UPPER_LAYERS = "layers from max_window_layers on, if use_sliding_window says so"


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture.

    `defaults` are the values that transformers gives to keys which a config may leave out, where they differ
    from those of `config.COMMON_DEFAULTS`. A bias is a constant, or the name of the config key that switches it.
    `keys` are config keys, besides the common ones, that this family reads.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Windows = Windows.NEVER
    keys: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "llama",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            keys=("attention_bias", "mlp_bias"),
        ),
        Family(
            "MistralForCausalLM",
            "mistral",
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            windows=Windows.EVERY_LAYER,
            keys=("sliding_window",),
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
            qkv_bias=True,
            windows=Windows.UPPER_LAYERS,
            keys=("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            defaults={
                "num_key_value_heads": 32,
                "head_dim": 128,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows=Windows.UPPER_LAYERS,
            keys=("attention_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        ),
    )
}
