"""RoPE settings in a config, in the old layout (rope_theta, rope_scaling) and the new one (rope_parameters)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sits_trt.errors import CheckpointError
from sits_trt.spec import RopeSpec

_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Kind to the keys it needs."""

_ALWAYS_ALLOWED = ("rope_theta", "rope_type", "type", "original_max_position_embeddings")


def parse_rope(config: Mapping[str, Any], default_theta: float) -> RopeSpec:
    """Return the RoPE settings of `config`. As in transformers, a value inside the nested dict wins over one beside it.

    Raises CheckpointError for an unknown kind, a missing number, or a key that the kind does not read.
    """
    nested = config.get("rope_scaling") or config.get("rope_parameters") or {}
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config key '{where}' must be a table, found {nested!r}")
    kind = nested.get("rope_type") or nested.get("type") or "default"
    if kind not in _KINDS:
        raise CheckpointError(
            f"config key '{where}' asks for RoPE kind {kind!r}, which is not supported; supported: {', '.join(_KINDS)}"
        )
    _refuse_partial(config, nested)
    for key, value in nested.items():
        if key not in (*_KINDS[kind], *_ALWAYS_ALLOWED, "partial_rotary_factor") and value is not None:
            raise CheckpointError(f"config key '{where}.{key}' = {value!r} has no meaning for RoPE kind '{kind}'")
    numbers = {key: _number(nested, where, key) for key in _KINDS[kind]}
    theta = nested.get("rope_theta")
    if theta is None:
        theta = config.get("rope_theta")
    return RopeSpec(
        kind=kind,
        theta=_positive(default_theta if theta is None else theta, "rope_theta"),
        original_max_position=_original_length(config, nested) if kind == "llama3" else 0,
        **numbers,
    )


def _original_length(config: Mapping[str, Any], nested: Mapping[str, Any]) -> int:
    for value in (
        config.get("original_max_position_embeddings"),
        nested.get("original_max_position_embeddings"),
        config.get("max_position_embeddings"),
    ):
        if value is not None:
            return int(_positive(value, "original_max_position_embeddings"))
    raise CheckpointError("config key 'original_max_position_embeddings' is missing")


def _refuse_partial(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    part = nested.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise CheckpointError(f"config key 'partial_rotary_factor' = {part!r} is not supported; only 1.0 is")


def _number(nested: Mapping[str, Any], where: str, key: str) -> float:
    if nested.get(key) is None:
        raise CheckpointError(f"config key '{where}.{key}' is missing")
    return _positive(nested[key], f"{where}.{key}")


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise CheckpointError(f"config key '{key}' must be a positive number, found {value!r}")
    return float(value)
