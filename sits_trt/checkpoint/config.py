"""A Hugging Face config as a ModelSpec: every key that decides the result is read, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sits_trt.checkpoint.config_keys import refuse_unknown
from sits_trt.checkpoint.config_reader import Reader, layer_windows, layers_without_rope
from sits_trt.checkpoint.families import FAMILIES, Family, Windows
from sits_trt.checkpoint.rope_config import parse_ropes
from sits_trt.errors import CheckpointError, did_you_mean
from sits_trt.spec import FULL_ATTENTION, ModelSpec, RopeSpec

COMMON_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""Values that transformers gives to keys which a config may leave out."""

_COMMON_KEYS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings", "rms_norm_eps",
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
    read = Reader(config, {**COMMON_DEFAULTS, **family.defaults})
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", heads)
    head_dim = read.count("head_dim", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"config: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise CheckpointError(f"config key 'head_dim' = {head_dim} is odd; RoPE rotates pairs")
    layers, vocab_size = read.count("num_hidden_layers"), read.count("vocab_size")
    windows = layer_windows(family, read, layers)
    rope, second_rope = parse_ropes(config, family, head_dim)
    without_rope = layers_without_rope(read, layers) if family.windows is Windows.WITHOUT_ROPE else ()
    if without_rope:
        second_rope = RopeSpec(kind="none")
    windowed = tuple(index for index, window in enumerate(windows) if window != FULL_ATTENTION)
    scalar = read.number("query_pre_attn_scalar", 0.0)
    tokens = Reader({**config, **(generation or {})}, {})
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
        rope=rope,
        max_positions=read.count("max_position_embeddings"),
        layer_windows=windows,
        tie_word_embeddings=read.switch("tie_word_embeddings"),
        qkv_bias=read.bias(family.qkv_bias),
        o_bias=read.bias(family.o_bias),
        mlp_bias=read.bias(family.mlp_bias),
        qk_norm=family.qk_norm,
        bos_token_id=next(iter(tokens.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=tokens.token_ids("eos_token_id", vocab_size),
        pad_token_id=next(iter(tokens.token_ids("pad_token_id", vocab_size)), None),
        activation=_activation(family, read),
        norm_offset=family.norm_offset,
        post_norms=family.post_norms,
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        attention_scale=scalar**-0.5 if scalar else 0.0,
        attention_softcap=read.number("attn_logit_softcapping", 0.0),
        logit_softcap=read.number("final_logit_softcapping", 0.0),
        second_rope=second_rope,
        second_rope_layers=without_rope or (windowed if family.local_rope else ()),
    )


def _activation(family: Family, read: Reader) -> str:
    """Return our name of the activation. Published configs also carry the key that is not read: it must agree."""
    for key in (family.activation_key, "hidden_act", "hidden_activation"):
        value = read.value(key) if key == family.activation_key else read.config.get(key)
        known = isinstance(value, str) and value in family.activations
        if not known and not (value is None and key != family.activation_key):
            raise CheckpointError(
                f"config key '{key}' = {value!r} is not supported for {family.architecture}; "
                f"supported: {', '.join(family.activations)}"
            )
    return family.activations[read.value(family.activation_key)]
