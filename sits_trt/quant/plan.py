"""Which linear layers are quantized, and how, decided and checked before anything is computed."""

from __future__ import annotations

import re

from sits_trt.checkpoint.expected import linear_shapes
from sits_trt.errors import QuantizationError, did_you_mean
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.recipe.schemes import weight_format
from sits_trt.spec import PER_CHANNEL, ModelSpec, WeightFormat

HEAD = "lm_head"
"""Always kept: it decides the logits directly, and is the embedding where the two are tied."""

_GROUP_SIZES = (128, 64, 32)


def plan_formats(spec: ModelSpec, section: QuantizationSection) -> dict[str, WeightFormat]:
    """Return the format of every linear layer that is to be quantized, by name, in the order of the model.

    Raises QuantizationError as `quantizable` does, and when the group size does not divide the input width of a layer.
    """
    form = weight_format(section)
    widths = quantizable(spec, section)
    chosen = dict.fromkeys(widths, form)
    ragged = {name: width for name, width in widths.items() if width % form.group_width(width)}
    if ragged:
        raise QuantizationError(_ragged_message(ragged, form))
    return chosen


def quantizable(spec: ModelSpec, section: QuantizationSection) -> dict[str, int]:
    """Return the input widths of the linear layers that may be quantized, by name, in the order of the model.

    Raises QuantizationError when an ignore pattern matches no linear layer, or when the patterns leave none.
    """
    shapes = linear_shapes(spec)
    ignored = {HEAD}
    for pattern in section.ignore:
        ignored |= _matches(pattern, list(shapes))
    widths = {name: shape[1] for name, (shape, _) in shapes.items() if name not in ignored}
    if not widths:
        raise QuantizationError(
            "quantization.ignore leaves no layer to quantize; use quantization.scheme=none for that"
        )
    return widths


def _matches(pattern: str, names: list[str]) -> set[str]:
    """Return the names that `pattern` means: one name, or with 're:' all that the expression matches as a whole."""
    if not pattern.startswith("re:"):
        found = {pattern} & set(names)
        hint = did_you_mean(pattern, names)
    else:
        try:
            expression = re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise QuantizationError(f"ignore pattern '{pattern}' is no regular expression: {error}") from None
        found = {name for name in names if expression.fullmatch(name)}
        partly = [name for name in names if expression.search(name)]
        hint = f" (it must match the whole name, such as {partly[0]})" if partly else did_you_mean(pattern[3:], names)
    if not found:
        raise QuantizationError(
            f"ignore pattern '{pattern}' matches no linear layer of this model{hint}; correct it or take it out"
        )
    return found


def _ragged_message(ragged: dict[str, int], form: WeightFormat) -> str:
    widths = sorted(set(ragged.values()))
    fitting = [size for size in _GROUP_SIZES if all(width % size == 0 for width in widths)]
    if form.bits == 8:
        fitting.append(PER_CHANNEL)
    way_out = f"use group_size {' or '.join(map(str, fitting))}, or ignore them" if fitting else "ignore them"
    listed = ", ".join(f"{name} ({width})" for name, width in list(ragged.items())[:8])
    more = f" and {len(ragged) - 8} more" if len(ragged) > 8 else ""
    return f"group_size {form.group_size} does not divide the input width of {listed}{more}; {way_out}"
