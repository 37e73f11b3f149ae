"""RoPE frequencies by kind, the table, and the rotation."""

from __future__ import annotations

import math

import pytest
import torch

from sits_trt.errors import CheckpointError
from sits_trt.ops.rope import apply_rope, inverse_frequencies, rope_table
from sits_trt.spec import RopeSpec

LLAMA3 = RopeSpec("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)


def test_b09_frequencies_of_each_kind() -> None:
    assert inverse_frequencies(RopeSpec(theta=1e4), 16)[:3].tolist() == pytest.approx([1.0, 10**-0.5, 0.1])
    assert inverse_frequencies(RopeSpec("linear", 1e4, factor=4.0), 16)[0].item() == 0.25
    assert inverse_frequencies(RopeSpec(theta=5e5), 16)[1].item() == pytest.approx(0.19392, abs=5e-6)
    assert inverse_frequencies(LLAMA3, 16)[1].item() == pytest.approx(0.02424, abs=5e-6)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    scaled, plain = inverse_frequencies(LLAMA3, 64), inverse_frequencies(RopeSpec(theta=5e5), 64)
    ratio = plain / scaled
    wavelength = 2 * math.pi / plain
    assert torch.allclose(ratio[wavelength < 32 / 4], torch.ones(1))
    assert torch.allclose(ratio[wavelength > 32 / 1], torch.full((1,), 8.0))
    between = ratio[(wavelength >= 8) & (wavelength <= 32)]
    assert ((between >= 1) & (between <= 8)).all()
    assert between.numel() > 1


def test_b09_unknown_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'yarm'"):
        inverse_frequencies(RopeSpec("yarm"), 16)


def test_rotation_keeps_lengths_and_turns_by_relative_position() -> None:
    table = rope_table(RopeSpec(), 8, 64)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(at: int, other: int) -> float:
        return float((apply_rope(q, table[at : at + 1]) * apply_rope(k, table[other : other + 1])).sum())

    assert score(9, 4) == pytest.approx(score(40, 35), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(40, 33), abs=1e-4)
    assert apply_rope(q, table[50:51]).norm().item() == pytest.approx(q.norm().item(), abs=1e-5)
    assert torch.equal(apply_rope(q, table[:1]), q)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    rope = RopeSpec("yarn", 1e4, factor=4.0, original_max_position=4096)
    ratio = inverse_frequencies(RopeSpec(theta=1e4), 128) / inverse_frequencies(rope, 128)
    turns = 4096 * inverse_frequencies(RopeSpec(theta=1e4), 128) / (2 * math.pi)
    # The borders are rounded outwards to whole pairs.
    assert torch.allclose(ratio[turns > 32 * 1.2], torch.ones(1))
    assert torch.allclose(ratio[turns < 1 / 1.2], torch.full((1,), 4.0), rtol=1e-4)
    assert (ratio.diff() >= -1e-5).all()


def test_kinds_that_depend_on_the_length() -> None:
    dynamic = RopeSpec("dynamic", 1e4, factor=4.0, original_max_position=64)
    plain = inverse_frequencies(RopeSpec(theta=1e4), 16)
    assert torch.allclose(inverse_frequencies(dynamic, 16, 64), plain)
    longer = inverse_frequencies(dynamic, 16, 128)
    assert longer[0] == plain[0]
    assert (longer[1:] < plain[1:]).all()
    longrope = RopeSpec("longrope", 1e4, original_max_position=64, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
    assert torch.equal(inverse_frequencies(longrope, 16, 64), plain)
    assert torch.equal(inverse_frequencies(longrope, 16, 65), plain / 2)
