"""Quantization: calibration, search and application of INT4 weights, and what they cost."""

from sits_trt.quant.apply import apply_scales as apply_scales
from sits_trt.quant.search import search_scales as search_scales
