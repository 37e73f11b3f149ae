"""The layer-by-layer error of a quantization, as its report.json has it. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sits_trt.errors import SitsError


@dataclass(frozen=True)
class LayerError:
    """One quantized linear layer on the calibration text.

    `output_error` is its squared output error over its squared output; `drift` the relative squared difference of
    the two models' residual streams after decoder layer `layer`, to which the linear belongs.
    """

    name: str
    layer: int
    output_error: float
    drift: float


@dataclass(frozen=True)
class QuantizationReport:
    """What a build's report.json says. `scores` holds `models.scoring.Agreement` as a dict; layers come worst first."""

    bits_per_weight: float
    scores: dict[str, float]
    layers: tuple[LayerError, ...]


def read_report(path: Path) -> QuantizationReport:
    """Read a quantized checkpoint's report.json. Raises SitsError when it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        scores = dict(data["evaluation"])
        needed = [float(scores[key]) for key in ("kl", "perplexity", "reference_perplexity")]
        if needed[-1] <= 0:
            raise ValueError(f"a perplexity of {needed[-1]:g}")
        return QuantizationReport(float(data["bits_per_weight"]), scores, _worst_first(data["search"]["layers"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise SitsError(
            f"{path} is no report of a quantization ({what}); delete its directory and build again"
        ) from None


def _worst_first(layers: list[dict[str, Any]]) -> tuple[LayerError, ...]:
    errors = [
        LayerError(name, index, float(error), float(layer["drift"]))
        for index, layer in enumerate(layers)
        for name, error in layer["errors"].items()
    ]
    return tuple(sorted(errors, key=lambda found: -found.output_error))
