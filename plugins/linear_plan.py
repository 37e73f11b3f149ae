"""Which kernels an INT4 linear takes for a number of tokens, and the workspace that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sits_plugins.linear_shapes import GATED, HOPPER, STREAM, HopperShape, StreamShape, ceil_div

DENSE_ROWS = 4096
"""Rows that are dequantized at a time for a dense product: 32 MiB at 4096 columns, which stay in a large L2."""

LIBRARY_TOKENS = 4096
"""From here on a vendor library's dense product wins on SM 90: long work heats the GPU, and that takes less power."""

STREAM_TOKENS = 128
"""Most tokens of the streaming kernel where the Hopper kernels cannot run."""

GATED_TOKENS = 64
"""Most tokens of the linear with SiLU in it."""

SILU_US = 1.0
"""What a SiLU of its own adds at least to a step on an H200: measured with one token of 14336."""

_MOST_MULTIPROCESSORS = 160
"""More than any Hopper GPU has: bounds the workspace when a build does not know the GPU yet."""

_ALIGNMENT = 256


@dataclass(frozen=True)
class DenseShape:
    """Dequantize to 16 bits, then a dense product."""


Shape = StreamShape | HopperShape | DenseShape


@dataclass(frozen=True)
class Workspace:
    """Byte offsets of a launch's scratch memory, and its size. Scaled activations are at offset 0."""

    sums: int
    flags: int
    total: int


@lru_cache(maxsize=4096)
def choose_shape(
    tokens: int, rows: int, columns: int, sm: int, multiprocessors: int, library_gemm: bool = False
) -> Shape:
    """Return the cheapest shape for out[tokens, rows] = x[tokens, columns] @ weight[rows, columns].T.

    GPUs that the Hopper kernels do not run on take the dense way for more than STREAM_TOKENS tokens, others only where
    `library_gemm` says that its product would be a vendor library's, from LIBRARY_TOKENS tokens on.
    """
    if (sm != 90 and tokens > STREAM_TOKENS) or (library_gemm and tokens >= LIBRARY_TOKENS):
        return DenseShape()
    streams = STREAM if sm != 90 or tokens <= 64 else ()
    candidates: list[StreamShape | HopperShape] = [*streams, *(HOPPER if sm == 90 else ())]
    return min(candidates, key=lambda shape: shape.total_us(tokens, rows, columns, multiprocessors))


@lru_cache(maxsize=4096)
def choose_gated(tokens: int, rows: int, columns: int, sm: int, multiprocessors: int) -> StreamShape | None:
    """Return the cheapest shape that stores silu(gate) * up, of `rows` gate and up rows together.

    None where `choose_shape` and a SiLU of its own are faster, or `rows` are no multiple of 32.
    """
    if rows % 32 or tokens > GATED_TOKENS:
        return None
    size = (tokens, rows, columns, multiprocessors)
    best = min(GATED, key=lambda shape: shape.total_us(*size))
    separate = choose_shape(tokens, rows, columns, sm, multiprocessors)
    assert not isinstance(separate, DenseShape), "GATED_TOKENS are fewer than STREAM_TOKENS"
    return best if best.total_us(*size) < separate.total_us(*size) + SILU_US else None


def workspace(
    shape: Shape, tokens: int, rows: int, columns: int, multiprocessors: int, has_input_scale: bool
) -> Workspace:
    """Return the scratch memory of one launch, whether or not the layer has flags of its own."""
    if isinstance(shape, StreamShape):
        return Workspace(0, 0, 0)
    if isinstance(shape, DenseShape):
        return Workspace(0, 0, min(rows, DENSE_ROWS) * columns * 2)
    blocks = shape.blocks(tokens, rows, columns, multiprocessors)
    sums = ceil_div(tokens * columns * 2, _ALIGNMENT) * _ALIGNMENT if has_input_scale else 0
    flags = sums + shape.sums_bytes(blocks)
    return Workspace(sums, flags, flags + (flags_bytes(blocks) if shape.share_tiles else 0))


def flags_bytes(blocks: int = _MOST_MULTIPROCESSORS) -> int:
    """Return the size of the int32 flags by which blocks that share tiles find each other's sums."""
    return blocks * 4


def workspace_bound(tokens: int, rows: int, columns: int, has_input_scale: bool) -> int:
    """Return a size that is enough for up to `tokens` tokens, on any GPU and whatever is chosen."""
    shapes: tuple[Shape, ...] = (*HOPPER, DenseShape())
    return max(workspace(s, tokens, rows, columns, _MOST_MULTIPROCESSORS, has_input_scale).total for s in shapes)
