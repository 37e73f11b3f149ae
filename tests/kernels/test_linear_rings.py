"""The Hopper linear's two rings, over the steps of `copy_inputs`, `copy_weights` and `multiply` (linear_hopper.cu).

The copying threads and eight multiplying warps take their steps in random order, copies arrive at random, and products
read shared memory from when they are issued until they are waited for. No place may be overwritten or read at the
wrong time, no barrier may see an arrival too many, and nobody may wait for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product

import pytest
from sits_plugins.linear_shapes import CHUNK_PIECES, CHUNKS_AHEAD, HOPPER

from tests.kernels.test_linear_runs import Launch, Run

WARPS, AHEAD = 8, 3
Steps = Iterator[Callable[[], bool]]
"""What a thread waits for before each of its steps."""


def at_once() -> bool:
    return True


class Barrier:
    """An mbarrier: a phase ends when `count` threads have arrived and what was announced has been copied."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.copies = self.parity = 0

    def arrive(self, copies: int = 0) -> None:
        assert self.missing > 0, "an arrival too many"
        self.missing -= 1
        self.copies += copies
        self._end_phase()

    def copied(self) -> None:
        self.copies -= 1
        self._end_phase()

    def _end_phase(self) -> None:
        assert self.copies >= 0, "a copy too many"
        if not self.missing and not self.copies:
            self.missing, self.parity = self.count, 1 - self.parity

    def over(self, parity: int) -> bool:
        """Whether the phase of this parity is over: what `mbarrier.try_wait.parity` tells."""
        return self.parity != parity


class Ring:
    """Places in shared memory, each with what it holds (None while a copy is under way) and its two barriers."""

    def __init__(self, places: int) -> None:
        self.holds: list[object] = [None] * places
        self.full, self.empty = [Barrier(1) for _ in range(places)], [Barrier(WARPS) for _ in range(places)]


