"""How the Hopper linear divides its work, over the formulas of `Run`, `put_sums` and `add_sums` (linear_hopper.cuh).

Blocks are Python objects here: each chunk of columns of each tile is computed once, each tile is stored once, sums and
flags are written and read once, and no order in which blocks run, few of them at a time, lets them wait for ever.
"""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

import pytest
from sits_plugins.linear_plan import flags_bytes, workspace, workspace_bound
from sits_plugins.linear_shapes import CHUNK_PIECES, COLUMNS, HOPPER, HOPPER_ROWS, HopperShape, ceil_div

TOKENS = (1, 2, 31, 32, 33, 65, 257, 700, 8192, 1_000_000)
MATRICES = (
    (1, 32), (16, 64), (17, 96), (128, 256), (129, 288), (640, 1056), (4096, 4096), (4096, 14336), (28672, 4096),
    (262144, 8192),
)  # fmt: skip
MULTIPROCESSORS = (1, 2, 7, 114, 132, 144)


class Run(NamedTuple):
    """The kernel's `Run` of one block."""

    first_tile: int
    last_tile: int
    first_chunk: int
    end_chunk: int
    chunks: int

    @classmethod
    def of_block(cls, block: int, blocks: int, tiles: int, chunks: int, share_tiles: bool) -> Run:
        first, end = (tiles * chunks * b // blocks for b in (block, block + 1))
        if not share_tiles:
            first, end = (tiles * b // blocks * chunks for b in (block, block + 1))
        first_tile, last_tile = first // chunks, (end - 1) // chunks
        return cls(first_tile, last_tile, first - first_tile * chunks, end - last_tile * chunks, chunks)

    @classmethod
    def of_cluster(cls, block: int, split: int, chunks: int) -> Run:
        tile, rank = divmod(block, split)
        return cls(tile, tile, chunks * rank // split, chunks * (rank + 1) // split, chunks)

    @property
    def units(self) -> tuple[int, int]:
        """First and last + 1 of the run in the list of all tiles' chunks."""
        return self.first_tile * self.chunks + self.first_chunk, self.last_tile * self.chunks + self.end_chunk

    @property
    def puts(self) -> bool:
        """Whether another block stores the run's last tile."""
        return self.end_chunk < self.chunks

    @property
    def adds(self) -> bool:
        """Whether others computed the beginning of the run's first tile, which this block stores."""
        return self.first_chunk > 0 and not (self.puts and self.first_tile == self.last_tile)


class Launch(NamedTuple):
    tiles: int
    chunks: int
    blocks: int
    share_tiles: bool

    @classmethod
    def of(cls, shape: HopperShape, tokens: int, rows: int, columns: int, multiprocessors: int) -> Launch:
        tiles = ceil_div(tokens, shape.tokens) * ceil_div(rows, HOPPER_ROWS)
        blocks = shape.blocks(tokens, rows, columns, multiprocessors)
        return cls(tiles, ceil_div(columns, CHUNK_PIECES * COLUMNS), blocks, shape.share_tiles)

    def run(self, block: int) -> Run:
        return Run.of_block(block, self.blocks, self.tiles, self.chunks, self.share_tiles)

    def others(self, block: int) -> list[int]:
        """Return the blocks whose sums `block` adds, in order: the loop around `add_sums`."""
        found, tile = [], self.run(block).first_tile
        while True:
            found.append(block - 1 - len(found))
            if self.tiles * self.chunks * found[-1] // self.blocks - tile * self.chunks <= 0:
                return found


def launches() -> set[Launch]:
    sizes = product(HOPPER, TOKENS, MATRICES, MULTIPROCESSORS)
    found = {Launch.of(s, t, *matrix, m) for s, t, matrix, m in sizes if s.split == 1}
    rng = random.Random()
    for _ in range(300):
        tiles, chunks = rng.randint(1, 40), rng.randint(1, 40)
        found.add(Launch(tiles, chunks, rng.randint(1, min(tiles * chunks, 144)), True))
        found.add(Launch(tiles, chunks, rng.randint(1, tiles), False))
    return found


LAUNCHES = sorted(launches())


def test_every_chunk_is_computed_and_every_tile_stored_once() -> None:
    for launch in LAUNCHES:
        at = stored = 0
        for block in range(launch.blocks):
            run = launch.run(block)
            first, end = run.units
            assert first == at < end, (launch, block)
            assert 0 <= run.first_chunk < launch.chunks
            assert 0 < run.end_chunk <= launch.chunks
            at = end
            stored += run.last_tile - run.first_tile + 1 - run.puts
        assert at == launch.tiles * launch.chunks, launch
        assert stored == launch.tiles, launch


def test_sums_reach_the_block_that_stores_their_tile_once() -> None:
    for launch in LAUNCHES:
        runs = [launch.run(block) for block in range(launch.blocks)]
        waited: list[int] = []
        for block, run in enumerate(runs):
            if run.adds:
                others = launch.others(block)
                waited += others
                parts = [runs[other] for other in others]
                assert all(part.puts and part.last_tile == run.first_tile for part in parts), (launch, block)
                begin = run.first_tile * launch.chunks
                assert sum(part.units[1] - max(part.units[0], begin) for part in parts) == run.first_chunk
        assert sorted(waited) == [block for block, run in enumerate(runs) if run.puts], launch
        if not launch.share_tiles:
            assert not waited


def flags_after(launch: Launch, resident: int, rng: random.Random) -> list[int]:
    """Run all blocks, `resident` at a time, those of lower index first, and return their flags at the end."""
    flags = [0] * launch.blocks
    todo: dict[int, list[int]] = {}  # of each resident block: sums to put (its own index), then those to wait for
    started = 0
    while started < launch.blocks or todo:
        while started < launch.blocks and len(todo) < resident and (not todo or rng.random() < 0.7):
            run = launch.run(started)
            todo[started] = [started] * run.puts + (launch.others(started) if run.adds else [])
            started += 1
        able = [block for block, steps in todo.items() if not steps or steps[0] == block or flags[steps[0]]]
        assert able or len(todo) < resident, f"{launch}: {sorted(todo)} wait for ever, {resident} at a time"
        if not able:
            continue
        block = rng.choice(able)
        if not todo[block]:
            del todo[block]
        else:
            sums = todo[block].pop(0)
            assert flags[sums] == int(sums != block)
            flags[sums] ^= 1
    return flags


def test_blocks_never_wait_for_ever_and_leave_flags_at_zero() -> None:
    rng = random.Random()
    sharing = [launch for launch in LAUNCHES if launch.share_tiles and launch.blocks > 1]
    for launch in rng.sample(sharing, 150):
        for resident in (1, 2, launch.blocks):
            assert not any(flags_after(launch, resident, rng)), (launch, resident)


@pytest.mark.parametrize("split", [2, 4])
def test_a_cluster_shares_the_columns_of_its_tile(split: int) -> None:
    for tiles, chunks in product((1, 3), (1, 2, 3, 4, 5, 56)):
        at = 0
        for block in range(tiles * split):
            run = Run.of_cluster(block, split, chunks)
            first, end = run.units
            assert first == at <= end, "a block of a cluster may have nothing to compute"
            at = end
        assert at == tiles * chunks


def test_what_is_an_int_in_the_kernel_fits_one() -> None:
    """Tiles, tokens, and columns are ints there; units are long, times the number of blocks, too."""
    for launch in LAUNCHES:
        assert launch.tiles < 2**31
        assert launch.tiles * launch.chunks * launch.blocks < 2**63


def test_sums_and_flags_have_a_place_for_each_block() -> None:
    """Block b puts TOKENS / 2 floats a thread, of 256 threads, behind those of the blocks before it, and flag b."""
    sizes = product(HOPPER, TOKENS, MATRICES, (7, max(MULTIPROCESSORS)), (False, True))
    for shape, tokens, (rows, columns), multiprocessors, scaled in sizes:
        size = (tokens, rows, columns)
        scratch = workspace(shape, *size, multiprocessors, scaled)
        blocks = shape.blocks(*size, multiprocessors)
        assert scratch.sums % 16 == 0
        assert scratch.sums >= (tokens * columns * 2 if scaled else 0)
        if shape.share_tiles:
            assert scratch.flags - scratch.sums >= blocks * shape.tokens // 2 * 256 * 4
            assert scratch.total - scratch.flags >= blocks * 4
            assert blocks * 4 <= flags_bytes()
        assert scratch.total <= workspace_bound(tokens, rows, columns, scaled)
