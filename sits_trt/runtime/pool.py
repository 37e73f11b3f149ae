"""How many tiles the pool gets on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from sits_trt.contract import EngineLimits
from sits_trt.errors import SitsError
from sits_trt.spec import TileSpec

MEMINFO = Path("/proc/meminfo")

HOST_FRACTION = 0.5
"""Part of a host's available memory that a pool takes at most: the weights' pages and other programs live there too."""


def available_host_bytes() -> int:
    """Memory that can be taken without swapping; all of it where the system does not tell."""
    if MEMINFO.is_file():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pool_tiles(
    tile: TileSpec,
    limits: EngineLimits,
    available_bytes: int,
    memory_fraction: float,
    max_tiles: int | None,
    fill: bool,
) -> int:
    """Return the number of tiles of the pool: never more than `memory_fraction` of `available_bytes`.

    fill: take all of that (a GPU does nothing else, and what no sequence holds keeps prefixes), or no more than a
    full batch of the longest sequences can hold nor than HOST_FRACTION (a host has other work). max_tiles: the bound
    where it is given. Raises SitsError when not even one longest sequence fits and that was not asked for.
    """
    memory_fraction = memory_fraction if fill else min(memory_fraction, HOST_FRACTION)
    affordable = int(available_bytes * memory_fraction) // tile.tile_bytes
    one_sequence = tile.tiles_for(limits.max_seq_tokens)
    wanted = max_tiles or (affordable if fill else limits.max_batch_size * one_sequence)
    tiles = min(affordable, wanted)
    if tiles < one_sequence and tiles != max_tiles:
        raise SitsError(
            f"{memory_fraction:.0%} of the {available_bytes / 2**20:.0f} MiB available hold {affordable} KV tiles of "
            f"{tile.tile_bytes / 2**20:.2f} MiB, but one sequence of {limits.max_seq_tokens} tokens needs "
            f"{one_sequence}; free memory, raise kv_cache.memory_fraction or lower engine.max_output_tokens"
        )
    return tiles
