"""Who holds which tile of the KV pool: leases, reference counts, and tiles kept for their content."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sits_trt.spec import TileSpec


class Lease:
    """The tiles of one sequence, and the promise of more.

    `table` is int32 [limit]: its first `num_tiles` entries are the tiles in the order of the sequence's positions.
    Entries are only ever appended, so a view of the first entries stays true while later ones are added.
    """

    __slots__ = ("num_tiles", "table")

    def __init__(self, limit: int) -> None:
        self.table: NDArray[np.int32] = np.zeros(limit, dtype=np.int32)
        self.num_tiles = 0

    @property
    def limit(self) -> int:
        return len(self.table)

    @property
    def tiles(self) -> NDArray[np.int32]:
        return self.table[: self.num_tiles]


class TileAllocator:
    """Hands out the tiles 0 to num_tiles-1 of one pool.

    A tile is *held* by one or more leases, or *kept* (held by none, but its content has a name in the prefix cache
    and can be shared again until the tile is needed), or *free*. A lease is given only when the pool can fill it to
    its limit whatever the other leases do: what has been promised and not yet handed out is `reserved`, and

        reserved <= free + kept

    holds at all times. So a sequence that has started can always finish.
    """

    def __init__(self, tile: TileSpec, num_tiles: int) -> None:
        if num_tiles < 1:
            raise ValueError(f"a pool needs at least one tile, not {num_tiles}")
        self.tile = tile
        self.num_tiles = num_tiles
        # A stack with the lowest ids on top: a lightly used pool touches little of its memory.
        self._free = list(range(num_tiles - 1, -1, -1))
        self._holders = [0] * num_tiles
        self._leases: set[Lease] = set()
        self._reserved = 0
        self._tile_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free_tiles(self) -> int:
        """Tiles that no lease holds, kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def available_tiles(self) -> int:
        """Tiles that no lease holds and none has been promised."""
        return self.free_tiles - self._reserved

    @property
    def kept_tiles(self) -> int:
        return len(self._kept)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def lease(self, num_tokens: int, shared: Sequence[int] = ()) -> Lease | None:
        """Promise room for `num_tokens` tokens whose first tiles are `shared`; None when there is no room now.

        `shared` are tiles that `find` has just returned.
        """
        limit = self.tile.tiles_for(num_tokens)
        held = sum(1 for tile in shared if self._holders[tile])
        if limit - held > self.available_tiles:
            return None
        lease = Lease(limit)
        self._leases.add(lease)
        self._reserved += limit
        for tile in shared:
            self.share(lease, tile)
        return lease

    def share(self, lease: Lease, tile: int) -> None:
        """Append a tile that `find` has just returned to `lease`, in place of one that it was promised."""
        assert lease in self._leases, "the lease was released"
        assert lease.num_tiles < lease.limit, "a lease cannot grow over its limit"
        assert tile in self._name_of, "only a tile with a name can be shared"
        if not self._holders[tile]:
            del self._kept[tile]
        self._holders[tile] += 1
        lease.table[lease.num_tiles] = tile
        lease.num_tiles += 1
        self._reserved -= 1

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Give `lease` the tiles that its first `num_tokens` tokens need. Within its limit this cannot fail."""
        wanted = self.tile.tiles_for(num_tokens)
        assert lease in self._leases, "the lease was released"
        assert wanted <= lease.limit, "a lease cannot grow over its limit"
        while lease.num_tiles < wanted:
            tile = self._free.pop() if self._free else self._evict()
            self._holders[tile] = 1
            lease.table[lease.num_tiles] = tile
            lease.num_tiles += 1
            self._reserved -= 1

    def release(self, lease: Lease) -> None:
        """Take back every tile that no other lease holds, and the promise. Named tiles are kept."""
        self._leases.remove(lease)
        self._reserved -= lease.limit - lease.num_tiles
        # Last tile first: a kept chain loses its end before its beginning, which more prompts share.
        for tile in reversed(lease.tiles.tolist()):
            self._holders[tile] -= 1
            if not self._holders[tile]:
                if tile in self._name_of:
                    self._kept[tile] = None
                else:
                    self._free.append(tile)

    def publish(self, tile: int, name: bytes) -> None:
        """Name the content of a held tile, so that `find` can return it. The first tile of a name keeps it."""
        assert self._holders[tile], "only a held tile can be published"
        if name not in self._tile_of and tile not in self._name_of:
            self._tile_of[name] = tile
            self._name_of[tile] = name

    def unpublish(self, lease: Lease) -> None:
        """Forget the names of a lease's tiles: what they hold is not to be shared any more."""
        for tile in lease.tiles.tolist():
            name = self._name_of.pop(tile, None)
            if name is not None:
                del self._tile_of[name]

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the tiles of the longest beginning of `names` of which every tile is there."""
        found = []
        for name in names:
            tile = self._tile_of.get(name)
            if tile is None:
                break
            found.append(tile)
        return found

    def _evict(self) -> int:
        """Forget the kept tile that was released longest ago, and return it."""
        tile, _ = self._kept.popitem(last=False)
        del self._tile_of[self._name_of.pop(tile)]
        return tile

    def check(self) -> None:
        """Recount everything from the leases; an AssertionError names the first thing that does not add up."""
        held: Counter[int] = Counter()
        promised = 0
        for lease in self._leases:
            tiles = lease.tiles.tolist()
            assert len(set(tiles)) == len(tiles), "a lease holds a tile twice"
            held.update(tiles)
            promised += lease.limit - lease.num_tiles
        assert [held[tile] for tile in range(self.num_tiles)] == self._holders, "holder counts differ from the leases"
        assert promised == self._reserved, f"{self._reserved} tiles reserved, leases say {promised}"
        assert self._reserved <= self.free_tiles, f"{self._reserved} tiles promised, {self.free_tiles} there"
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free), "a tile is free twice"
        assert len(free) + len(kept) + len(held) == self.num_tiles, "a tile is lost or has two states"
        assert free | kept | set(held) == set(range(self.num_tiles)), "a tile is lost or has two states"
        assert {tile: name for name, tile in self._tile_of.items()} == self._name_of, "names and tiles differ"
        assert kept <= set(self._name_of), "a kept tile has no name"
        assert not free & set(self._name_of), "a free tile has a name"
