"""Every specialisation of the fused small kernels that a bundle holds."""

from __future__ import annotations

from itertools import product

from sits_plugins import fused_norm
from sits_plugins.fused_enqueue import NORM_BLOCKS, REALS, SILU_BLOCK, norm_name, silu_name
from sits_plugins.kernel_spec import ONE, TritonKernel, per


def kernels(sm: int) -> list[TritonKernel]:
    """Return the fused kernels of a bundle: the same for every SM."""
    return [
        *(_norm(dtype, block) for dtype, block in product(REALS, NORM_BLOCKS)),
        *(_silu(dtype) for dtype in REALS),
    ]


def _norm(dtype: str, block: int) -> TritonKernel:
    real = f"*{REALS[dtype]}"
    pointers = dict.fromkeys(("residual", "delta", "recover", "weight", "out"), real)
    sizes = {"hidden": "i32", "has_delta": "i32", "has_recover": "i32", "eps": "fp32", "BLOCK": "constexpr"}
    return TritonKernel(
        name=norm_name(dtype, block),
        function=fused_norm.add_norm,
        signature={**pointers, **sizes},
        constants={"BLOCK": block},
        grid=(per("tokens"), ONE, ONE),
        aligned=(*pointers, "hidden"),
        num_warps=max(4, min(16, block // 512)),
    )


def _silu(dtype: str) -> TritonKernel:
    pointers = dict.fromkeys(("gate_up", "out"), f"*{REALS[dtype]}")
    return TritonKernel(
        name=silu_name(dtype),
        function=fused_norm.silu_mul,
        signature={**pointers, "size": "i32", "BLOCK": "constexpr"},
        constants={"BLOCK": SILU_BLOCK},
        grid=(per(("size", SILU_BLOCK)), per("tokens"), ONE),
        aligned=(*pointers, "size"),
    )
