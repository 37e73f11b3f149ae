"""Enqueue the INT4 linear: choose its kernels by the number of tokens and launch them."""

from __future__ import annotations

from typing import Protocol

from sits_plugins.launcher import LinearCall


class Launches(Protocol):
    """What `launch.BundleLauncher` offers to the rooms that enqueue kernels."""

    def launch(self, name: str, grid: tuple[int, int, int] | None, args: object, stream: int) -> None: ...


def enqueue_linear(launcher: Launches, call: LinearCall, stream: int) -> None:
    """Enqueue out = (x * input_scale) @ dequantize(qweight).T + bias for weights in the project's own order."""
    real = {"float16": "fp16", "bfloat16": "bf16"}[call.dtype]
    tile = 16 if call.tokens <= 16 else 64
    args = (
        call.x, call.qweight, call.scales, call.zeros, call.bias, call.input_scale, call.out,
        call.tokens, call.out_features, call.in_features // 2, call.in_features // call.group_size,
        int(call.zeros != 0), int(call.bias != 0), int(call.input_scale != 0),
    )  # fmt: skip
    launcher.launch(f"linear_portable_{real}_g{call.group_size}_t{tile}", None, args, stream)
