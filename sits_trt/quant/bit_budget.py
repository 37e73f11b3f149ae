"""The bit budget: which format each layer gets, so that an average of bits is kept and least is lost.

Layers that are one matrix when they run (q, k and v; gate and up) share one format.

    bit_budget.json     formats, estimated losses, and what was spent; written before the search starts
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sits_trt.artifacts import write_json
from sits_trt.checkpoint import Checkpoint
from sits_trt.checkpoint.expected import linear_shapes
from sits_trt.errors import QuantizationError
from sits_trt.progress import Progress
from sits_trt.quant.allocation import Option, allocate
from sits_trt.quant.plan import HEAD, plan_formats, quantizable
from sits_trt.quant.sensitivity import PARTS, measure_losses
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.recipe.schemes import budget_formats
from sits_trt.spec import ModelSpec, WeightFormat

BUDGET_NAME = "bit_budget.json"

_FLOAT = "float16"

Losses = Mapping[str, Mapping[str, float]]
"""Estimated loss by the name of a linear layer and of a format; none for a weight that is kept."""


@dataclass(frozen=True)
class _Part:
    """Linear layers that share a format, and the names of the formats that fit their width."""

    names: tuple[str, ...]
    choices: tuple[str, ...]


def decide_formats(
    checkpoint: Checkpoint,
    section: QuantizationSection,
    blocks: Sequence[Sequence[int]],
    out_dir: Path,
    progress: Progress,
) -> dict[str, WeightFormat]:
    """Return the format of every linear layer that is to be quantized, by name: `plan_formats`, or the budget's.

    With a budget the decision is written to `out_dir`, and taken from there when it has been made before. Raises
    QuantizationError for a plan or a budget that is not possible; nothing is written then.
    """
    if section.bits_per_weight is None:
        return plan_formats(checkpoint.spec, section)
    if not (out_dir / BUDGET_NAME).is_file():
        parts = _parts(checkpoint.spec, section)
        _check(checkpoint.spec, section, parts)
        out_dir.mkdir(parents=True, exist_ok=True)
        forms = budget_formats(section)
        candidates = {
            name: {choice: form for choice in part.choices if (form := forms[choice])}
            for part in parts
            for name in part.names
        }
        losses = measure_losses(checkpoint, blocks, candidates, out_dir, progress)
        write_json(out_dir / BUDGET_NAME, {"chosen": spend(checkpoint.spec, section, losses), "losses": losses})
    return read_formats(checkpoint.spec, section, out_dir)


def read_formats(spec: ModelSpec, section: QuantizationSection, scales_dir: Path) -> dict[str, WeightFormat]:
    """Return the formats that a search in `scales_dir` has decided on."""
    if section.bits_per_weight is None:
        return plan_formats(spec, section)
    chosen, forms = read_budget(scales_dir)["chosen"], budget_formats(section)
    return {name: form for name in quantizable(spec, section) if (form := forms[chosen[name]])}


def read_budget(scales_dir: Path) -> dict[str, Any]:
    """Return `chosen` and `losses` by layer, as they were written."""
    data: dict[str, Any] = json.loads((scales_dir / BUDGET_NAME).read_text(encoding="utf-8"))
    return data


def spend(spec: ModelSpec, section: QuantizationSection, losses: Losses) -> dict[str, str]:
    """Return the name of the format of every layer that may be quantized: least sum of losses within the budget."""
    parts = _parts(spec, section)
    options = [
        [
            Option(_cost(spec, section, part, choice), sum(losses[name].get(choice, 0.0) for name in part.names))
            for choice in part.choices
        ]
        for part in parts
    ]
    taken = allocate(options, _budget(spec, section))
    assert taken is not None, "_check has refused a budget below the cheapest formats"
    return {name: part.choices[index] for part, index in zip(parts, taken, strict=True) for name in part.names}


def _parts(spec: ModelSpec, section: QuantizationSection) -> list[_Part]:
    widths, forms = quantizable(spec, section), budget_formats(section)
    parts = []
    for layer in range(spec.num_layers):
        for members in PARTS.values():
            names = tuple(name for short in members if (name := f"model.layers.{layer}.{short}") in widths)
            fitting = tuple(
                choice
                for choice, form in forms.items()
                if names and (form is None or widths[names[0]] % form.group_width(widths[names[0]]) == 0)
            )
            if names and not fitting:
                raise QuantizationError(
                    f"no format of budget_formats fits {names[0]}, which has {widths[names[0]]} inputs; add int8 or "
                    "float16, or ignore it"
                )
            if names:
                parts.append(_Part(names, fitting))
    return parts


def _cost(spec: ModelSpec, section: QuantizationSection, part: _Part, choice: str) -> int:
    """Return the bits of a part's weights, scales and zero points."""
    form, shapes = budget_formats(section)[choice], linear_shapes(spec)
    total = 0.0
    for name in part.names:
        rows, columns = shapes[name][0]
        total += rows * columns * (16 if form is None else form.bits_per_weight(columns))
    return round(total)


def _budget(spec: ModelSpec, section: QuantizationSection) -> int:
    """Return the bits that may be spent on layers that may be quantized; the others of the decoder take 16 a weight."""
    assert section.bits_per_weight is not None
    widths = quantizable(spec, section)
    weights = {name: rows * columns for name, ((rows, columns), _) in linear_shapes(spec).items() if name != HEAD}
    kept = sum(size for name, size in weights.items() if name not in widths)
    return int(section.bits_per_weight * sum(weights.values())) - 16 * kept


def _check(spec: ModelSpec, section: QuantizationSection, parts: list[_Part]) -> None:
    least = sum(min(_cost(spec, section, part, choice) for choice in part.choices) for part in parts)
    missing = least - _budget(spec, section)
    if missing > 0:
        shapes = linear_shapes(spec)
        weights = sum(rows * columns for name, ((rows, columns), _) in shapes.items() if name != HEAD)
        assert section.bits_per_weight is not None
        raise QuantizationError(
            f"bits_per_weight {section.bits_per_weight:g} cannot be met: the smallest formats of budget_formats take "
            f"{section.bits_per_weight + missing / weights:.3f} on average"
        )
