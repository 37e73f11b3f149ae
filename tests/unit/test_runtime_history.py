import random
from collections import Counter

from sits_trt.runtime.history import TokenCounts


def test_counts_equal_those_made_from_scratch() -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(30) for _ in range(40)]
    counts, answer = TokenCounts(prompt, 60), []
    for _ in range(60):
        answer.append(rng.randrange(50))
        counts.add(answer[-1])
        tokens, times = counts.snapshot()
        assert len(set(tokens.tolist())) == len(tokens)
        assert set(tokens.tolist()) == set(prompt) | set(answer)
        said = Counter(answer)
        assert times.tolist() == [said[token] for token in tokens.tolist()]


def test_a_snapshot_stays_as_it_was_taken() -> None:
    counts = TokenCounts((7, 3, 7), 2)
    before = counts.snapshot()
    counts.add(3)
    counts.add(9)
    assert (before.tokens.tolist(), before.counts.tolist()) == ([3, 7], [0, 0])
    after = counts.snapshot()
    assert (after.tokens.tolist(), after.counts.tolist()) == ([3, 7, 9], [1, 0, 1])
