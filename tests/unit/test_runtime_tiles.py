import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sits_trt.runtime.tiles import Lease, TileAllocator
from sits_trt.spec import TileSpec

TILE = TileSpec(num_layers=1, num_kv_heads=1, head_dim=8, tile_tokens=4)


def filled(allocator: TileAllocator, num_tokens: int, shared: tuple[int, ...] = ()) -> Lease:
    lease = allocator.lease(num_tokens, shared)
    assert lease is not None
    allocator.extend(lease, num_tokens)
    allocator.check()
    return lease


def test_tiles_come_as_tokens_do_and_all_go_back() -> None:
    allocator = TileAllocator(TILE, 4)
    lease = allocator.lease(9)
    assert lease is not None
    assert (lease.num_tiles, lease.limit, allocator.free_tiles, allocator.available_tiles) == (0, 3, 4, 1)
    for tokens, tiles in ((1, 1), (4, 1), (5, 2), (9, 3)):
        allocator.extend(lease, tokens)
        assert lease.num_tiles == tiles
        allocator.check()
    allocator.release(lease)
    allocator.check()
    assert allocator.free_tiles == allocator.available_tiles == 4


def test_shortage_is_none_and_changes_nothing() -> None:
    allocator = TileAllocator(TILE, 4)
    first = allocator.lease(9)
    assert first is not None
    assert allocator.lease(5) is None
    allocator.check()
    second = allocator.lease(4)
    assert second is not None
    allocator.extend(second, 4)
    # What was promised to the first is still there.
    allocator.extend(first, 9)
    assert allocator.free_tiles == 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one tile"):
        TileAllocator(TILE, 0)
    allocator = TileAllocator(TILE, 4)
    lease = allocator.lease(4)
    assert lease is not None
    with pytest.raises(AssertionError, match="over its limit"):
        allocator.extend(lease, 5)
    allocator.release(lease)
    with pytest.raises(KeyError):
        allocator.release(lease)
    with pytest.raises(AssertionError, match="released"):
        allocator.extend(lease, 4)


def test_a_view_of_the_table_outlives_growth_and_release() -> None:
    allocator = TileAllocator(TILE, 4)
    lease = allocator.lease(12)
    assert lease is not None
    allocator.extend(lease, 5)
    view = lease.tiles
    seen = view.tolist()
    allocator.extend(lease, 12)
    allocator.release(lease)
    filled(allocator, 12)
    assert view.tolist() == seen


def test_named_tiles_are_shared_while_held_and_after() -> None:
    allocator = TileAllocator(TILE, 4)
    first = filled(allocator, 8)
    for tile, name in zip(first.tiles.tolist(), (b"a", b"b"), strict=True):
        allocator.publish(tile, name)
    found = allocator.find([b"a", b"b", b"c"])
    assert found == first.tiles.tolist()
    assert allocator.find([b"b"]) == found[1:]
    assert allocator.find([b"x", b"a"]) == []
    second = filled(allocator, 12, tuple(found))
    assert second.tiles.tolist()[:2] == found
    assert allocator.free_tiles == 1
    allocator.release(first)
    allocator.check()
    assert (allocator.free_tiles, allocator.kept_tiles) == (1, 0)
    allocator.release(second)
    allocator.check()
    assert (allocator.free_tiles, allocator.kept_tiles) == (4, 2)
    third = filled(allocator, 8, tuple(allocator.find([b"a", b"b"])))
    assert third.tiles.tolist() == found


def test_kept_tiles_make_room_the_longest_unused_and_the_end_of_a_chain_first() -> None:
    allocator = TileAllocator(TILE, 4)
    for names in ((b"a", b"b"), (b"c", b"d")):
        lease = filled(allocator, 8)
        for tile, name in zip(lease.tiles.tolist(), names, strict=True):
            allocator.publish(tile, name)
        allocator.release(lease)
    assert (allocator.kept_tiles, allocator.free_tiles) == (4, 4)
    # Using a again makes it the youngest.
    allocator.release(filled(allocator, 4, tuple(allocator.find([b"a"]))))
    for left in ([b"a", b"c", b"d"], [b"a", b"c"], [b"a"], []):
        filled(allocator, 4)
        assert [name for name in (b"a", b"b", b"c", b"d") if allocator.find([name])] == left


