"""The two custom operators as ONNX knows them: schemas, and the translation from torch's ops to nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnxscript
import torch
from onnx.defs import OpSchema

from sits_trt import contract

OPSET = 23
"""ONNX opset of exported graphs: the first with RMSNormalization."""

DOMAIN_VERSION = 1

_TENSOR_TYPES = [
    "tensor(float)",
    "tensor(float16)",
    "tensor(bfloat16)",
    "tensor(int8)",
    "tensor(uint8)",
    "tensor(int32)",
]
_ATTRIBUTE_TYPES = {"int": OpSchema.AttrType.INT, "float": OpSchema.AttrType.FLOAT}
_PLUGIN_ATTRIBUTES = {"plugin_version": contract.PLUGIN_VERSION, "plugin_namespace": contract.ONNX_DOMAIN}


def _schema(op_type: str, inputs: tuple[contract.PluginInput, ...], attributes: dict[str, str]) -> OpSchema:
    # One variadic input of mixed types: optional inputs that a node has not are left out, not left empty,
    # since TensorRT's parser passes a plugin no empty inputs.
    doc = "\n".join(f"{i.name}: {i.dtype} {i.doc}{' (optional)' if i.only_with else ''}" for i in inputs)
    required = sum(not i.only_with for i in inputs)
    variadic = OpSchema.FormalParameter(
        "inputs", "Any", doc, param_option=OpSchema.FormalParameterOption.Variadic, is_homogeneous=False,
        min_arity=required,
    )  # fmt: skip
    return OpSchema(
        op_type,
        contract.ONNX_DOMAIN,
        DOMAIN_VERSION,
        doc=doc,
        inputs=[variadic],
        outputs=[OpSchema.FormalParameter("output", "Activation")],
        type_constraints=[("Any", _TENSOR_TYPES, ""), ("Activation", _TENSOR_TYPES[:3], "")],
        attributes=[OpSchema.Attribute(name, _ATTRIBUTE_TYPES[kind]) for name, kind in attributes.items()]
        + [OpSchema.Attribute(name, OpSchema.AttrType.STRING) for name in _PLUGIN_ATTRIBUTES],
    )


def register_schemas() -> None:
    """Tell ONNX about both operators, once a process. The exporter looks them up."""
    for op_type, inputs, attributes in (
        (contract.ATTENTION_PLUGIN, contract.ATTENTION_INPUTS, contract.ATTENTION_FIELDS),
        (contract.LINEAR_PLUGIN, contract.LINEAR_INPUTS, contract.LINEAR_FIELDS),
    ):
        if not onnx.defs.has(op_type, contract.ONNX_DOMAIN):
            onnx.defs.register_schema(_schema(op_type, inputs, attributes))


def translations(head_dim: int, tile_tokens: int) -> dict[Any, Callable[..., Any]]:
    """Return the exporter's translation table: torch op to the function that writes its node."""
    opset = onnxscript.values.Opset(contract.ONNX_DOMAIN, DOMAIN_VERSION)

    def attention(
        qkv: Any, kv_pool: Any, tile_table: Any, context_lens: Any, query_starts: Any, rope_table: Any,
        layer: int, num_heads: int, num_kv_heads: int, window: int, scale: float,
    ) -> Any:  # fmt: skip
        return getattr(opset, contract.ATTENTION_PLUGIN)(
            qkv, kv_pool, tile_table, context_lens, query_starts, rope_table,
            layer=layer, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, tile_tokens=tile_tokens,
            window=window, scale=scale, kv_format=0, **_PLUGIN_ATTRIBUTES,
        )  # fmt: skip

    def coded_attention(
        qkv: Any, kv_pool: Any, kv_scales: Any, tile_table: Any, context_lens: Any, query_starts: Any, rope_table: Any,
        layer: int, num_heads: int, num_kv_heads: int, window: int, scale: float, kind: str,
    ) -> Any:  # fmt: skip
        return getattr(opset, contract.ATTENTION_PLUGIN)(
            qkv, kv_pool, tile_table, context_lens, query_starts, rope_table, kv_scales,
            layer=layer, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, tile_tokens=tile_tokens,
            window=window, scale=scale, kv_format=contract.kv_format(kind), **_PLUGIN_ATTRIBUTES,
        )  # fmt: skip

    def linear(
        x: Any, qweight: Any, scales: Any, zeros: Any, bias: Any, input_scale: Any, group_size: int
    ) -> Any:  # fmt: skip
        optional = {"zeros": zeros, "bias": bias, "input_scale": input_scale}
        present = [value for value in optional.values() if value is not None]
        flags = {f"has_{name}": int(value is not None) for name, value in optional.items()}
        return getattr(opset, contract.LINEAR_PLUGIN)(
            x, qweight, scales, *present, group_size=group_size, **flags, **_PLUGIN_ATTRIBUTES
        )  # `relay_linears` makes of its weights what the plugin takes

    return {
        torch.ops.sits.tiled_attention_functional.default: attention,
        torch.ops.sits.quantized_tiled_attention_functional.default: coded_attention,
        torch.ops.sits.w4a16_linear.default: linear,
    }
