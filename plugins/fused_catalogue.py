"""Every specialisation of the fused small kernels that a bundle holds."""

from __future__ import annotations

from itertools import product
from typing import Any

from sits_plugins import fused_norm, fused_sampling
from sits_plugins.fused_enqueue import (
    LOGITS,
    NORM_BLOCKS,
    SAMPLING_BLOCK,
    SAMPLING_BLOCKS,
    SAMPLING_CAPACITY,
    SAMPLING_GROUP,
    SILU_BLOCK,
    norm_name,
    sampling_names,
    silu_name,
)
from sits_plugins.kernel_spec import ONE, REALS, Axis, TritonKernel, per


def kernels(sm: int) -> list[TritonKernel]:
    """Return the fused kernels of a bundle; from SM 9.0 on they overlap with their neighbours."""
    dependent = sm >= 90
    return [
        *(_norm(dtype, block, dependent) for dtype, block in product(REALS, NORM_BLOCKS)),
        *(_silu(dtype, dependent) for dtype in REALS),
        *(kernel for dtype in LOGITS for kernel in _sampling(dtype)),
    ]


def _norm(dtype: str, block: int, dependent: bool) -> TritonKernel:
    real = f"*{REALS[dtype]}"
    pointers = dict.fromkeys(("residual", "delta", "recover", "weight", "out"), real)
    sizes = {"hidden": "i32", "has_delta": "i32", "has_recover": "i32", "eps": "fp32"}
    constants = {"BLOCK": block, "DEPENDENT": dependent}
    return TritonKernel(
        name=norm_name(dtype, block),
        function=fused_norm.add_norm,
        signature={**pointers, **sizes, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        grid=(per("tokens"), ONE, ONE),
        aligned=(*pointers, "hidden"),
        num_warps=max(4, min(16, block // 512)),
        dependent=dependent,
    )


def _silu(dtype: str, dependent: bool) -> TritonKernel:
    pointers = dict.fromkeys(("gate_up", "out"), f"*{REALS[dtype]}")
    constants = {"BLOCK": SILU_BLOCK, "DEPENDENT": dependent}
    return TritonKernel(
        name=silu_name(dtype),
        function=fused_norm.silu_mul,
        signature={**pointers, "size": "i32", **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        grid=(per(("size", SILU_BLOCK), "tokens"), ONE, ONE),
        aligned=(*pointers, "size"),
        dependent=dependent,
    )


_SAMPLING = {
    "logits": "", "settings": "*fp64", "maxima": "*fp32", "best": "*fp32", "best_ids": "*i32", "masses": "*i64",
    "collected": "*i32", "listed_weights": "*fp32", "listed_ids": "*i32", "tokens": "*i64",
    "vocab": "i32", "groups": "i32", "blocks": "i32",
    "BLOCK": "constexpr", "GROUP": "constexpr", "MAX_BLOCKS": "constexpr", "MAX_GROUPS": "constexpr",
    "CAPACITY": "constexpr",
}  # fmt: skip
"""Every argument of the sampling's kernels."""

_SAMPLING_SIZES = {
    "BLOCK": SAMPLING_BLOCK,
    "GROUP": SAMPLING_GROUP,
    "MAX_BLOCKS": SAMPLING_BLOCKS,
    "MAX_GROUPS": SAMPLING_BLOCKS * SAMPLING_BLOCK // SAMPLING_GROUP,
    "CAPACITY": SAMPLING_CAPACITY,
}


def _sampling(dtype: str) -> list[TritonKernel]:
    """Return the kernels for one type of logits: those that read whole rows also for rows that are not aligned."""
    found = []
    for vocab in (16, 1):
        maxima, weights, tokens = sampling_names(dtype, vocab)
        aligned = ("logits", "vocab", "groups") if vocab == 16 else ("groups",)
        grid = (per(("vocab", SAMPLING_BLOCK)), per("rows"), ONE)
        found.append(_sampling_kernel(maxima, fused_sampling.row_maxima, dtype, grid, aligned, 4))
        found.append(_sampling_kernel(weights, fused_sampling.weigh_rows, dtype, grid, aligned, 8))
    found.append(_sampling_kernel(tokens, fused_sampling.pick_tokens, dtype, (per("rows"), ONE, ONE), (), 16))
    return found


def _sampling_kernel(
    name: str, function: Any, dtype: str, grid: tuple[Axis, Axis, Axis], aligned: tuple[str, ...], num_warps: int
) -> TritonKernel:  # fmt: skip
    signature = {argument: _SAMPLING[argument] for argument in function.arg_names}
    signature["logits"] = f"*{LOGITS[dtype]}"
    return TritonKernel(
        name=name,
        function=function,
        signature=signature,
        constants={size: value for size, value in _SAMPLING_SIZES.items() if size in signature},
        grid=grid,
        aligned=aligned,
        num_warps=num_warps,
    )
