"""Throughput of generation on this GPU: the CUDA runner under the scheduler and the sampler, whole jobs.

    python -m sits_plugins.compile 90 BUNDLE 'fp16_g128_sym|fp16_fp16_d128|fused'     (on any machine)
    python scripts/bench_generate.py --bundle BUNDLE [--batch 1 8 64] [--profile]

A job is `batch` requests of 2048 random tokens that come at once and are answered greedily with 128 tokens each, for a
model in the shape of Llama-3-8B with random INT4 weights in groups of 128 and a 16-bit head. Its throughput is the
answers' tokens over the time of the whole job, prefill included. Beside it stand the rates that TensorRT-LLM 0.15's
engines are published with for this job on one H200. The roofline is that of the steps that were run: copy bandwidth and
cuBLAS's rate as measured here, each weight and each key and value moved once. Medians over the jobs, and over the steps
that decode the full batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch
from bench_timing import copy_bytes_per_us
from generation_cost import CostModel, cublas_flops_per_us
from generation_profile import profile
from random_model import FORMAT, llama_8b, random_decoder
from sits_plugins.bundle import KernelBundle
from sits_plugins.launch import BundleLauncher

from sits_trt.contract import EngineLimits
from sits_trt.runtime.batch import build_inputs
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.runtime.runners.base import Runner
from sits_trt.runtime.runners.cuda import CudaRunner, is_decode
from sits_trt.runtime.sampler import sample
from sits_trt.runtime.scheduler import Scheduler
from sits_trt.runtime.sequence import Sequence
from sits_trt.runtime.step import Step, StepInputs
from sits_trt.spec import TileSpec

PROMPT_TOKENS, ANSWER_TOKENS = 2048, 128
WARM_UP_TOKENS = 4
JOBS = 3
REPLAYS = 20
PUBLISHED = {1: (231.8, 173.8), 8: (599.7, 803.1), 64: (1392.8, 1679.7)}
"""Batch -> tokens/s of the TensorRT-LLM 0.15 engines with INT4 AWQ and BF16: ModelOpt's benchmark page."""

PARTS = ("schedule", "arrays", "enqueue", "sample", "apply")
"""What a step is made of on the host; `sample` waits for the GPU."""


@dataclass
class Timed:
    """One step: its cost, its arrays, and the time of each of PARTS in microseconds."""

    step: Step
    inputs: StepInputs
    parts_us: tuple[float, ...]

    @property
    def total_us(self) -> float:
        return sum(self.parts_us)


@dataclass
class Job:
    """A job that was run: its time, and its steps."""

    wall_s: float = 0.0
    steps: list[Timed] = field(default_factory=list)

    def decodes(self, batch: int) -> list[Timed]:
        """The steps that advance `batch` sequences by one token each."""
        return [one for one in self.steps if is_decode(one.inputs) and len(one.step.advances) == batch]

    def prefills(self) -> list[Timed]:
        return [one for one in self.steps if not is_decode(one.inputs)]


