import pytest

from sits_trt.errors import SitsError
from sits_trt.runtime.pool import available_host_bytes, pool_tiles
from tests.support.runtime import TILE, limits

BOUNDS = limits(batch=4, seq_tokens=160)  # 10 tiles a sequence, 40 for the batch


def tiles(available: int, fraction: float = 0.5, max_tiles: int | None = None, fill: bool = False) -> int:
    return pool_tiles(TILE, BOUNDS, available * TILE.tile_bytes, fraction, max_tiles, fill)


def test_a_host_gives_what_a_full_batch_can_use() -> None:
    assert tiles(1000) == 40
    assert tiles(50) == 25
    assert tiles(1000, max_tiles=12) == 12
    assert tiles(50, fraction=0.9) == 25, "a host keeps half of its memory"
    assert tiles(50, fraction=0.2) == 10


def test_a_gpu_gives_its_fraction_as_the_cache_can_use_it() -> None:
    assert tiles(1000, fill=True) == 500
    assert tiles(1000, fraction=0.9, fill=True) == 900
    assert tiles(1000, max_tiles=12, fill=True) == 12
    assert tiles(50, max_tiles=1000, fill=True) == 25


def test_less_than_one_sequence_is_refused_unless_asked_for() -> None:
    with pytest.raises(SitsError, match=r"50% of .* hold 9 KV tiles .* one sequence of 160 tokens needs 10"):
        tiles(18)
    assert tiles(1000, max_tiles=3) == 3


def test_this_host_has_memory() -> None:
    assert available_host_bytes() > 2**20
