"""Rows of the kernel benchmark for the fused small kernels and the sampling, against torch's separate operations.

Inputs of few tokens stay in the L2 cache, as they do in a decoder, whose kernel before has just written them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from bench_timing import Row, graph_us, rotation
from sits_plugins.fused_enqueue import Launches
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from sits_trt.kernels.fused import add_norm, silu_mul
from sits_trt.kernels.sampling import draw_tokens
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.runtime.sampler import Draw, draw_settings, sample
from sits_trt.runtime.sampling import plan_sampling
from sits_trt.runtime.step import Advance, Step

HIDDEN, INTERMEDIATE, VOCAB = 4096, 14336, 128256
TOKENS = (1, 64, 2048)
EPS = 1e-5
MOST_SETS = 256
SAMPLINGS = {
    "greedy": SamplingParams(9),
    "temperature": SamplingParams(9, temperature=0.8, seed=1),
    "top-k 50, top-p 0.9": SamplingParams(9, temperature=0.8, top_k=50, top_p=0.9, seed=1),
    "top-p 0.9": SamplingParams(9, temperature=0.8, top_p=0.9, seed=1),
}
SPREADS = {"steep": 3.0, "flat": 1.0}
"""Standard deviations of normal logits. At a temperature of 0.8, top-p of 0.9 leaves some 1300 tokens of steep rows,
found among 17000 that are listed, and half of the flat ones, which are more than a list holds."""


def bench(launcher: Launches, copy_bytes_per_us: float) -> list[Row]:
    """Return the rows of norm, SiLU times up, and sampling."""
    rows = [norm_row(launcher, tokens, copy_bytes_per_us) for tokens in TOKENS]
    rows += [silu_row(launcher, tokens, copy_bytes_per_us) for tokens in TOKENS]
    for count in (1, 64):
        rows += [
            sampling_row(launcher, count, name, spread, copy_bytes_per_us)
            for name in SAMPLINGS
            for spread in (SPREADS if name == "top-p 0.9" else ("steep",))
        ]
    return rows


def sets_of(buffer_bytes: float) -> int:
    """Return the number of buffer sets: enough to be cold, or as many as launches of a graph should be."""
    return min(MOST_SETS, rotation(buffer_bytes))


def norm_row(launcher: Launches, tokens: int, copy_bytes_per_us: float) -> Row:
    """Time residual add, ScaleRecover and RMSNorm in one kernel, and as torch's operations."""
    moved = 4 * tokens * HIDDEN * 2 + 2 * HIDDEN * 2
    sets = sets_of(moved)
    residual, delta = (list(torch.randn(sets, tokens, HIDDEN, device="cuda").half()) for _ in range(2))
    # One half: however often a graph is replayed, the residual stays as large as delta.
    recover, weight = torch.full((HIDDEN,), 0.5, device="cuda").half(), torch.rand(HIDDEN, device="cuda").half()

    def separate(index: int) -> Tensor:
        x = residual[index].add_(delta[index]).mul_(recover)
        return rms_norm(x, (HIDDEN,), weight, EPS)

    ours = graph_us(lambda i: add_norm(launcher, residual[i], weight, EPS, delta[i], recover), sets)
    torch_us = graph_us(separate, sets)
    alone_us = graph_us(lambda i: rms_norm(residual[i], (HIDDEN,), weight, EPS), sets)
    figures: dict[str, float | str] = {
        "of copy bandwidth": moved / ours / copy_bytes_per_us, "x torch": torch_us / ours, "torch us": torch_us,
        "rms_norm alone us": alone_us,
    }  # fmt: skip
    return Row("add, recover, RMSNorm", f"{tokens} x {HIDDEN}", ours, figures)


def silu_row(launcher: Launches, tokens: int, copy_bytes_per_us: float) -> Row:
    """Time SiLU of the gate times up in one kernel, and as torch's operations."""
    moved = 3 * tokens * INTERMEDIATE * 2
    sets = sets_of(moved)
    both = list(torch.randn(sets, tokens, 2 * INTERMEDIATE, device="cuda").half())

    def separate(index: int) -> Tensor:
        gate, up = both[index].chunk(2, dim=-1)
        return silu(gate) * up

    ours, torch_us = graph_us(lambda i: silu_mul(launcher, both[i]), sets), graph_us(separate, sets)
    figures: dict[str, float | str] = {
        "of copy bandwidth": moved / ours / copy_bytes_per_us, "x torch": torch_us / ours, "torch us": torch_us,
    }  # fmt: skip
    return Row("SiLU x up", f"{tokens} x {INTERMEDIATE}", ours, figures)


def sampling_row(launcher: Launches, count: int, name: str, spread: str, copy_bytes_per_us: float) -> Row:
    """Time the kernels in a graph, and the whole of `sample`, waiting for its tokens, with them and in torch."""
    moved = count * VOCAB * 4
    sets = sets_of(moved)
    logits = [torch.randn(count, VOCAB, device="cuda") * SPREADS[spread] for _ in range(sets)]
    plan = plan_sampling(Request("", (1,), SAMPLINGS[name]), VOCAB, ())
    step = Step(0, tuple(Advance(row, (1,), 0, np.zeros(1, np.int32), plan, draw=row) for row in range(count)))
    settings = torch.from_numpy(draw_settings([plan] * count, range(count))).cuda()
    ours = graph_us(lambda i: draw_tokens(launcher, logits[i], settings, plan.greedy), sets)

    def draw(shaped: Tensor, rows: np.ndarray) -> Tensor:
        return draw_tokens(launcher, shaped, torch.from_numpy(rows).cuda(), plan.greedy)

    with_kernels, in_torch = (sample_us(step, logits, how) for how in (draw, None))
    figures: dict[str, float | str] = {
        "of copy bandwidth": moved / ours / copy_bytes_per_us, "x torch": in_torch / with_kernels,
        "sample() us": with_kernels, "sample() in torch us": in_torch,
    }  # fmt: skip
    rows = f", {spread}" if name == "top-p 0.9" else ""
    return Row("sampling", f"{count} x {VOCAB}, {name}{rows}", ours, figures)


def sample_us(step: Step, logits: list[Tensor], draw: Draw | None) -> float:
    """Return the median time of a call of `sample`, host and device, in microseconds."""
    calls: list[Callable[[], object]] = [partial(sample, step, logits[i % len(logits)], draw) for i in range(23)]
    times = []
    for call in calls:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times[3:])
