"""What a recipe's quantization schemes stand for: the format of the weights, and what runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import PER_CHANNEL, WeightFormat


@dataclass(frozen=True)
class Scheme:
    """`title` is what a table calls it. `bits`, `codes` and `activations` are those of its WeightFormat."""

    title: str
    bits: int
    codes: str = "int"
    activations: str = "float16"


SCHEMES: Mapping[str, Scheme] = {
    "w4a16": Scheme("INT4", 4),
    "w8a16": Scheme("INT8", 8),
    # As TensorRT-LLM's W4A8: INT4 codes are exact in e4m3, and Ada and Hopper multiply e4m3 only.
    "w4a8": Scheme("INT4, FP8 activations", 4, activations="float8_e4m3"),
    "w8a8-fp8": Scheme("FP8", 8, codes="float8_e4m3", activations="float8_e4m3"),
}


def weight_format(section: QuantizationSection) -> WeightFormat:
    """Return the format of the weights that `section` quantizes; its scheme must not be 'none'."""
    scheme = SCHEMES[section.scheme]
    if scheme.codes == "float8_e4m3":  # as llm-compressor's FP8_DYNAMIC: a scale per output channel, no zero points
        return WeightFormat(scheme.bits, PER_CHANNEL, True, scheme.codes, scheme.activations)
    return WeightFormat(scheme.bits, section.group_size, section.symmetric, scheme.codes, scheme.activations)


BUDGET_FORMATS: Mapping[str, WeightFormat | None] = {
    "int4-g128": WeightFormat(4, 128),
    "int4-g64": WeightFormat(4, 64),
    "int4-g32": WeightFormat(4, 32),
    "int8": WeightFormat(8, PER_CHANNEL),
    "float16": None,
}
"""What the names of `quantization.budget_formats` stand for, symmetric; None is the weight as it is."""


def budget_formats(section: QuantizationSection) -> dict[str, WeightFormat | None]:
    """Return the formats that `section` may choose from, by name, in the order of BUDGET_FORMATS."""
    wanted = {name: form for name, form in BUDGET_FORMATS.items() if name in section.budget_formats}
    return {name: form and replace(form, symmetric=section.symmetric) for name, form in wanted.items()}


def possible_formats(section: QuantizationSection) -> list[WeightFormat]:
    """Return the formats that quantized weights of a build may have; none for the scheme 'none'."""
    if section.scheme == "none":
        return []
    if section.bits_per_weight is None:
        return [weight_format(section)]
    return [form for form in budget_formats(section).values() if form]
