"""SitsW4A16Linear for TensorRT: INT4 weights with a scale per group, 16-bit activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sits_plugins.launcher import KernelLauncher, LinearCall, linear_workspace_bytes
from sits_plugins.tensorrt_plugin import Fields, Operands, PluginDefinition, expect

from sits_trt import contract

_NAME = contract.LINEAR_PLUGIN


def _output_shape(build: Any, fields: Fields, inputs: Mapping[str, Any]) -> list[Any]:
    return [inputs["x"][0], inputs["qweight"][0]]


def _check(fields: Fields, operands: Operands) -> None:
    out_features, half = operands["qweight"].shape
    in_features = 2 * half
    groups = (out_features, in_features // fields["group_size"])
    expect(_NAME, "width of x", in_features, operands["x"].shape[1])
    expect(_NAME, "shape of scales", groups, operands["scales"].shape)
    for name, shape in (("zeros", groups), ("bias", (out_features,)), ("input_scale", (in_features,))):
        if name in operands:
            expect(_NAME, f"shape of {name}", shape, operands[name].shape)


def _workspace_bytes(fields: Fields, largest: Operands) -> int:
    (tokens, in_features), (out_features, _) = largest["x"].shape, largest["qweight"].shape
    return linear_workspace_bytes(tokens, in_features, out_features)


def _launch(launcher: KernelLauncher, fields: Fields, operands: Operands, workspace: int, stream: int) -> None:
    x, qweight = operands["x"], operands["qweight"]
    names = [*(i.name for i in contract.LINEAR_INPUTS), "out"]
    call = LinearCall(
        **{name: operands[name].address if name in operands else 0 for name in names},
        workspace=workspace,
        dtype=x.dtype,
        tokens=x.shape[0],
        in_features=x.shape[1],
        out_features=qweight.shape[0],
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
