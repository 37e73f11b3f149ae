"""The recipe's bounds of accuracy: what a quantized model measured, against what it may cost. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from sits_trt.errors import BudgetError
from sits_trt.layer_report import QuantizationReport, read_report
from sits_trt.recipe.schema import QuantizationSection

_NAMED_LAYERS = 3
"""Worst layers that an error names; the report has all."""
_SMALLEST_GROUP, _LARGEST_GROUP = 32, 128
_SAME_BITS_FLOAT_ACTIVATIONS = {"w4a8": "w4a16", "w8a8-fp8": "w8a16"}


def check_budget(section: QuantizationSection, report_file: Path) -> None:
    """Raise BudgetError, naming value, bound and ways out, where a quantized model is beyond a bound of its recipe.

    `report_file` is the report.json of the quantized checkpoint; it is read only where the recipe has a bound. A value
    that is not a number is beyond every bound.
    """
    if not section.has_bound:
        return
    report = read_report(report_file)
    kl, perplexity, reference = (report.scores[key] for key in ("kl", "perplexity", "reference_perplexity"))
    increase = perplexity / reference - 1
    beyond = []
    if section.max_kl is not None and not kl <= section.max_kl:
        beyond.append(f"its KL divergence is {kl:.4g} nats a token, quantization.max_kl allows {section.max_kl:g}")
    if section.max_perplexity_increase is not None and not increase <= section.max_perplexity_increase:
        beyond.append(
            f"its perplexity is {perplexity:.4g}, {increase:.4g} of the float model's {reference:.4g} more, "
            f"quantization.max_perplexity_increase allows {section.max_perplexity_increase:g}"
        )
    if beyond:
        worst = ", ".join(f"{layer.name} ({layer.output_error:.2g})" for layer in report.layers[:_NAMED_LAYERS])
        raise BudgetError(
            f"the quantized model loses too much: {'; '.join(beyond)}; the layers with the largest relative output "
            f"error are {worst}: {_ways_out(section, report)}; all layers are in {report_file}",
            report_file,
        )


def _ways_out(section: QuantizationSection, report: QuantizationReport) -> str:
    """Name the keys that can make the model more exact, cheapest first, as far as this recipe does not use them."""
    ways = []
    if section.method == "rtn":
        ways.append("method=awq")
    ways.extend(f"{key}=true" for key in ("clip", "compensation", "scale_recover") if not getattr(section, key))
    ways.append(f"calibration.blocks above {section.calibration.blocks}")
    if section.scheme != "w8a8-fp8":
        if section.symmetric:
            ways.append("symmetric=false")
        if section.bits_per_weight is None and section.group_size != _SMALLEST_GROUP:
            ways.append(f"group_size={section.group_size // 2 if section.group_size > 0 else _LARGEST_GROUP}")
    if section.scheme == "w4a16":
        ways.append(f"bits_per_weight above {section.bits_per_weight or report.bits_per_weight:.4g}")
    if section.scheme in _SAME_BITS_FLOAT_ACTIVATIONS:
        ways.append(f"scheme={_SAME_BITS_FLOAT_ACTIVATIONS[section.scheme]}")
    if report.layers:
        ways.append(f"ignore with {report.layers[0].name}")
    return f"set quantization.{', '.join(ways[:-1])} or {ways[-1]}, or raise the bound"
