import numpy as np

from sits_trt.runtime.uniforms import uniforms

MASK = 2**64 - 1


def slow(seed: int, draw: int) -> float:
    """The same in plain integers: SplitMix64 stepped one by one."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    state = mix(seed)
    for _ in range(draw + 1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
    return (mix(state) >> 12) * 2.0**-52


def test_equals_the_integer_recurrence() -> None:
    seeds = [0, 1, 2, 2**63, MASK, 0x9E3779B97F4A7C15]
    draws = [0, 1, 5, 77, 3, 200]
    assert uniforms(seeds, draws).tolist() == [slow(seed, draw) for seed, draw in zip(seeds, draws, strict=True)]


def test_a_row_does_not_depend_on_the_others() -> None:
    alone = uniforms([7], [3])[0]
    assert uniforms([1, 7, 2**64 - 1], [9, 3, 0])[1] == alone


def test_b43_near_seeds_have_different_uniform_streams() -> None:
    count = 4000
    streams = np.array([uniforms([seed] * count, range(count)) for seed in (0, 1, 2, 2**63, 0x9E3779B97F4A7C15)])
    assert streams.min() >= 0
    assert streams.max() < 1
    # Each mean is 1/2 with a standard deviation of 0.0046; correlations have one of 0.016. Five of them are allowed.
    assert np.abs(streams.mean(axis=1) - 0.5).max() < 0.023
    assert np.abs(np.corrcoef(streams) - np.eye(5)).max() < 0.08
    assert len(np.unique(streams)) == streams.size
