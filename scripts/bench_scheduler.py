"""What one step of the executor's loop costs beside the runner: scheduling, arrays, sampling, text.

    python scripts/bench_scheduler.py [--batch 64] [--steps 400] [--tokenizer DIR]

Logits are random and made once; no model is run. Figures are medians over the decode steps, in microseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch

from sits_trt.checkpoint.tokenizer import load_tokenizer
from sits_trt.contract import EngineLimits
from sits_trt.runtime.batch import build_inputs
from sits_trt.runtime.detokenizer import Detokenizer
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.runtime.sampler import sample
from sits_trt.runtime.scheduler import Scheduler
from sits_trt.runtime.sequence import Sequence
from sits_trt.spec import TileSpec

SAMPLINGS = {
    "greedy": SamplingParams(4096),
    "top_p": SamplingParams(4096, temperature=0.8, top_p=0.9, top_k=50),
    "penalties": SamplingParams(4096, temperature=0.8, repetition_penalty=1.1, presence_penalty=0.1),
}


def measure(sampling: SamplingParams, batch: int, prompt: int, steps: int, vocab: int, tokenizer: Path | None) -> None:
    tile = TileSpec(num_layers=30, num_kv_heads=3, head_dim=64)
    limits = EngineLimits(batch, 2048, 8192, batch * tile.tiles_for(8192))
    scheduler = Scheduler(tile, limits, limits.num_tiles)
    rng = random.Random(0)
    text = load_tokenizer(tokenizer) if tokenizer else None
    for key in range(batch):
        ids = tuple(rng.randrange(vocab) for _ in range(prompt))
        request = Request(str(key), ids, sampling)
        detokenizer = Detokenizer(text, text.byte_token_ids) if text else None
        scheduler.add(Sequence(key, request, vocab, (), detokenizer, tile.tile_tokens, time.monotonic_ns()))
    logits = torch.randn(batch, vocab)
    parts: dict[str, list[int]] = {"schedule": [], "arrays": [], "sample": [], "apply": []}
    clock = time.perf_counter_ns
    while len(parts["apply"]) < steps:
        # Another order of rows in each step, so that answers differ from token to token.
        shuffled = logits[torch.randperm(batch)]
        began = clock()
        step = scheduler.schedule()
        scheduled = clock()
        build_inputs(step)
        built = clock()
        result = sample(step, shuffled[: len(step.draws)])
        sampled = clock()
        scheduler.apply(result)
        times = (scheduled - began, built - scheduled, sampled - built, clock() - sampled)
        if len(step.draws) == batch:
            for part, taken in zip(parts, times, strict=True):
                parts[part].append(taken)
    medians = {part: statistics.median(values) / 1000 for part, values in parts.items()}
    without = sum(value for part, value in medians.items() if part != "sample")
    shown = "  ".join(f"{part} {value:7.1f}" for part, value in medians.items())
    print(f"batch {batch}  vocab {vocab}  {shown}  without sampling {without:7.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--tokenizer", type=Path, help="a Hugging Face directory: text is made too")
    args = parser.parse_args()
    for name, sampling in SAMPLINGS.items():
        print(f"{name:10}", end="")
        measure(sampling, args.batch, args.prompt, args.steps, args.vocab, args.tokenizer)


if __name__ == "__main__":
    main()
