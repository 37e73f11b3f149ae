"""Prompts of exact length and arrival times."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from sits_trt.errors import SitsError
from sits_trt.sweep.workload import Load, arrival_offsets_s, make_prompts


class PairTokenizer:
    """Two characters a token, so that a window cut at an odd place encodes differently; one special token in front."""

    bos = 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(text[i]) * 0x110000 + (ord(text[i + 1]) if i + 1 < len(text) else 0) for i in range(0, len(text), 2)]
        return [self.bos, *ids] if add_special_tokens else ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i // 0x110000) + (chr(i % 0x110000) if i % 0x110000 else "") for i in ids if i != self.bos)


class GrowingTokenizer(PairTokenizer):
    """Never gives the length that it is asked for."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = super().encode(text, add_special_tokens)
        return [*ids, *ids[: len(ids) % 2 + 1]] if add_special_tokens else ids


@pytest.mark.parametrize("length", [1, 7, 128, 1000])
def test_prompts_have_exactly_the_asked_length_and_differ_from_the_start(length: int) -> None:
    tokenizer = PairTokenizer()
    prompts = make_prompts(tokenizer, 12, length + 1, seed=3)
    assert [len(tokenizer.encode(prompt)) for prompt in prompts] == [length + 1] * 12
    assert len({prompt[:20] for prompt in prompts}) == 12


def test_prompts_follow_the_seed() -> None:
    first = make_prompts(PairTokenizer(), 5, 20, seed=1)
    assert make_prompts(PairTokenizer(), 5, 20, seed=1) == first
    assert not set(make_prompts(PairTokenizer(), 5, 20, seed=2)) & set(first)


def test_prompts_that_cannot_be_cut_are_one_clear_error() -> None:
    with pytest.raises(SitsError, match="do not fit the built-in text"):
        make_prompts(PairTokenizer(), 1, 10_000_000, seed=0)
    with pytest.raises(SitsError, match="0 of 2 different prompts of 20 tokens"):
        make_prompts(GrowingTokenizer(), 2, 20, seed=0)


@pytest.mark.parametrize(("cv", "low", "high"), [(0.1, 0.09, 0.11), (1.0, 0.9, 1.1), (3.0, 2.6, 3.4)])
def test_arrivals_have_the_asked_rate_and_burstiness(cv: float, low: float, high: float) -> None:
    offsets = arrival_offsets_s(Load(requests_per_s=20.0, arrival_cv=cv), 20_001, seed=5)
    gaps = [later - earlier for earlier, later in pairwise(offsets)]
    assert offsets[0] == 0
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.08)
    assert low < statistics.stdev(gaps) / statistics.fmean(gaps) < high


def test_arrivals_follow_the_seed() -> None:
    load = Load(requests_per_s=2.5)
    assert arrival_offsets_s(load, 9, seed=1) == arrival_offsets_s(load, 9, seed=1)
    assert arrival_offsets_s(load, 9, seed=1) != arrival_offsets_s(load, 9, seed=2)


def test_load_names() -> None:
    assert [Load(concurrency=1).label, Load(concurrency=16).label] == ["1 stream", "16 streams"]
    assert (Load(requests_per_s=2.5).label, Load(requests_per_s=2.5).key) == ("2.5 requests/s", "r2.5")
