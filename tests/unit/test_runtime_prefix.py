import random

from sits_trt.runtime.prefix import chain_names


def test_names_say_all_tokens_up_to_their_tile() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(150_000) for _ in range(40)]
    names = chain_names(ids, 16)
    assert len(names) == 2
    assert chain_names(ids[:32], 16) == names
    assert chain_names(ids[:31], 16) == names[:1]
    assert chain_names(ids[:15], 16) == []
    for place in (0, 7, 15):
        other = ids.copy()
        other[place] += 1
        changed = chain_names(other, 16)
        assert changed[0] != names[0]
        assert changed[1] != names[1], "a tile's name depends on all tokens before it"
    other = ids.copy()
    other[20] += 1
    assert chain_names(other, 16)[0] == names[0]
    assert chain_names(other, 16)[1] != names[1]


def test_a_chain_can_be_continued() -> None:
    ids = list(range(100, 148))
    names = chain_names(ids, 16)
    assert chain_names(ids[16:], 16, names[0]) == names[1:]
    assert chain_names(ids[16:], 16) != names[1:]
