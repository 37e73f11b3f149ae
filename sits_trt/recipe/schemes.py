"""What a recipe's quantization schemes stand for: the format of the weights, and what runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
