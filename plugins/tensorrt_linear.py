"""SitsW4A16Linear for TensorRT: INT4 weights with a scale per group, 16-bit activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sits_plugins.launcher import KernelLauncher, LinearCall
from sits_plugins.linear_plan import workspace_bound
from sits_plugins.linear_shapes import ceil_div
from sits_plugins.tensorrt_plugin import Fields, Operands, PluginDefinition, expect

from sits_trt import contract
from sits_trt.layouts import MMA16_COLUMNS, MMA16_ROWS

_NAME = contract.LINEAR_PLUGIN


def _output_shape(build: Any, fields: Fields, inputs: Mapping[str, Any]) -> list[Any]:
    return [inputs["x"][0], build.constant(fields["out_features"])]


def _check(fields: Fields, operands: Operands) -> None:
    out_features, in_features = fields["out_features"], operands["x"].shape[1]
    blocks, pieces = ceil_div(out_features, MMA16_ROWS), ceil_div(in_features, MMA16_COLUMNS)
    expect(_NAME, "shape of qweight", (blocks, pieces, 512), operands["qweight"].shape)
    per_piece = max(1, MMA16_COLUMNS // fields["group_size"])
    groups = (blocks, ceil_div(in_features // fields["group_size"], per_piece) * per_piece, 8, 2)
    expect(_NAME, "shape of scales", groups, operands["scales"].shape)
    for name, shape in (("zeros", groups), ("bias", (out_features,)), ("input_scale", (in_features,))):
        if name in operands:
            expect(_NAME, f"shape of {name}", shape, operands[name].shape)


def _workspace_bytes(fields: Fields, largest: Operands) -> int:
    tokens, in_features = largest["x"].shape
    return workspace_bound(tokens, fields["out_features"], in_features, bool(fields["has_input_scale"]))


def _launch(launcher: KernelLauncher, fields: Fields, operands: Operands, workspace: int, stream: int) -> None:
    x = operands["x"]
    names = [*(i.name for i in contract.LINEAR_INPUTS), "out"]
    call = LinearCall(
        **{name: operands[name].address if name in operands else 0 for name in names},
        workspace=workspace,
        dtype=x.dtype,
        tokens=x.shape[0],
        in_features=x.shape[1],
        out_features=fields["out_features"],
        group_size=fields["group_size"],
    )
    launcher.w4a16_linear(call, stream)


LINEAR = PluginDefinition(
    name=_NAME,
    inputs=contract.LINEAR_INPUTS,
    fields=contract.LINEAR_FIELDS,
    output_shape=_output_shape,
    check=_check,
    workspace_bytes=_workspace_bytes,
    launch=_launch,
)
