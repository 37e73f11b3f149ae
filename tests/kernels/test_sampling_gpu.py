"""The sampling kernels on a real GPU, against the draw by the book and the sampler in torch on the same GPU."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from sits_trt.kernels.sampling import draw_tokens
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.runtime.sampler import sample
from sits_trt.runtime.sampling import plan_sampling
from sits_trt.runtime.step import Advance, Step
from tests.support.gpu_launcher import gpu_launcher
from tests.support.sampling import acceptable, random_settings, settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOP_KS = (0, 2, 50, 400, 3000)
VOCABS = (5, 4096, 50257, 128256, 262208)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    return gpu_launcher(
        tmp_path_factory.mktemp("kernels"), lambda name: name.startswith(("fused_maxima", "fused_weights", "fused_tok"))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 40.0])
def test_every_row_is_drawn_as_by_the_book(launcher, dtype, vocab, spread):
    """Rows from flat, which no list holds, to steep; all the same again with another split, alone and in a graph."""
    rng = random.Random(f"{dtype} {vocab} {spread}")
    rows = [random_settings(rng, vocab, TOP_KS) for _ in range(12)]
    logits = (torch.randn(12, vocab, device="cuda") * spread).to(dtype)
    placed = settings(rows).cuda()
    got = draw_tokens(launcher, logits, placed)
    for row, token in enumerate(got.tolist()):
        assert token in acceptable(logits[row], *rows[row]), rows[row]
    alone = [draw_tokens(launcher, logits[row].clone()[None], placed[row : row + 1]) for row in range(12)]
    assert torch.equal(torch.cat(alone), got)
    crowd = draw_tokens(launcher, logits.repeat(50, 1), placed.repeat(50, 1))
    assert torch.equal(crowd, got.repeat(50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw_tokens(launcher, logits, placed)
    for _ in range(3):
        captured.fill_(-7)
        graph.replay()
        assert torch.equal(captured, got)


def test_rows_of_every_length_near_a_block_are_taken(launcher):
    for vocab in (1, 15, 16, 17, 255, 257, 4095, 4097, 8191, 8193, 12305):
        logits = torch.randn(3, vocab, device="cuda")
        rows = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 1 - 2**-52), (1.0, min(3, vocab - 1), 0.9, 0.6)]
        got = draw_tokens(launcher, logits, settings(rows).cuda()).tolist()
        for row, token in enumerate(got):
            assert token in acceptable(logits[row], *rows[row]), (vocab, rows[row])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_largest_logit_is_minus_one(launcher, temperature):
    logits = torch.randn(5, 50000, device="cuda")
    logits[0, 49999] = math.nan
    logits[1, 7] = math.inf
    logits[2] = -math.inf
    logits[3, :49999] = -math.inf
    for top_k, top_p in ((0, 1.0), (3, 0.9), (0, 0.9)):
        got = draw_tokens(launcher, logits, settings([(temperature, top_k, top_p, 0.5)] * 5).cuda()).tolist()
        assert got[:4] == [-1, -1, -1, 49999]
        assert got[4] >= 0
    assert draw_tokens(launcher, logits, settings([(0.0, 0, 1.0, 0.0)] * 5).cuda(), largest_only=True).tolist()[:4] == [
        -1,
        -1,
        -1,
        49999,
    ]


@pytest.mark.parametrize(("top_k", "kept"), [(0, 5), (3, 3)])
def test_frequencies_follow_the_distribution(launcher, top_k, kept):
    probabilities = torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05])
    count = 20000
    logits = torch.full((count, 5000), -math.inf, device="cuda")
    logits[:, 4090:4100:2] = probabilities.log().cuda()
    rows = settings([(1.0, top_k, 1.0, random.random()) for _ in range(count)]).cuda()
    drawn = torch.bincount(draw_tokens(launcher, logits, rows), minlength=5000)[4090:4100:2].tolist()
    assert sum(drawn) == count
    for token, times in enumerate(drawn):
        expected = probabilities[token].item() / probabilities[:kept].sum().item() if token < kept else 0.0
        # Five standard deviations of a binomial count.
        assert abs(times - count * expected) <= 5 * math.sqrt(count * expected * (1 - expected))


def test_the_sampler_draws_the_same_with_the_kernels_and_in_torch(launcher):
    vocab, rng = 128256, random.Random(5)
    logits = torch.randn(64, vocab, device="cuda") * 3
    plans = [
        SamplingParams(
            9, temperature=rng.choice([0.0, 0.7, 1.0, 1.5]), top_k=rng.choice([0, 50, 800, 40000]),
            top_p=rng.choice([1.0, 0.9, 0.5]), seed=rng.randrange(2**64),
        )
        for _ in range(64)
    ]  # fmt: skip
    advances = [
        Advance(key, (1,), 0, np.zeros(1, np.int32), plan_sampling(Request("", (1,), params), vocab, ()), draw=key)
        for key, params in enumerate(plans)
    ]
    drawn_from = []

    def draw(shaped: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        drawn_from.extend(rows.tolist())
        return draw_tokens(launcher, shaped, torch.from_numpy(rows).cuda())

    step = Step(0, tuple(advances))
    ours, theirs = sample(step, logits, draw), sample(step, logits)
    for key, (temperature, top_k, top_p, point) in enumerate(drawn_from):
        tokens = {ours.tokens[key], theirs.tokens[key]}
        # Alike, or the point lies at an edge.
        assert len(tokens) == 1 or tokens <= acceptable(logits[key], temperature, int(top_k), top_p, point)
