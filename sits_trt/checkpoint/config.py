"""A Hugging Face config as a ModelSpec: every key that decides the result is read, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sits_trt.checkpoint.config_keys import refuse_unknown
from sits_trt.checkpoint.families import FAMILIES, Family, Windows
from sits_trt.checkpoint.rope_config import parse_rope
from sits_trt.errors import CheckpointError, did_you_mean
from sits_trt.spec import FULL_ATTENTION, ModelSpec

COMMON_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""Values that transformers gives to keys which a config may leave out."""

_COMMON_KEYS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "original_max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that `config` names. Raises CheckpointError for one that is unknown or contradicts itself."""
    named = config.get("architectures") or []
    if named and named[0] not in FAMILIES:
        raise CheckpointError(
            f"architecture '{named[0]}' is not supported{did_you_mean(str(named[0]), list(FAMILIES))}; "
            f"supported: {', '.join(FAMILIES)}"
        )
    model_type = config.get("model_type")
    by_type = [family for family in FAMILIES.values() if family.model_type == model_type]
    if not named and not by_type:
        raise CheckpointError(
            f"config.json names no architecture and its model_type {model_type!r} is not supported; "
            f"supported: {', '.join(sorted(family.model_type for family in FAMILIES.values()))}"
        )
    family = FAMILIES[named[0]] if named else by_type[0]
    if model_type is not None and model_type != family.model_type:
        raise CheckpointError(
            f"config.json contradicts itself: architecture '{family.architecture}' has model_type "
            f"'{family.model_type}', but 'model_type' is {model_type!r}"
        )
    return family


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the ModelSpec of a config.json, with the token ids of generation_config.json where there is one.

    Raises CheckpointError naming the key for an unknown architecture, a value of the wrong type, and a key
    that may change the result and is not understood.
    """
    family = family_of(config)
    refuse_unknown(config, _COMMON_KEYS | frozenset(family.keys), family.architecture)
    read = _Reader(config, {**COMMON_DEFAULTS, **family.defaults})
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", heads)
    head_dim = read.count("head_dim", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"config: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise CheckpointError(f"config key 'head_dim' = {head_dim} is odd; RoPE rotates pairs")
    activation = read.value("hidden_act")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"config key 'hidden_act' = {activation!r} is not supported; supported: silu")
    layers = read.count("num_hidden_layers")
    vocab_size = read.count("vocab_size")
    tokens = _Reader({**config, **(generation or {})}, {})
    return ModelSpec(
        family=family.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps"),
        rope=parse_rope(config, read.defaults["rope_theta"]),
        max_positions=read.count("max_position_embeddings"),
        layer_windows=_windows(family, read, layers),
        tie_word_embeddings=read.switch("tie_word_embeddings"),
        qkv_bias=read.bias(family.qkv_bias),
        o_bias=read.bias(family.o_bias),
        mlp_bias=read.bias(family.mlp_bias),
        qk_norm=family.qk_norm,
        bos_token_id=next(iter(tokens.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=tokens.token_ids("eos_token_id", vocab_size),
        pad_token_id=next(iter(tokens.token_ids("pad_token_id", vocab_size)), None),
    )


class _Reader:
    """Typed access to a config: a key that is absent takes its default, a wrong type is refused by name."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults

    def value(self, key: str) -> Any:
        return self.config[key] if key in self.config else self.defaults.get(key)

    def count(self, key: str, if_null: int | None = None) -> int:
        value = self.value(key)
        value = if_null if value is None else value
        if value is None:
            raise CheckpointError(f"config key '{key}' is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config key '{key}' must be a positive whole number, found {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise CheckpointError(f"config key '{key}' must be a positive number, found {value!r}")
        return float(value)

    def switch(self, key: str) -> bool:
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"config key '{key}' must be true or false, found {value!r}")
        return bool(value)

    def bias(self, rule: bool | str) -> bool:
        return self.switch(rule) if isinstance(rule, str) else rule

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the ids under `key` that lie in the vocabulary: published configs also hold -1 for 'none'."""
        value = self.value(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in listed):
            raise CheckpointError(f"config key '{key}' must be a token id or a list of them, found {value!r}")
        return tuple(item for item in listed if 0 <= item < vocab_size)


def _windows(family: Family, read: _Reader, layers: int) -> tuple[int, ...]:
    """Return each layer's window. A null window, or a switch that is off, means full attention."""
    full = (FULL_ATTENTION,) * layers
    if family.windows is Windows.NEVER or read.value("sliding_window") is None:
        return full
    if family.windows is Windows.EVERY_LAYER:
        return (read.count("sliding_window"),) * layers
    kinds = read.value("layer_types")
    on = read.switch("use_sliding_window")
    if kinds is None:
        first = read.value("max_window_layers") if on else layers
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"config key 'layer_types' must hold 'full_attention' or 'sliding_attention' for each of {layers} layers"
        )
    if not on:
        return full
    window = read.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else FULL_ATTENTION for kind in kinds)
