"""The tile policy: the rule of thumb at its corners, and the measured choice."""

from __future__ import annotations

import pytest

from sits_trt.kernels.tile_policy import TileShape, measured_tile_tokens, rule_of_thumb


@pytest.mark.parametrize(
    ("context_tokens", "free_memory_gb", "tokens"),
    [
        (1, 80, 128), (8191, 24, 128), (8192, 24, 64), (100_000, 141, 64),
        (4096, 23.9, 64), (4096, 12, 64), (4096, 11.9, 32), (4096, 0.5, 32), (9000, 12, 32), (9000, 1, 32),
    ],
)  # fmt: skip
def test_rule_of_thumb(context_tokens, free_memory_gb, tokens):
    assert rule_of_thumb(context_tokens, free_memory_gb) == TileShape(tokens, tokens)


def test_mixed_contexts_have_their_own_shape():
    assert rule_of_thumb(100, 1, mixed_modalities=True) == TileShape(96, 48)


@pytest.mark.parametrize(("context_tokens", "free_memory_gb"), [(0, 24), (-1, 24), (100, 0)])
def test_sizes_must_be_positive(context_tokens, free_memory_gb):
    with pytest.raises(ValueError, match="must be positive"):
        rule_of_thumb(context_tokens, free_memory_gb)


def test_measured_choice_is_a_tile_that_the_kernels_take():
    assert {measured_tile_tokens(n, c) for n in (1, 64, 256) for c in (100, 5000, 100_000)} == {32, 64}
