"""Every specialisation of the linear kernels that a bundle holds."""

from __future__ import annotations

from itertools import product

from sits_plugins import linear_portable
from sits_plugins.kernel_spec import ONE, CudaModule, TritonKernel, per

DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
GROUP_SIZES = (32, 64, 128)
PORTABLE_TOKENS = (16, 64)
PORTABLE_ROWS = 64
"""Tiles of the portable kernel."""


def kernels(sm: int) -> list[TritonKernel | CudaModule]:
    """Return the linear kernels of a bundle for `sm`."""
    found: list[TritonKernel | CudaModule] = []
    for dtype, group, tile in product(DTYPES, GROUP_SIZES, PORTABLE_TOKENS):
        found.append(_portable(dtype, group, tile))
    return found


def portable_name(dtype: str, group_size: int, tile: int) -> str:
    """Return the name of the portable kernel for these options."""
    return f"linear_portable_{DTYPES[dtype]}_g{group_size}_t{tile}"


def _portable(dtype: str, group: int, tile: int) -> TritonKernel:
    real = f"*{DTYPES[dtype]}"
    pointers = {
        "x": real, "qweight": "*u8", "scales": "*fp16", "zeros": "*u8", "bias": real, "input_scale": "*fp16",
        "out": real,
    }  # fmt: skip
    sizes = ("tokens", "rows", "half_columns", "groups", "has_zeros", "has_bias", "has_input_scale")
    constants = {"GROUP": group, "BM": tile, "BN": PORTABLE_ROWS}
    return TritonKernel(
        name=portable_name(dtype, group, tile),
        function=linear_portable.w4a16,
        signature={**pointers, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        grid=(per(("tokens", tile)), per(("rows", PORTABLE_ROWS)), ONE),
        aligned=(*pointers, "half_columns"),
    )
