"""Drives plugin objects as TensorRT does: creator, serialized fields, shape change, enqueue on bare addresses.

Works on any device: memory is given as tensors, of which only shapes, types and addresses are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from sits_plugins.launcher import KernelLauncher
from sits_plugins.tensorrt_fields import write_fields
from sits_plugins.tensorrt_flavours import FLAVOURS
from sits_plugins.tensorrt_plugin import PluginDefinition, plugin_classes
from torch import Tensor

trt = importlib.import_module(FLAVOURS["tensorrt-rtx"].module())

TYPES = {
    torch.float16: trt.float16, torch.bfloat16: trt.bfloat16, torch.float32: trt.float32,
    torch.int8: trt.int8, torch.uint8: trt.int8, torch.float8_e4m3fn: trt.int8, torch.int32: trt.int32,
}  # fmt: skip


def describe(shape: Sequence[int], dtype: Any, layout: Any = trt.TensorFormat.LINEAR) -> Any:
    description = trt.PluginTensorDesc()
    description.dims, description.type, description.format = trt.Dims(shape), dtype, layout
    return description


def describe_dynamic(shape: Sequence[int], dtype: Any, layout: Any = trt.TensorFormat.LINEAR) -> Any:
    dynamic = trt.DynamicPluginTensorDesc()
    dynamic.desc, dynamic.max = describe(shape, dtype, layout), trt.Dims(shape)
    return dynamic


def describe_tensors(tensors: Sequence[Tensor]) -> list[Any]:
    return [describe(tuple(t.shape), TYPES[t.dtype]) for t in tensors]


def create(
    definition: PluginDefinition,
    values: Mapping[str, float],
    find_launcher: Callable[[], KernelLauncher] | None = None,
) -> Any:
    """Return the plugin as a loaded engine has it: made at build time, serialized, made again, attached."""
    _, creator_class = plugin_classes(trt, definition, *([find_launcher] if find_launcher else []))
    creator = creator_class()
    fields, _arrays = write_fields(trt, definition.fields, values)
    built = creator.create_plugin("node", fields, trt.TensorRTPhase.BUILD)
    loaded = creator.create_plugin("node", built.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    assert loaded.fields == pytest.approx(values)
    return loaded.attach_to_context(None)


def enqueue(plugin: Any, inputs: Sequence[Tensor], out: Tensor, stream: int = 0) -> None:
    """Announce the shapes and launch, with bare addresses."""
    in_desc, out_desc = describe_tensors(inputs), describe_tensors([out])
    plugin.on_shape_change(in_desc, out_desc)
    sizes = [describe_dynamic(tuple(t.shape), TYPES[t.dtype]) for t in inputs]
    workspace = torch.empty(plugin.get_workspace_size(sizes, []), dtype=torch.uint8, device=out.device)
    addresses = [t.data_ptr() for t in inputs]
    plugin.enqueue(in_desc, out_desc, addresses, [out.data_ptr()], workspace.data_ptr(), stream)