def test_a_kept_tile_that_is_shared_again_counts_against_the_room() -> None:
    allocator = TileAllocator(TILE, 2)
    lease = filled(allocator, 8)
    for tile, name in zip(lease.tiles.tolist(), (b"a", b"b"), strict=True):
        allocator.publish(tile, name)
    allocator.release(lease)
    promised = allocator.lease(4)
    assert promised is not None
    # One tile is promised, so of the two kept ones only one can be woken.
    assert allocator.lease(8, allocator.find([b"a", b"b"])) is None
    assert allocator.lease(4, allocator.find([b"a"])) is not None
    allocator.check()


def test_a_name_stays_with_its_first_tile_and_can_be_forgotten() -> None:
    allocator = TileAllocator(TILE, 4)
    first, second = filled(allocator, 4), filled(allocator, 4)
    allocator.publish(int(first.tiles[0]), b"a")
    allocator.publish(int(second.tiles[0]), b"a")
    assert allocator.find([b"a"]) == first.tiles.tolist()
    allocator.release(second)
    assert allocator.kept_tiles == 0
    allocator.unpublish(first)
    assert allocator.find([b"a"]) == []
    allocator.release(first)
    allocator.check()
    assert (allocator.free_tiles, allocator.kept_tiles) == (4, 0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a, lease: a._free.pop(), "lost"),
        (lambda a, lease: a._free.append(a._free[0]), "free twice"),
        (lambda a, lease: a._free.append(int(lease.tiles[0])), "lost or has two states"),
        (lambda a, lease: a._holders.__setitem__(int(lease.tiles[0]), 2), "holder counts"),
        (lambda a, lease: setattr(lease, "num_tiles", 1), "holder counts"),
        (lambda a, lease: lease.table.__setitem__(1, lease.table[0]), "twice"),
        (lambda a, lease: setattr(a, "_reserved", 0), "reserved"),
        (lambda a, lease: a._tile_of.clear(), "names and tiles differ"),
        (lambda a, lease: a._leases.clear(), "holder counts"),
    ],
)
def test_check_finds_what_is_wrong(spoil: object, message: str) -> None:
    allocator = TileAllocator(TILE, 6)
    lease = allocator.lease(12)
    assert lease is not None
    allocator.extend(lease, 8)
    allocator.publish(int(lease.tiles[0]), b"a")
    allocator.check()
    spoil(allocator, lease)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        allocator.check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_calls_adds_up(data: st.DataObject) -> None:
    allocator = TileAllocator(TILE, data.draw(st.integers(1, 12)))
    leases: list[Lease] = []
    grown: dict[Lease, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(("lease", "extend", "publish", "share", "release", "unpublish")))
        if action == "lease":
            tokens = data.draw(st.integers(1, 30))
            names = [bytes([value]) for value in data.draw(st.lists(st.integers(0, 9), max_size=4, unique=True))]
            shared = allocator.find(names)[: TILE.tiles_for(tokens)]
            room = allocator.available_tiles
            lease = allocator.lease(tokens, shared)
            if lease is None:
                assert room < TILE.tiles_for(tokens)
                assert allocator.available_tiles == room
            else:
                leases.append(lease)
                grown[lease] = lease.num_tiles * TILE.tile_tokens
        elif leases:
            lease = data.draw(st.sampled_from(leases))
            if action == "extend":
                grown[lease] = data.draw(st.integers(grown[lease], lease.limit * TILE.tile_tokens))
                allocator.extend(lease, grown[lease])
            elif action == "publish" and lease.num_tiles:
                allocator.publish(
                    int(data.draw(st.sampled_from(lease.tiles.tolist()))), bytes([data.draw(st.integers(0, 9))])
                )
            elif action == "share" and lease.num_tiles < lease.limit:
                found = allocator.find([bytes([data.draw(st.integers(0, 9))])])
                if found and found[0] not in lease.tiles.tolist():
                    allocator.share(lease, found[0])
                    grown[lease] = lease.num_tiles * TILE.tile_tokens
            elif action == "unpublish":
                allocator.unpublish(lease)
            elif action == "release":
                allocator.release(lease)
                leases.remove(lease)
        allocator.check()
    for lease in leases:
        allocator.release(lease)
    allocator.check()
    assert allocator.available_tiles == allocator.num_tiles
