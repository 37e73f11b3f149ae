"""What each op computes: torch custom ops whose bodies are the exact references."""

from sits_trt.ops.attention import tiled_attention as tiled_attention
from sits_trt.ops.attention import tiled_attention_functional as tiled_attention_functional
from sits_trt.ops.kv_pool import allocate_pool as allocate_pool
from sits_trt.ops.kv_quant import quantized_tiled_attention as quantized_tiled_attention
from sits_trt.ops.kv_quant import quantized_tiled_attention_functional as quantized_tiled_attention_functional
from sits_trt.ops.linear import dequantize as dequantize
from sits_trt.ops.linear import w4a16_linear as w4a16_linear
from sits_trt.ops.quantized_linear import decode_weight as decode_weight
from sits_trt.ops.rope import rope_table as rope_table
from sits_trt.ops.scale_recover import scale_recover as scale_recover
