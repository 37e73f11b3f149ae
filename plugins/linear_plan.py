"""Which kernels an INT4 linear takes for a number of tokens, and the workspace that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sits_plugins.linear_shapes import (
    BALANCED,
    COLUMNS,
    HOPPER,
    HOPPER_ROWS,
    STREAM,
    BalancedShape,
    HopperShape,
    StreamShape,
    ceil_div,
)

DENSE_ROWS = 4096
"""Rows that are dequantized at a time for a dense product: 32 MiB at 4096 columns, which stay in a large L2."""

LIBRARY_TOKENS = 2048
"""From here on a vendor library's dense product wins: long launches heat the GPU, and its products need less power."""

STREAM_TOKENS = 128
"""Most tokens of the streaming kernel where the Hopper kernels cannot run."""

_MOST_MULTIPROCESSORS = 160
"""More than any Hopper GPU has: bounds the workspace when a build does not know the GPU yet."""

_ALIGNMENT = 256


@dataclass(frozen=True)
class DenseShape:
    """Dequantize to 16 bits, then a dense product."""


Shape = StreamShape | HopperShape | BalancedShape | DenseShape


@dataclass(frozen=True)
class Workspace:
    """Byte offsets of a launch's scratch memory, and its size. `packed` is at offset 0."""

    partial: int
    ready: int
    total: int


@lru_cache(maxsize=4096)
def choose_shape(
    tokens: int, rows: int, columns: int, sm: int, multiprocessors: int, library_gemm: bool = False
) -> Shape:
    """Return the cheapest shape for out[tokens, rows] = x[tokens, columns] @ weight[rows, columns].T.

    `library_gemm` says that the dense product would be a vendor library's; without it, only GPUs that the Hopper
    kernels do not run on take the dense way, and for more than STREAM_TOKENS tokens.
    """
    size = (tokens, rows, columns, multiprocessors)
    candidates: list[Shape] = []
    if sm == 90:
        candidates += [*(s for s in STREAM if tokens <= 64), *HOPPER, *BALANCED]
    elif tokens > STREAM_TOKENS:
        return DenseShape()
    else:
        candidates += STREAM
    best = min(candidates, key=lambda shape: shape_us(shape, *size))
    if library_gemm and (tokens >= LIBRARY_TOKENS or dense_us(tokens, rows, columns) < shape_us(best, *size)):
        return DenseShape()
    return best


def shape_us(shape: Shape, tokens: int, rows: int, columns: int, multiprocessors: int) -> float:
    """Return the modelled time of a shape in microseconds, on an H200's multiprocessors."""
    if isinstance(shape, DenseShape):
        return dense_us(tokens, rows, columns)
    return shape.total_us(tokens, rows, columns, multiprocessors)


def dense_us(tokens: int, rows: int, columns: int) -> float:
    """Return the modelled time of dequantizing (2.5 bytes a weight at 3.8 TB/s) and a dense product at 740 TFLOP/s."""
    return 6 + rows * columns * 2.5 / 3.8e6 + 2 * tokens * rows * columns / 740e6


def workspace(shape: Shape, tokens: int, rows: int, columns: int, multiprocessors: int) -> Workspace:
    """Return the scratch memory of one launch."""
    if isinstance(shape, StreamShape):
        return Workspace(0, 0, 0)
    if isinstance(shape, DenseShape):
        return Workspace(0, 0, min(rows, DENSE_ROWS) * columns * 2)
    packed = ceil_div(tokens, shape.tokens) * shape.tokens * ceil_div(columns, COLUMNS) * COLUMNS * 2
    if isinstance(shape, HopperShape):
        return Workspace(0, 0, packed)
    partial = ceil_div(packed, _ALIGNMENT) * _ALIGNMENT
    ready = partial + multiprocessors * shape.tokens * HOPPER_ROWS * 4
    return Workspace(partial, ready, ready + multiprocessors * 4)


def workspace_bound(tokens: int, rows: int, columns: int) -> int:
    """Return a size that is enough for up to `tokens` tokens, on any GPU and whatever is chosen."""
    shapes: tuple[Shape, ...] = (*HOPPER, *BALANCED, DenseShape())
    return max(workspace(shape, tokens, rows, columns, _MOST_MULTIPROCESSORS).total for shape in shapes)