class Block:
    def __init__(self, run: Run, stages: int, rng: random.Random) -> None:
        self.run, self.rng = run, rng
        self.inputs, self.weights = Ring(stages), Ring(CHUNKS_AHEAD)
        self.coming: list[tuple[Ring, int, object]] = []
        self.multiplied: list[list[object]] = [[] for _ in range(WARPS)]

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (tile, first chunk, last chunk + 1): tiles come backwards."""
        run = self.run
        for tile in range(run.last_tile, run.first_tile - 1, -1):
            yield (
                tile,
                run.first_chunk if tile == run.first_tile else 0,
                run.end_chunk if tile == run.last_tile else run.chunks,
            )

    def copy(self, ring: Ring, pieces: int) -> Steps:
        """`copy_inputs` with CHUNK_PIECES pieces a chunk, `copy_weights` with one."""
        stage, phase = 0, 1
        for tile, first, end in self.chunks():
            for piece in range(first * pieces, end * pieces):
                yield lambda at=(stage, phase): ring.empty[at[0]].over(at[1])  # type: ignore[misc]
                ring.full[stage].arrive(copies=1)
                ring.holds[stage] = None
                self.coming.append((ring, stage, (tile, piece)))
                stage = 0 if stage + 1 == len(ring.holds) else stage + 1
                phase ^= stage == 0

    def multiply(self, warp: int) -> Steps:
        inputs, weights = self.inputs, self.weights
        sets = len(inputs.holds) // CHUNK_PIECES
        at_set = phase = weights_stage = weights_phase = 0
        pending: list[tuple[int, object]] = []

        def done(left: int) -> None:
            while len(pending) > left:
                stage, piece = pending.pop(0)
                assert inputs.holds[stage] == piece, "overwritten while it is multiplied"
                self.multiplied[warp].append(piece)

        for tile, first, end in self.chunks():
            before, input_ready, weights_ready = -1, False, False
            if first < end:
                yield lambda at=(weights_stage, weights_phase): weights.full[at[0]].over(at[1])  # type: ignore[misc]
            for chunk in range(first, end):
                base, full_phase = at_set * CHUNK_PIECES, phase
                at_set = 0 if at_set + 1 == sets else at_set + 1
                phase ^= at_set == 0
                for place in range(CHUNK_PIECES):
                    if place + 1 < CHUNK_PIECES:
                        assert weights.holds[weights_stage] == (tile, chunk)
                    else:
                        weights.empty[weights_stage].arrive()
                        weights_stage = 0 if weights_stage + 1 == CHUNKS_AHEAD else weights_stage + 1
                        weights_phase ^= weights_stage == 0
                        if chunk + 1 < end:
                            yield lambda at=(weights_ready, weights_stage, weights_phase): (  # type: ignore[misc]
                                at[0] or weights.full[at[1]].over(at[2])
                            )
                            assert weights.holds[weights_stage] == (tile, chunk + 1)
                    for step in range(4):
                        if step == 0:
                            yield lambda at=(input_ready, base + place, full_phase): (  # type: ignore[misc]
                                at[0] or inputs.full[at[1]].over(at[2])
                            )
                        piece = (tile, chunk * CHUNK_PIECES + place)
                        assert inputs.holds[base + place] == piece
                        pending.append((base + place, piece))
                        yield at_once
                        done(AHEAD)
                        released = base + place - 1 if place else before
                        if step == AHEAD - 1 and released >= 0:
                            assert all(stage != released for stage, _ in pending)
                            inputs.empty[released].arrive()
                        if step == 1 and place + 2 == CHUNK_PIECES:
                            around = weights_stage + 1 == CHUNKS_AHEAD
                            weights_ready = weights.full[0 if around else weights_stage + 1].over(
                                weights_phase ^ around
                            )
                        if step == 2:
                            following = base + place + 1, full_phase
                            if place + 1 == CHUNK_PIECES:
                                following = at_set * CHUNK_PIECES, phase
                            input_ready = inputs.full[following[0]].over(following[1])
                before = base + CHUNK_PIECES - 1
            yield at_once
            done(0)
            if before >= 0:
                inputs.empty[before].arrive()

    def go(self) -> None:
        """Run to the end."""
        rng = self.rng
        everyone = [self.copy(self.inputs, CHUNK_PIECES), self.copy(self.weights, 1)]
        everyone += [self.multiply(warp) for warp in range(WARPS)]
        waiting = {place: next(steps, None) for place, steps in enumerate(everyone)}
        while any(waiting.values()):
            able = [place for place, ready in waiting.items() if ready and ready()]
            assert able or self.coming, f"{self.run}: all wait for ever"
            if self.coming and (not able or rng.random() < 0.2):
                ring, stage, what = self.coming.pop(rng.randrange(len(self.coming)))
                ring.holds[stage] = what
                ring.full[stage].copied()
                continue
            # One thread now and then gets far ahead of the others.
            place = rng.choice(able)
            for _ in range(rng.choice((1, 1, 20))):
                waiting[place] = next(everyone[place], None)
                ready = waiting[place]
                if not ready or not ready():
                    break
        assert not self.coming


@pytest.mark.parametrize("stages", sorted({shape.stages for shape in HOPPER}))
@pytest.mark.parametrize("share_tiles", [False, True])
def test_copies_and_products_agree_over_tiles_in_any_order(stages: int, share_tiles: bool) -> None:
    rng = random.Random()
    for tiles, chunks in product((1, 2, 5), (1, 2, 3, 7)):
        blocks = rng.randint(1, min(4, tiles * chunks if share_tiles else tiles))
        launch = Launch(tiles, chunks, blocks, share_tiles)
        for index in range(blocks):
            block = Block(launch.run(index), stages, rng)
            block.go()
            want = [
                (tile, piece)
                for tile, first, end in block.chunks()
                for piece in range(first * CHUNK_PIECES, end * CHUNK_PIECES)
                for _ in range(4)
            ]
            assert block.multiplied == [want] * WARPS, launch


@pytest.mark.parametrize("stages", sorted({shape.stages for shape in HOPPER}))
def test_a_block_of_a_cluster_may_have_no_chunk(stages: int) -> None:
    for index, pieces in ((0, 0), (1, CHUNK_PIECES)):
        block = Block(Run.of_cluster(index, 2, 1), stages, random.Random())
        block.go()
        assert [len(found) for found in block.multiplied] == [4 * pieces] * WARPS
