"""Tile shapes of the INT4 linear's kernels, with what each costs.

The costs were fitted on one H200, over 135 pairs of a token count and a matrix of Llama-3-8B or 8192 x 8192: the
shape that is cheapest by this model took on average 1 % longer than the fastest measured one, 11 % at most. A block of
a shape needs max(alone_us, shared_us * blocks on its multiprocessor) for 64 columns, a launch needs fixed_us.
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = 64
"""Columns of one piece of the mma16 layout."""

HOPPER_ROWS = 128
"""Rows of one tile of the Hopper kernels."""


def ceil_div(size: int, per: int) -> int:
    return -(-size // per)


@dataclass(frozen=True)
class Cost:
    """Microseconds of a launch, and of 64 columns in a block that is alone on its multiprocessor or shares it."""

    fixed_us: float
    alone_us: float
    shared_us: float = 0.0

    def total_us(self, pieces: int, blocks: int, multiprocessors: int, resident: int) -> float:
        """Return the time of `blocks` blocks of `pieces` pieces, of which a multiprocessor holds `resident` at once."""
        rounds, rest = divmod(ceil_div(blocks, multiprocessors), resident)
        piece_us = rounds * max(self.alone_us, self.shared_us * resident)
        if rest:
            piece_us += max(self.alone_us, self.shared_us * rest)
        return self.fixed_us + pieces * piece_us


@dataclass(frozen=True)
class StreamShape:
    """`linear_stream.cu`: `tiles` tiles of 8 tokens and `row_blocks` blocks of 16 rows a block, shared by `warps`."""

    tiles: int
    row_blocks: int
    warps: int
    depth: int
    resident: int
    cost: Cost

    @property
    def suffix(self) -> str:
        return f"t{8 * self.tiles}_r{16 * self.row_blocks}_w{self.warps}"

    def total_us(self, tokens: int, rows: int, columns: int, multiprocessors: int) -> float:
        blocks = ceil_div(tokens, 8 * self.tiles) * ceil_div(rows, 16 * self.row_blocks)
        pieces = ceil_div(ceil_div(columns, COLUMNS), self.warps)
        return self.cost.total_us(pieces, blocks, multiprocessors, self.resident)


def pack_us(tokens: int, tile_tokens: int, columns: int) -> float:
    """Return the time in which activations are packed: each is read and written once, at 4 TB/s."""
    return ceil_div(tokens, tile_tokens) * tile_tokens * columns * 4 / 4e6


@dataclass(frozen=True)
class HopperShape:
    """`linear_hopper.cu`: tiles of `tokens` tokens, columns shared by `split` blocks of a cluster."""

    tokens: int
    split: int
    stages: int
    depth: int
    resident: int
    cost: Cost

    @property
    def suffix(self) -> str:
        return f"t{self.tokens}_s{self.split}_b{self.resident}"

    @property
    def shared_bytes(self) -> int:
        """The ring of activations, then, in the same place, the tile's float32 sums with padded rows."""
        return max(self.stages * self.tokens * 2 * COLUMNS, self.tokens * (HOPPER_ROWS + 4) * 4)

    def total_us(self, tokens: int, rows: int, columns: int, multiprocessors: int) -> float:
        blocks = ceil_div(tokens, self.tokens) * self.split * ceil_div(rows, HOPPER_ROWS)
        pieces = ceil_div(ceil_div(columns, COLUMNS), self.split)
        # Clusters of four and eight do not fill the groups of 16 or 18 multiprocessors that the GPU consists of.
        usable = multiprocessors * 10 // 11 if self.split >= 4 else multiprocessors
        return pack_us(tokens, self.tokens, columns) + self.cost.total_us(pieces, blocks, usable, self.resident)


@dataclass(frozen=True)
class BalancedShape:
    """`linear_balanced.cu`: tiles of `tokens` tokens, the pieces of all tiles shared out evenly."""

    tokens: int
    stages: int
    depth: int
    cost: Cost

    @property
    def suffix(self) -> str:
        return f"t{self.tokens}"

    @property
    def shared_bytes(self) -> int:
        """The ring of activations, then 64 tokens of the tile in 16 bits with padded rows."""
        return self.stages * self.tokens * 2 * COLUMNS + 64 * (HOPPER_ROWS + 8) * 2

    def blocks(self, tokens: int, rows: int, columns: int, multiprocessors: int) -> int:
        return min(multiprocessors, self._pieces(tokens, rows, columns))

    def total_us(self, tokens: int, rows: int, columns: int, multiprocessors: int) -> float:
        pieces = ceil_div(self._pieces(tokens, rows, columns), multiprocessors)
        return pack_us(tokens, self.tokens, columns) + self.cost.total_us(pieces, 1, 1, 1)

    def _pieces(self, tokens: int, rows: int, columns: int) -> int:
        return ceil_div(tokens, self.tokens) * ceil_div(rows, HOPPER_ROWS) * ceil_div(columns, COLUMNS)


