"""Enqueue the fused small kernels. Sizes of rows are multiples of 16."""

from __future__ import annotations

from typing import Any, Protocol

from sits_trt.errors import PluginError

REALS = {"float16": "fp16", "bfloat16": "bf16"}
NORM_BLOCKS = (1024, 2048, 4096, 8192, 16384)
"""Longest row of each kernel of the norm."""
SILU_BLOCK = 1024


class Launches(Protocol):
    """What `launch.BundleLauncher` offers to the rooms that enqueue kernels."""

    def launch(self, name: str, grid: tuple[int, int, int] | None, args: dict[str, Any], stream: int) -> None: ...


def norm_name(dtype: str, block: int) -> str:
    """Return the name of the norm's kernel for rows of up to `block`."""
    return f"fused_norm_{REALS[dtype]}_{block}"


def silu_name(dtype: str) -> str:
    """Return the name of the kernel of SiLU times up."""
    return f"fused_silu_{REALS[dtype]}"


def enqueue_norm(
    launcher: Launches, dtype: str, tokens: int, hidden: int, eps: float,
    residual: int, delta: int, recover: int, weight: int, out: int, stream: int,
) -> None:  # fmt: skip
    """Enqueue `fused_norm.add_norm`; addresses are byte addresses, 0 for an absent delta or recover.

    Raises PluginError for rows that are longer than every kernel's or no multiple of 16.
    """
    block = next((b for b in NORM_BLOCKS if b >= hidden), 0)
    if not block or hidden % 16:
        message = f"rows of {hidden} are not supported; use a multiple of 16 up to {NORM_BLOCKS[-1]}"
        raise PluginError(message, "kernel fused_norm")
    if tokens:
        arguments = {
            "residual": residual, "delta": delta, "recover": recover, "weight": weight, "out": out, "hidden": hidden,
            "has_delta": int(delta != 0), "has_recover": int(recover != 0), "eps": eps,
        }  # fmt: skip
        launcher.launch(norm_name(dtype, block), (tokens, 1, 1), arguments, stream)


def enqueue_silu(launcher: Launches, dtype: str, tokens: int, size: int, gate_up: int, out: int, stream: int) -> None:
    """Enqueue `fused_norm.silu_mul`. Raises PluginError for rows that are no multiple of 16."""
    if size % 16:
        raise PluginError(f"rows of {size} are not supported; use a multiple of 16", "kernel fused_silu")
    if tokens:
        grid = (-(-size // SILU_BLOCK), tokens, 1)
        launcher.launch(silu_name(dtype), grid, {"gate_up": gate_up, "out": out, "size": size}, stream)
