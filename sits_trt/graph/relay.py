"""Lays the INT4 weights of a graph anew, as the kernels behind its linear nodes read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from sits_trt import contract
from sits_trt.layouts import pack_mma16, pack_mma16_groups, unpack_sits

Array = NDArray[Any]


def relay_linears(model: ir.Model) -> None:
    """Bring every SitsW4A16Linear node of a traced model from `ops.w4a16_linear` to `contract.LINEAR_INPUTS`.

    Codes and zero points become int8, the type that TensorRT takes, their bytes unchanged; the node learns its number
    of outputs, which the padded weights do not say. A weight that several nodes share is laid once.
    """
    laid: set[int] = set()
    for node in model.graph:
        if (node.domain, node.op_type) != (contract.ONNX_DOMAIN, contract.LINEAR_PLUGIN):
            continue
        shape = node.outputs[0].shape
        assert shape is not None
        node.attributes["out_features"] = ir.AttrInt64("out_features", int(shape[1]))
        lay_groups = partial(_groups, group_size=node.attributes.get_int("group_size"))
        fields = {name: node.attributes.get_int(name) for name in contract.LINEAR_FIELDS}
        present = contract.present_inputs(contract.LINEAR_INPUTS, fields)
        for declared, value in zip(present, node.inputs, strict=True):
            assert value is not None
            if declared.name in ("qweight", "scales", "zeros") and id(value) not in laid:
                laid.add(id(value))
                _replace(value, _codes if declared.name == "qweight" else lay_groups)


def _replace(value: ir.Value, lay: Callable[[Array], Array]) -> None:
    assert value.const_value is not None, f"{value.name} is not a weight"
    # Types that numpy lacks, bfloat16, pass as they are: laying moves elements and changes none.
    value.const_value = ir.tensor(lay(value.const_value.numpy()), name=value.name)
    value.dtype, value.shape = value.const_value.dtype, ir.Shape(value.const_value.shape)


def _codes(packed: Array) -> Array:
    words = pack_mma16(unpack_sits(packed))
    return words.reshape(*words.shape[:2], -1).view(np.int8)


def _groups(values: Array, group_size: int) -> Array:
    laid = pack_mma16_groups(values, group_size)
    return laid.view(np.int8) if laid.dtype == np.uint8 else laid