STREAM = (
    StreamShape(1, 1, 16, 2, 2, Cost(0.95, 0.87, 0.283)),
    StreamShape(1, 2, 16, 1, 2, Cost(0.94, 1.02, 0.662)),
    StreamShape(1, 2, 8, 2, 3, Cost(1.51, 0.80, 0.344)),
    StreamShape(1, 2, 4, 2, 7, Cost(1.31, 0.78, 0.167)),
    StreamShape(2, 2, 16, 2, 1, Cost(1.74, 1.04, 0.500)),
    StreamShape(2, 2, 8, 2, 2, Cost(1.48, 0.75, 0.418)),
    StreamShape(2, 1, 8, 2, 3, Cost(1.91, 0.68, 0.249)),
    StreamShape(2, 2, 4, 2, 4, Cost(2.32, 0.67, 0.184)),
    StreamShape(3, 1, 8, 2, 3, Cost(1.62, 0.84, 0.307)),
    StreamShape(3, 2, 4, 2, 4, Cost(6.07, 0.65, 0.235)),
    StreamShape(4, 1, 8, 2, 2, Cost(1.97, 0.80, 0.398)),
    StreamShape(4, 2, 4, 2, 3, Cost(4.00, 0.73, 0.284)),
)

HOPPER = (
    HopperShape(32, 1, 6, 4, 2, Cost(3.69, 0.45, 0.252)),
    HopperShape(32, 2, 6, 2, 4, Cost(2.41, 0.53, 0.265)),
    HopperShape(32, 4, 6, 4, 2, Cost(2.73, 0.49, 0.288)),
    HopperShape(32, 8, 6, 4, 3, Cost(3.38, 0.72, 0.291)),
    HopperShape(64, 1, 6, 2, 2, Cost(4.64, 0.54, 0.305)),
    HopperShape(64, 2, 6, 2, 2, Cost(3.66, 0.61, 0.344)),
    HopperShape(64, 4, 6, 2, 2, Cost(3.99, 0.55, 0.334)),
    HopperShape(64, 4, 6, 2, 3, Cost(3.67, 0.89, 0.241)),
    HopperShape(64, 8, 6, 2, 3, Cost(3.99, 0.82, 0.347)),
    HopperShape(96, 1, 6, 2, 2, Cost(2.99, 0.68, 0.386)),
    HopperShape(96, 2, 6, 2, 2, Cost(4.24, 0.71, 0.383)),
    HopperShape(96, 4, 6, 2, 2, Cost(4.00, 0.59, 0.420)),
    HopperShape(128, 1, 6, 2, 2, Cost(0.0, 0.73, 0.428)),
    HopperShape(128, 2, 6, 2, 2, Cost(5.02, 0.74, 0.400)),
    HopperShape(128, 4, 6, 2, 2, Cost(4.05, 0.47, 0.466)),
    HopperShape(128, 2, 8, 8, 1, Cost(3.18, 0.55)),
    HopperShape(160, 1, 8, 4, 1, Cost(1.79, 0.58)),
    HopperShape(160, 2, 8, 4, 1, Cost(2.60, 0.70)),
    HopperShape(192, 1, 8, 4, 1, Cost(1.33, 0.61)),
    HopperShape(192, 2, 8, 4, 1, Cost(3.72, 0.70)),
    HopperShape(256, 1, 6, 4, 1, Cost(0.0, 0.75)),
    HopperShape(256, 2, 6, 4, 1, Cost(4.48, 0.76)),
)

BALANCED = (
    BalancedShape(128, 8, 4, Cost(9.5, 0.618)),
    BalancedShape(160, 8, 4, Cost(9.9, 0.623)),
    BalancedShape(192, 8, 4, Cost(11.4, 0.639)),
    BalancedShape(256, 6, 4, Cost(14.0, 0.76)),
)
