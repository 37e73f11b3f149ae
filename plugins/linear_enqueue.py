"""Enqueue the INT4 linear: choose its kernels by the number of tokens and launch them."""

from __future__ import annotations

from typing import Any, Protocol

from sits_plugins.kernel_spec import REALS
from sits_plugins.launcher import LinearCall
from sits_plugins.linear_plan import DENSE_ROWS, DenseShape, Shape, Workspace, choose_shape, flags_bytes, workspace
from sits_plugins.linear_shapes import StreamShape, ceil_div
from sits_plugins.tensor_map import MatrixMap


class Launches(Protocol):
    """What `launch.BundleLauncher` offers to the rooms that enqueue kernels."""

    sm: int
    multiprocessors: int

    def launch(self, name: str, grid: tuple[int, int, int] | None, args: Any, stream: int) -> None: ...

    def zero(self, address: int, size_bytes: int, stream: int) -> None: ...


def format_name(dtype: str, group_size: int, zeros: bool) -> str:
    """Return the part of a kernel's name that says which weights it takes."""
    return f"{REALS[dtype]}_g{group_size}_{'asym' if zeros else 'sym'}"


def enqueue_linear(launcher: Launches, call: LinearCall, stream: int) -> None:
    """Enqueue out = (x * input_scale) @ dequantize(qweight).T + bias.

    `call.workspace` must hold `linear_plan.workspace_bound` bytes.
    """
    size = (call.tokens, call.out_features, call.in_features)
    shape = choose_shape(*size, launcher.sm, launcher.multiprocessors)
    enqueue_shape(
        launcher, call, shape, workspace(shape, *size, launcher.multiprocessors, call.input_scale != 0), stream
    )


def enqueue_shape(launcher: Launches, call: LinearCall, shape: Shape, scratch: Workspace, stream: int) -> None:
    """Enqueue the kernels of one shape; `scratch` says where in the workspace they find what."""
    name = _format_of(call)
    size = (call.tokens, call.out_features, call.in_features)
    weight = (call.qweight, call.scales, call.zeros)
    if isinstance(shape, StreamShape):
        _enqueue_stream(launcher, call, f"linear_stream_{name}_{shape.suffix}", stream)
    elif isinstance(shape, DenseShape):
        _enqueue_dense(launcher, call, stream)
    else:
        x = _scaled(launcher, call, stream)
        blocks = shape.blocks(*size, launcher.multiprocessors)
        sums, flags = call.workspace + scratch.sums, call.flags
        if shape.share_tiles and not flags:
            flags = call.workspace + scratch.flags
            launcher.zero(flags, flags_bytes(blocks), stream)
        args = (
            MatrixMap(x, call.tokens, call.in_features, shape.tokens), *weight, call.bias, call.out, sums, flags,
            *size, int(shape.share_tiles), blocks,
        )  # fmt: skip
        launcher.launch(f"linear_hopper_{name}_{shape.suffix}", None, args, stream)


def enqueue_gated(launcher: Launches, call: LinearCall, shape: StreamShape, stream: int) -> None:
    """Enqueue out[tokens, out_features / 2] = silu(gate) * up, the halves of what `enqueue_linear` computes.

    For a shape that `linear_plan.choose_gated` returns; needs no workspace.
    """
    _enqueue_stream(launcher, call, f"linear_gated_{_format_of(call)}_{shape.suffix}", stream)


def _format_of(call: LinearCall) -> str:
    return format_name(call.dtype, call.group_size, call.zeros != 0)


def _scaled(launcher: Launches, call: LinearCall, stream: int) -> int:
    """Return where the activations lie that the weights multiply, having enqueued their scaling where there is one."""
    if not call.input_scale:
        return call.x
    args = (call.x, call.input_scale, call.workspace, call.tokens, call.in_features)
    launcher.launch(f"linear_scale_{REALS[call.dtype]}", None, args, stream)
    return call.workspace


def enqueue_dequantize(launcher: Launches, call: LinearCall, out: int, first_row: int, rows: int, stream: int) -> None:
    """Enqueue the dequantizing of `rows` rows from `first_row`, a multiple of 16, to `out` [rows, in_features]."""
    name = f"linear_dequantize_{_format_of(call)}"
    pieces = ceil_div(call.in_features, 64)
    groups = 2 * pieces if call.group_size == 32 else call.in_features // call.group_size
    qweight = call.qweight + first_row * pieces * 32
    scales = call.scales + first_row * groups * 2
    zeros = call.zeros + first_row * groups if call.zeros else 0
    launcher.launch(name, None, (qweight, scales, zeros, call.input_scale, out, rows, call.in_features), stream)


def _enqueue_stream(launcher: Launches, call: LinearCall, name: str, stream: int) -> None:
    operands = (call.x, call.qweight, call.scales, call.zeros, call.bias, call.input_scale, call.out)
    launcher.launch(name, None, (*operands, call.tokens, call.out_features, call.in_features), stream)


def _enqueue_dense(launcher: Launches, call: LinearCall, stream: int) -> None:
    """Dequantize DENSE_ROWS rows at a time to the workspace and multiply them."""
    for first in range(0, call.out_features, DENSE_ROWS):
        rows = min(DENSE_ROWS, call.out_features - first)
        enqueue_dequantize(launcher, call, call.workspace, first, rows, stream)
        bias = call.bias + 2 * first if call.bias else 0
        args = (
            call.x, call.workspace, bias, call.out + 2 * first, call.tokens, rows, call.in_features,
            call.out_features, int(call.bias != 0),
        )  # fmt: skip
        launcher.launch(f"linear_dense_{REALS[call.dtype]}", None, args, stream)
