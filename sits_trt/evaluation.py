"""What a build costs in accuracy: its scores beside the float model, its size, and the errors of its layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sits_trt.artifacts import QUANTIZATION_REPORT, BuildDirectory
from sits_trt.checkpoint import open_checkpoint
from sits_trt.layer_report import LayerError, read_report
from sits_trt.progress import Progress
from sits_trt.quant.apply import storage_costs
from sits_trt.recipe.schema import AccuracySection
from sits_trt.sweep.accuracy import measure_accuracy
from sits_trt.sweep.builds import describe_builds
from sits_trt.sweep.result import Accuracy, BuildInfo


@dataclass(frozen=True)
class Evaluation:
    """A build's accuracy on the text of `section`.

    `bits_per_weight` is over the decoder layers' linears, scales included; `layers` has the quantized layers, worst
    first, by their errors on the calibration text, and is empty where this program quantized none.
    """

    info: BuildInfo
    section: AccuracySection
    accuracy: Accuracy
    bits_per_weight: float
    layers: tuple[LayerError, ...]

    @property
    def _perplexity_increase(self) -> float | None:
        unknown = self.info.source_quantized and self.accuracy.reference_perplexity is None
        return None if unknown else self.accuracy.perplexity_increase

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
            "source_quantized": info.source_quantized,
            "accuracy": asdict(self.accuracy) | {"perplexity_increase": self._perplexity_increase},
            "layers": [asdict(layer) for layer in self.layers],
        }


def evaluate_build(build: Path, section: AccuracySection, progress: Progress) -> Evaluation:
    """Measure a build on the text of `section`, or return what an evaluation or a sweep of the same has found before.

    Needs the build's checkpoints, not its engine. Raises SitsError where there is no build, or a checkpoint, report
    or text cannot be read.
    """
    (info,) = describe_builds([build])
    layout = BuildDirectory(Path(info.directory))
    report = read_report(layout.quantized / QUANTIZATION_REPORT) if info.quantized else None
    accuracy = measure_accuracy(info, section, progress)
    if report:
        return Evaluation(info, section, accuracy, report.bits_per_weight, report.layers)
    # Its source may have been quantized by another program.
    source = open_checkpoint(layout.checkpoint)
    costs = storage_costs(source.spec, source.formats)
    return Evaluation(info, section, accuracy, costs["bits_per_weight"], ())
