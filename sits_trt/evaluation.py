"""What a build costs in accuracy: its scores beside the float model, its size, and the errors of its layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sits_trt.artifacts import QUANTIZATION_REPORT, BuildDirectory
from sits_trt.layer_report import LayerError, read_report
from sits_trt.recipe.schema import AccuracySection
from sits_trt.sweep.accuracy import Progress, measure_accuracy
from sits_trt.sweep.builds import describe_builds
from sits_trt.sweep.result import Accuracy, BuildInfo

_FLOAT_BITS = 16.0


@dataclass(frozen=True)
class Evaluation:
    """A build's accuracy on the text of `section`.

    `bits_per_weight` is over the decoder layers' linears, scales included; `layers` has the quantized layers, worst
    first, by their errors on the calibration text, and is empty for a build without quantized weights.
    """

    info: BuildInfo
    section: AccuracySection
    accuracy: Accuracy
    bits_per_weight: float
    layers: tuple[LayerError, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for `sits-trt eval --json`."""
        info = self.info
        return {
            "build": info.directory,
            "name": info.name,
            "model": info.model,
            "weights": info.weights,
            "kv_dtype": info.kv_dtype,
            "settings": self.section.model_dump(mode="json"),
            "bits_per_weight": self.bits_per_weight,
            "accuracy": asdict(self.accuracy) | {"perplexity_increase": self.accuracy.perplexity_increase},
            "layers": [asdict(layer) for layer in self.layers],
        }


def evaluate_build(build: Path, section: AccuracySection, progress: Progress) -> Evaluation:
    """Measure a build on the text of `section`, or return what an evaluation or a sweep of the same has found before.

    Needs the build's checkpoints, not its engine. Raises SitsError where there is no build, or a checkpoint, report
    or text cannot be read.
    """
    (info,) = describe_builds([build])
    quantized = BuildDirectory(Path(info.directory)).quantized
    report = read_report(quantized / QUANTIZATION_REPORT) if info.quantized else None
    bits, layers = (report.bits_per_weight, report.layers) if report else (_FLOAT_BITS, ())
    return Evaluation(info, section, measure_accuracy(info, section, progress), bits, layers)
