"""The sampling kernels, run by OpenAI Triton's interpreter, against the draw by the book and the sampler in torch."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from sits_plugins.compile import SMS, compile_bundle
from sits_plugins.fused_catalogue import kernels
from sits_plugins.fused_enqueue import MAX_VOCAB, enqueue_sampling, sampling_workspace

from sits_trt.errors import PluginError
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.runtime.sampler import sample
from sits_trt.runtime.sampling import plan_sampling
from sits_trt.runtime.step import Advance, Step
from tests.support.interpreter import interpreted
from tests.support.recording_launcher import RecordingLauncher
from tests.support.sampling import EPSILON, acceptable, random_settings, settings

fused = interpreted("sits_plugins.fused_sampling")

BLOCK, GROUP, MAX_BLOCKS = 64, 16, 16
"""Small, so that short rows have many blocks."""

TOP_KS = (0, 0, 2, 5, 50)


def run(logits: torch.Tensor, rows: torch.Tensor, pieces: int = 3, capacity: int = 128) -> list[int]:
    """Run the three kernels on poisoned memory; return the tokens."""
    count, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    groups = blocks * (BLOCK // GROUP)
    maxima, best = (torch.full((count, size), math.nan) for size in (groups, MAX_BLOCKS))
    best_ids = torch.full((count, MAX_BLOCKS), -7, dtype=torch.int32)
    masses = torch.full((count, MAX_BLOCKS), -7, dtype=torch.int64)
    collected = torch.full((count,), -7, dtype=torch.int32)
    listed = torch.full((count, capacity), math.nan), torch.full((count, capacity), -7, dtype=torch.int32)
    tokens = torch.full((count,), -7, dtype=torch.int64)
    fused.row_maxima[(blocks, count)](
        logits, maxima, best, best_ids, collected, vocab, groups, BLOCK=BLOCK, GROUP=GROUP, MAX_BLOCKS=MAX_BLOCKS
    )
    fused.weigh_rows[(pieces, count)](
        logits, rows, maxima, masses, collected, *listed, vocab, groups, blocks,
        BLOCK=BLOCK, MAX_BLOCKS=MAX_BLOCKS, MAX_GROUPS=MAX_BLOCKS * BLOCK // GROUP, CAPACITY=capacity,
    )  # fmt: skip
    fused.pick_tokens[(count,)](
        logits, rows, best, best_ids, masses, collected, *listed, tokens, vocab, blocks,
        BLOCK=BLOCK, MAX_BLOCKS=MAX_BLOCKS, CAPACITY=capacity,
    )  # fmt: skip
    return tokens.tolist()


@pytest.mark.parametrize("vocab", [1, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_row_is_drawn_as_by_the_book(vocab, dtype):
    rng = random.Random(f"{vocab} {dtype}")
    loose = 0
    for spread in (0.01, 1.0, 4.0, 40.0):
        logits = (torch.randn(3, vocab) * spread).to(dtype)
        rows = [random_settings(rng, vocab, TOP_KS) for _ in range(3)]
        got = run(logits, settings(rows), capacity=rng.choice([16, 128, 2048]))
        for row, token in enumerate(got):
            accepted = acceptable(logits[row], *rows[row])
            assert token in accepted, (spread, rows[row])
            loose += len(accepted) > 1 and EPSILON < rows[row][3] < 1 - EPSILON
    # Edges are rare: the book is not satisfied by just any token.
    assert loose <= 2


def test_ties_at_the_edge_are_kept_together():
    logits = torch.full((1, 300), -1.0)
    logits[0, [5, 70, 200]] = 2.0
    logits[0, [9, 290]] = 3.0
    for top_k, top_p in ((3, 1.0), (0, 0.05), (5, 0.7), (4, 0.9)):
        rows = settings([(1.0, top_k, top_p, (2 * point + 1) / 14) for point in range(7)])
        drawn = set(run(logits.expand(7, 300).contiguous(), rows, pieces=1))
        # By top-p alone the two most likely ones, together, are enough.
        assert drawn == ({9, 290} if top_k == 0 else {5, 9, 70, 200, 290}), (top_k, top_p)


def test_points_sweep_the_kept_tokens_in_the_order_of_ids():
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.0, 0.3, 0.4]]))
    points = [0.0, 0.099, 0.101, 0.299, 0.301, 0.599, 0.601, 1 - 2**-52]
    rows = settings([(1.0, 0, 1.0, point) for point in points])
    assert run(logits.repeat(len(points), 1), rows) == [0, 0, 1, 1, 3, 3, 4, 4]
    # Top-2 leaves 0.3 and 0.4.
    rows = settings([(1.0, 2, 1.0, point) for point in (0.0, 3 / 7 - 1e-3, 3 / 7 + 1e-3, 0.999)])
    assert run(logits.repeat(4, 1), rows) == [3, 3, 4, 4]


def test_neither_the_split_nor_the_list_nor_the_other_rows_change_a_token():
    rng = random.Random(3)
    logits = torch.randn(5, 700) * 2
    rows = [(1.0, *random_settings(rng, 700, TOP_KS)[1:]) for _ in range(5)]
    together = run(logits, settings(rows))
    for pieces, capacity in ((1, 16), (11, 1024)):
        assert run(logits, settings(rows), pieces, capacity) == together
    for row in range(0, 5, 2):
        assert run(logits[row : row + 1], settings(rows[row : row + 1]), pieces=2) == together[row : row + 1]


def test_the_sampler_draws_the_same_with_the_kernels_and_in_torch():
    logits = torch.randn(6, 300) * 2
    plans = [
        SamplingParams(9),
        SamplingParams(9, temperature=0.8, seed=1),
        SamplingParams(9, temperature=0.8, seed=2, top_k=20, top_p=0.9),
        SamplingParams(9, temperature=1.3, seed=3, top_p=0.7, bad_words=((7,), (8,))),
        SamplingParams(9, temperature=1.0, seed=4, top_k=300),
        SamplingParams(9, temperature=1.0, seed=5, top_k=4),
    ]
    advances = [
        Advance(key, (1,), 0, np.zeros(1, np.int32), plan_sampling(Request("", (1,), params), 300, ()), draw=2)
        for key, params in enumerate(plans)
    ]
    accepted = []

    def draw(shaped: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        accepted.extend(acceptable(row, *setting) for row, setting in zip(shaped, draw_rows(rows), strict=True))
        return torch.tensor(run(shaped, torch.from_numpy(rows)))

    step = Step(0, tuple(advances))
    ours, theirs = sample(step, logits, draw), sample(step, logits)
    for key, edge in enumerate(accepted):
        assert ours.tokens[key] == theirs.tokens[key] or {ours.tokens[key], theirs.tokens[key]} <= edge


def draw_rows(rows: np.ndarray) -> list[tuple[float, int, float, float]]:
    return [(temperature, int(top_k), top_p, point) for temperature, top_k, top_p, point in rows.tolist()]


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_largest_logit_is_minus_one(spoiled, temperature):
    logits = torch.randn(4, 150)
    logits[1, 100] = spoiled
    logits[2] = -math.inf
    logits[3, :149] = -math.inf
    for top_k, top_p in ((0, 1.0), (3, 0.9)):
        got = run(logits, settings([(temperature, top_k, top_p, 0.5)] * 4))
        assert got[1:] == [-1, -1, 149]
        assert got[0] >= 0


def test_extreme_temperatures_and_logits_stay_finite():
    logits = torch.full((3, 200), -30.0)
    logits[:, 11] = 60000.0
    assert run(logits, settings([(1e-5, 0, 1.0, 0.3), (1e-5, 0, 0.9, 0.3), (100.0, 50, 0.9, 0.999)])) == [11] * 3
    assert run(torch.zeros(2, 200), settings([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.5)])) == [0, 100]


def test_enqueue_launches_kernels_of_the_catalogue_with_their_arguments():
    launcher = RecordingLauncher()
    enqueue_sampling(launcher, "float32", 64, 128256, False, 16, 32, 48, 4096, 0)
    enqueue_sampling(launcher, "float16", 1, 50257, False, 16, 32, 48, 4096, 0)
    enqueue_sampling(launcher, "bfloat16", 3, 262208, True, 16, 32, 48, 4096, 0)
    enqueue_sampling(launcher, "bfloat16", 0, 262208, True, 16, 32, 48, 4096, 0)
    assert [(name, grid) for name, grid, _ in launcher.launches] == [
        ("fused_maxima_fp32", (32, 64, 1)), ("fused_weights_fp32", (8, 64, 1)), ("fused_tokens_fp32", (64, 1, 1)),
        ("fused_maxima_fp16_any", (13, 1, 1)), ("fused_weights_fp16_any", (13, 1, 1)), ("fused_tokens_fp16", (1, 1, 1)),
        ("fused_maxima_bf16", (65, 3, 1)), ("fused_tokens_bf16", (3, 1, 1)),
    ]  # fmt: skip
    specs = {spec.name: spec for spec in kernels(80)}
    for name, _, args in launcher.launches:
        spec = specs[name]
        assert {key for key, kind in spec.signature.items() if kind != "constexpr"} <= set(args)
        assert all(args[key] % 16 == 0 for key in spec.aligned), name


def test_intermediate_results_do_not_overlap():
    places = list(vars(sampling_workspace(3, 128256)).values())
    sizes = [4 * 3 * 512, 4 * 3 * 128, 4 * 3 * 128, 8 * 3 * 128, 4 * 3, 4 * 3 * 32768, 4 * 3 * 32768]
    assert all(end - begin >= size for begin, end, size in zip(places, places[1:], sizes, strict=False))
    assert all(place % 256 == 0 for place in places)


def test_a_vocabulary_that_no_kernel_takes_is_refused():
    with pytest.raises(PluginError, match=f"rows of {MAX_VOCAB + 1} are not supported"):
        enqueue_sampling(RecordingLauncher(), "float16", 1, MAX_VOCAB + 1, True, 1, 2, 3, 4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("sm", SMS)
def test_they_compile_for_every_sm(sm, tmp_path):
    names = {f"fused_{kind}_{real}" for kind in ("maxima", "weights", "tokens") for real in ("fp16", "bf16", "fp32")}
    bundle = compile_bundle(sm, tmp_path, wanted=names.__contains__)
    assert set(bundle.kernels) == names
