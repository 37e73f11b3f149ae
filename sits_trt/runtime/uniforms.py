"""Random numbers that depend on a seed and a position only, so that traffic cannot change them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniforms(seeds: Sequence[int], draws: Sequence[int]) -> NDArray[np.float64]:
    """Return number `draws[i]` of the stream of `seeds[i]`, in [0, 1), each of 52 bits.

    seeds: 0 to 2**64-1. draws: 0 upwards. SplitMix64 (Steele, Lea, Flood 2014), whose state after n steps is known
    without taking them. The seed goes through the mixer first, so that near seeds do not share a stream. Fifty-two
    bits and not 53: u * x then is less than x in float64 for every x > 0.
    """
    start = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    steps = np.array([(draw + 1) * _GAMMA & _MASK for draw in draws], dtype=np.uint64)
    return (_mix(start + steps) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
