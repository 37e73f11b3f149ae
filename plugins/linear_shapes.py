"""Tile shapes of the INT4 linear's kernels, with what each costs.

The costs were fitted on one H200 over the four matrices of Llama-3-8B. The shape that is cheapest by the model took, of
the streaming kernel's, on average 1 % longer than the fastest measured one (135 pairs of a matrix and a token count),
of the Hopper kernel's 0.6 %, 9 % at most (258 pairs of 16 to 6144 tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = 64
"""Columns of one piece of the mma16 layout."""

CHUNK_PIECES = 4
"""Pieces of weights that the Hopper kernels copy at a time."""

CHUNKS_AHEAD = 3
"""Chunks of weights that the Hopper kernels copy ahead."""

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
    """`linear_stream.cu`: `tiles` tiles of 8 tokens and `row_blocks` blocks of 16 rows a block, shared by `warps`.

    A warp has `depth` pieces of weights in flight: no more than leave the registers for `resident` blocks on a
    multiprocessor, which hide more latency than a second piece does.
    """

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


@dataclass(frozen=True)
class HopperShape:
    """`linear_hopper.cu`: tiles of `tokens` tokens, columns shared by `split` blocks of a cluster.

    With `share_tiles`, blocks take equal runs of columns, wherever tiles begin and end.
    """

    tokens: int
    split: int
    share_tiles: bool

    @property
    def suffix(self) -> str:
        """The kernel's name after its format; shapes with and without `share_tiles` have the same kernel."""
        return f"t{self.tokens}_s{self.split}"

    @property
    def stages(self) -> int:
        """Pieces of activations that are copied ahead: two chunks, or the one that fits."""
        return 2 * CHUNK_PIECES if self.tokens <= 128 else CHUNK_PIECES

    def shared_bytes(self, group_size: int, zeros: bool) -> int:
        """The two rings and the tokens on their way out, or, instead of all, the tile's float32 sums, rows padded."""
        scales = HOPPER_ROWS // 16 * (CHUNK_PIECES * COLUMNS // group_size) * 32
        weights = HOPPER_ROWS * CHUNK_PIECES * COLUMNS // 2 + scales + (scales // 2 if zeros else 0)
        staged = 2 * min(self.tokens, 64) * 72 * 2 if self.split == 1 else 0
        ring = self.stages * self.tokens * 2 * COLUMNS + CHUNKS_AHEAD * weights + staged
        return max(ring, self.tokens * (HOPPER_ROWS + 4) * 4 if self.split > 1 else 0)

    def blocks(self, tokens: int, rows: int, columns: int, multiprocessors: int) -> int:
        tiles = ceil_div(tokens, self.tokens) * ceil_div(rows, HOPPER_ROWS)
        if self.split > 1:
            return tiles * self.split
        work = tiles * ceil_div(columns, CHUNK_PIECES * COLUMNS) if self.share_tiles else tiles
        return min(work, multiprocessors)

    def sums_bytes(self, blocks: int) -> int:
        """Return the size of the float32 sums that blocks which share tiles hand over, one tile a block."""
        return blocks * self.tokens * HOPPER_ROWS * 4 if self.share_tiles else 0

    def total_us(self, tokens: int, rows: int, columns: int, multiprocessors: int) -> float:
        tiles = ceil_div(tokens, self.tokens) * ceil_div(rows, HOPPER_ROWS)
        pieces = ceil_div(ceil_div(columns, COLUMNS), self.split)
        piece_us = _PIECE_US[self.tokens]
        if self.share_tiles:
            share = ceil_div(tiles * ceil_div(pieces, CHUNK_PIECES), multiprocessors) * CHUNK_PIECES
            return 5.5 + 0.018 * self.tokens + share * piece_us
        # Copies run on from one tile of a block into its next; clusters have one tile each.
        tile_us = 4.5 if self.split > 1 else 1.4
        return ceil_div(tiles * self.split, multiprocessors) * (tile_us + pieces * piece_us)


_PIECE_US = {
    32: 0.256, 48: 0.280, 64: 0.306, 80: 0.343, 96: 0.374, 112: 0.414, 128: 0.450, 144: 0.478, 160: 0.521, 176: 0.567,
    192: 0.627, 208: 0.688, 224: 0.747, 240: 0.759, 256: 0.825,
}  # fmt: skip
"""Microseconds of a piece of 64 columns by the tile's tokens; the GPU is warm from launches before."""

STREAM = (
    StreamShape(1, 1, 16, 1, 2, Cost(0.95, 0.87, 0.283)),
    StreamShape(1, 2, 16, 1, 2, Cost(0.94, 1.02, 0.662)),
    StreamShape(1, 2, 8, 1, 3, Cost(1.51, 0.80, 0.344)),
    StreamShape(1, 2, 4, 1, 7, Cost(1.31, 0.78, 0.167)),
    StreamShape(2, 2, 16, 2, 1, Cost(1.74, 1.04, 0.500)),
    StreamShape(2, 2, 8, 2, 2, Cost(1.48, 0.75, 0.418)),
    StreamShape(2, 1, 8, 1, 3, Cost(1.91, 0.68, 0.249)),
    StreamShape(2, 2, 4, 2, 4, Cost(2.32, 0.67, 0.184)),
    StreamShape(3, 1, 8, 1, 3, Cost(1.62, 0.84, 0.307)),
    StreamShape(3, 2, 4, 2, 4, Cost(6.07, 0.65, 0.235)),
    StreamShape(3, 2, 16, 1, 1, Cost(2.00, 1.15, 1.150)),
    StreamShape(4, 1, 8, 2, 2, Cost(1.97, 0.80, 0.398)),
    StreamShape(4, 2, 4, 2, 3, Cost(4.00, 0.73, 0.284)),
)

GATED = tuple(shape for shape in STREAM if shape.row_blocks == 2)
"""Shapes that can take gate rows and their up rows."""

HOPPER = tuple(
    HopperShape(tokens, split, share_tiles)
    for tokens in _PIECE_US
    for split, share_tiles in ((1, False), (2, False), (1, True))
)
