"""RoPE settings in a config, in the old layout (rope_theta, rope_scaling) and the new one (rope_parameters)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from sits_trt.checkpoint.families import Family
from sits_trt.errors import CheckpointError
from sits_trt.spec import RopeSpec

_KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": ((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}
"""Kind to the keys that it needs, and those that it may have."""

_ANY_KIND = ("rope_theta", "rope_type", "type", "original_max_position_embeddings", "partial_rotary_factor")
_OLD_NAMES = {"su": "longrope"}


def parse_ropes(config: Mapping[str, Any], family: Family, head_dim: int) -> tuple[RopeSpec, RopeSpec | None]:
    """Return the RoPE settings of the model, and those of its windowed layers where the family has such.

    As in transformers, a value inside the nested dict wins over one beside it. Raises CheckpointError for an
    unknown kind, a missing number, or a key that the kind does not read.
    """
    if not family.local_rope:
        where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        nested = config.get(where) or {}
        return _Parser(config, family, head_dim, nested, where).parse(config.get("rope_theta")), None
    by_layer = config.get("rope_parameters") or {}
    if not isinstance(by_layer, Mapping) or set(by_layer) - {"full_attention", "sliding_attention"}:
        raise CheckpointError("config key 'rope_parameters' must hold 'full_attention' and 'sliding_attention'")
    full = {**(by_layer.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    local = by_layer.get("sliding_attention") or {}
    return (
        _Parser(config, family, head_dim, full, "rope_scaling").parse(config.get("rope_theta")),
        _Parser(config, family, head_dim, local, "rope_parameters.sliding_attention").parse(
            config.get("rope_local_base_freq", family.local_theta)
        ),
    )


class _Parser:
    """Reads one table of RoPE settings; `where` is its key in the config."""

    def __init__(
        self, config: Mapping[str, Any], family: Family, head_dim: int, nested: Mapping[str, Any], where: str
    ) -> None:
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"config key '{where}' must be a table, found {nested!r}")
        self.config, self.family, self.nested, self.where = config, family, nested, where
        self.rotary_dim = self._rotary_dim(head_dim)
        self.head_dim = head_dim

    def parse(self, theta_beside: Any) -> RopeSpec:
        kind = self.nested.get("rope_type") or self.nested.get("type") or "default"
        kind = _OLD_NAMES.get(kind, kind)
        if kind not in _KINDS:
            raise CheckpointError(
                f"config key '{self.where}' asks for RoPE kind {kind!r}, which is not supported; "
                f"supported: {', '.join(_KINDS)}"
            )
        needed, optional = _KINDS[kind]
        for key, value in self.nested.items():
            if key not in (*needed, *optional, *_ANY_KIND) and value is not None:
                raise CheckpointError(
                    f"config key '{self.where}.{key}' = {value!r} has no meaning for RoPE kind '{kind}'"
                )
        theta = next(
            value for value in (self.nested.get("rope_theta"), theta_beside, self.family.theta) if value is not None
        )
        return RopeSpec(
            kind=kind,
            theta=_positive(theta, "rope_theta"),
            rotary_dim=0 if self.rotary_dim == self.head_dim else self.rotary_dim,
            **self._numbers_of(kind),
        )

    def _numbers_of(self, kind: str) -> dict[str, Any]:
        if kind == "default":
            return {}
        if kind == "linear":
            return {"factor": self._number("factor")}
        if kind == "dynamic":
            return {"factor": self._number("factor"), "original_max_position": self._max_positions()}
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            return {"original_max_position": self._original(), **{name: self._number(name) for name in names}}
        original = self._original()
        factor = self._number("factor", self._max_positions() / original)
        if kind == "yarn":
            return {
                "factor": factor,
                "original_max_position": original,
                "attention_factor": self._yarn_attention_factor(factor),
                "beta_fast": self._number("beta_fast", 32.0),
                "beta_slow": self._number("beta_slow", 1.0),
                "truncate": bool(self.nested.get("truncate", True)),
            }
        growth = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return {
            "factor": factor,
            "original_max_position": original,
            "attention_factor": self._number("attention_factor", growth),
            "short_factor": self._divisors("short_factor"),
            "long_factor": self._divisors("long_factor"),
        }

    def _yarn_attention_factor(self, factor: float) -> float:
        def growth(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        scale, scale_all = self.nested.get("mscale"), self.nested.get("mscale_all_dim")
        inferred = growth(float(scale)) / growth(float(scale_all)) if scale and scale_all else growth(1.0)
        return self._number("attention_factor", inferred)

    def _original(self) -> int:
        key = "original_max_position_embeddings"
        for value in (self.config.get(key, self.family.defaults.get(key)), self.nested.get(key)):
            if value is not None:
                return int(_positive(value, key))
        return self._max_positions()

    def _max_positions(self) -> int:
        key = "max_position_embeddings"
        return int(_positive(self.config.get(key, self.family.defaults.get(key)), key))

    def _rotary_dim(self, head_dim: int) -> int:
        part = self.nested.get("partial_rotary_factor")
        part = self.config.get("partial_rotary_factor") if part is None else part
        if part is None:
            return head_dim
        if _positive(part, "partial_rotary_factor") != 1 and not self.family.partial_rotary:
            raise CheckpointError(
                f"config key 'partial_rotary_factor' = {part!r} is not supported for {self.family.architecture}"
            )
        rotary_dim = int(head_dim * part)
        if rotary_dim > head_dim or rotary_dim % 2 or (head_dim - rotary_dim) % 2:
            raise CheckpointError(f"config key 'partial_rotary_factor' = {part!r} splits a head of {head_dim} unevenly")
        return rotary_dim

    def _divisors(self, key: str) -> tuple[float, ...]:
        values = self.nested.get(key)
        if not isinstance(values, list) or len(values) != self.rotary_dim // 2:
            raise CheckpointError(f"config key '{self.where}.{key}' must list {self.rotary_dim // 2} numbers")
        return tuple(_positive(value, f"{self.where}.{key}") for value in values)

    def _number(self, key: str, default: float | None = None) -> float:
        value = self.nested.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config key '{self.where}.{key}' is missing")
        return _positive(value, f"{self.where}.{key}")


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config key '{key}' must be a positive number, found {value!r}")
    return float(value)
