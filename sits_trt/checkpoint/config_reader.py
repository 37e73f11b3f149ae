"""Typed access to a config.json, and the windows of its layers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sits_trt.checkpoint.families import Family, Windows
from sits_trt.errors import CheckpointError
from sits_trt.spec import FULL_ATTENTION

_SLIDING, _FULL = "sliding_attention", "full_attention"


class Reader:
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
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise CheckpointError(f"config key '{key}' must be a whole number from 1 to 2^31 - 1, found {value!r}")
        return value

    def has(self, key: str) -> bool:
        return self.value(key) is not None

    def number(self, key: str, if_null: float | None = None) -> float:
        value = self.value(key)
        if value is None and if_null is not None:
            return if_null
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
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


def layer_windows(family: Family, read: Reader, layers: int) -> tuple[int, ...]:
    """Return each layer's window. A null window, or a switch that is off, means full attention.

    Raises CheckpointError when `layer_types` does not list a known kind for every layer.
    """
    rule = family.windows
    kinds = read.value("layer_types")
    if kinds is not None and rule is not Windows.NEVER:
        known = {_SLIDING, _FULL}
        if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - known:
            raise CheckpointError(
                f"config key 'layer_types' must hold '{_FULL}' or '{_SLIDING}' for each of {layers} layers"
            )
    full = (FULL_ATTENTION,) * layers
    if rule is Windows.NEVER or not read.has("sliding_window"):
        return full
    window = read.count("sliding_window")
    if rule is Windows.EVERY_LAYER:
        return (window,) * layers
    if rule is not Windows.PATTERN and not read.switch("use_sliding_window"):
        return full
    if kinds is None:
        kinds = [_SLIDING if index in _windowed(rule, read, layers) else _FULL for index in range(layers)]
    return tuple(window if kind == _SLIDING else FULL_ATTENTION for kind in kinds)


def _windowed(rule: Windows, read: Reader, layers: int) -> Sequence[int]:
    if rule is Windows.UPPER_LAYERS:
        return range(read.count("max_window_layers", 0), layers)
    if rule is Windows.WITHOUT_ROPE:
        return layers_without_rope(read, layers)
    pattern = read.count("sliding_window_pattern")
    return [index for index in range(layers) if (index + 1) % pattern]


def layers_without_rope(read: Reader, layers: int) -> tuple[int, ...]:
    """Return the layers whose `no_rope_layers` entry is 0, or every `no_rope_layer_interval`-th."""
    rotated = read.value("no_rope_layers")
    if rotated is None:
        interval = read.count("no_rope_layer_interval")
        return tuple(index for index in range(layers) if (index + 1) % interval == 0)
    if not isinstance(rotated, list) or len(rotated) < layers or set(rotated) - {0, 1}:
        raise CheckpointError(f"config key 'no_rope_layers' must hold 1 or 0 for each of {layers} layers")
    return tuple(index for index in range(layers) if not rotated[index])