def run_job(runner: Runner, tile: TileSpec, limits: EngineLimits, batch: int, answer_tokens: int) -> Job:
    """Run a job to its end, as `runtime.executor` does it. Prompts are new each time: none shares a tile."""
    prompts = [tuple(random.randrange(runner.vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(batch)]
    scheduler, job, clock = Scheduler(tile, limits, runner.num_tiles), Job(), time.perf_counter_ns
    began = clock()
    for key, prompt in enumerate(prompts):
        request = Request(str(key), prompt, SamplingParams(answer_tokens))
        scheduler.add(Sequence(key, request, runner.vocab_size, (), None, tile.tile_tokens, time.monotonic_ns()))
    while scheduler.busy:
        marks = [clock()]
        step = scheduler.schedule()
        marks.append(clock())
        inputs = build_inputs(step)
        marks.append(clock())
        logits = runner.run(inputs)
        marks.append(clock())
        result = sample(step, logits)
        marks.append(clock())
        scheduler.apply(result)
        marks.append(clock())
        assert not result.errors, result.errors
        parts = tuple((end - begin) / 1000 for begin, end in pairwise(marks))
        job.steps.append(Timed(step, inputs, parts))
    job.wall_s = (clock() - began) / 1e9
    assert scheduler.meters.generated_tokens == batch * answer_tokens
    assert scheduler.meters.cached_tokens == 0
    return job


def replay_us(runner: Runner, inputs: StepInputs) -> float:
    """Return the time of one step on the GPU, when the next one is always waiting for it."""
    # A first round, for the page-locked memory that so many runs on their way hold: its allocation waits for the GPU.
    for _ in range(REPLAYS):
        runner.run(inputs)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        runner.run(inputs)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / REPLAYS


def row(jobs: list[Job], batch: int, costs: CostModel, copy_rate: float, flops_rate: float, decode_us: float) -> str:
    """Return the row of one batch size in the table."""
    rate = batch * ANSWER_TOKENS / statistics.median(job.wall_s for job in jobs)
    floors = [sum(costs.of(one.step).floor_us(copy_rate, flops_rate) for one in job.steps) for job in jobs]
    roofline = batch * ANSWER_TOKENS / statistics.median(floors) * 1e6
    prefills = [one for job in jobs for one in job.prefills()]
    prefill_us = sum(one.total_us for one in prefills)
    tflops = sum(costs.of(one.step).flops for one in prefills) / prefill_us / 1e6
    decodes = [one for job in jobs for one in job.decodes(batch)]
    step_us = statistics.median(one.total_us for one in decodes)
    floor_us = statistics.median(costs.of(one.step).floor_us(copy_rate, flops_rate) for one in decodes)
    parts = [statistics.median(one.parts_us[index] for one in decodes) for index in range(len(PARTS))]
    int4, bf16 = PUBLISHED.get(batch, (float("nan"), float("nan")))
    cells = (
        batch, f"{rate:.1f}", f"{rate / int4:.2f}×", f"{rate / bf16:.2f}×", f"{roofline:.0f}", f"{rate / roofline:.0%}",
        f"{prefill_us / len(jobs) / 1000:.1f}", f"{tflops:.0f}", f"{step_us / 1000:.3f}", f"{decode_us / 1000:.3f}",
        f"{floor_us / 1000:.3f}", " / ".join(f"{part:.0f}" for part in parts),
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


HEADER = (
    "batch", "tokens/s", "TensorRT-LLM INT4", "its BF16", "roofline tokens/s", "of it", "prefill ms", "TFLOP/s",
    "decode ms a step", "of it GPU", "roofline ms", f"{' / '.join(PARTS)} us",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="a directory of compiled kernels for this GPU")
    parser.add_argument("--batch", type=int, nargs="+", default=sorted(PUBLISHED))
    parser.add_argument(
        "--step-tokens", type=int, default=8256, help="new tokens of one step: 8192, and 64 that decode"
    )
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a decode and a prefill step")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    began = time.perf_counter()
    copy_rate, flops_rate = copy_bytes_per_us(), cublas_flops_per_us()
    torch.cuda.empty_cache()
    spec, most = llama_8b(num_positions=PROMPT_TOKENS + ANSWER_TOKENS), max(args.batch)
    tile = TileSpec.of(spec)
    num_tiles = most * tile.tiles_for(spec.max_positions)
    limits = EngineLimits(most, max(args.step_tokens, most), spec.max_positions, num_tiles)
    launcher = BundleLauncher(KernelBundle.load(args.bundle))
    runner = CudaRunner(random_decoder(spec, "cuda"), tile, num_tiles, limits, launcher)
    costs = CostModel(spec, tile, FORMAT)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}; device copy "
        f"{copy_rate / 1e6:.2f} TB/s, cuBLAS {flops_rate / 1e6:.0f} TFLOP/s; steps of up to {args.step_tokens} tokens; "
        f"ready in {time.perf_counter() - began:.0f} s\n"
    )
    print(f"| {' | '.join(HEADER)} |{chr(10)}{'|---' * len(HEADER)}|", flush=True)
    profiles = []
    for batch in sorted(args.batch):
        run_job(runner, tile, limits, batch, WARM_UP_TOKENS)
        jobs = [run_job(runner, tile, limits, batch, ANSWER_TOKENS) for _ in range(JOBS)]
        decode = jobs[-1].decodes(batch)[-1]
        print(row(jobs, batch, costs, copy_rate, flops_rate, replay_us(runner, decode.inputs)), flush=True)
        if args.profile:
            for what, one in (("decode", decode), ("prefill", jobs[-1].prefills()[0])):
                title = f"{what} step of the job of {batch}, {one.step.num_tokens} tokens"
                profiles.append(profile(title, runner, one.step, one.inputs))
    print("", *profiles, sep="\n")


if __name__ == "__main__":
    main()
