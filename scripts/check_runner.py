"""The CUDA runner over a kernel bundle against the eager runner, both on this GPU, at the widths of Llama-3-8B.

python -m sits_plugins.compile 90 BUNDLE 'fp16_g128_sym|fp16_fp16_d128|fused'     (on any machine)
python scripts/check_runner.py BUNDLE
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
from random_model import llama_8b, random_decoder
from sits_plugins.bundle import KernelBundle
from sits_plugins.launch import BundleLauncher

from sits_trt.contract import EngineLimits
from sits_trt.runtime.runners.cuda import CudaRunner
from sits_trt.runtime.runners.eager import EagerRunner
from sits_trt.runtime.step import StepInputs
from sits_trt.spec import TileSpec

TILES_PER_SEQ = 40
TOLERANCE = 1e-2
"""Of the norm: float16 through two layers differs by a third of it, any wrong address by all."""

MIXED = [1, 40, 1, 200, 1]
STEPS = (
    [2048, 1, 33, 5, 300] + [7] * 65, [1] * 70, [1] * 64, MIXED + [1] * 60, [1] * 33, [1] * 16, [64, 130, 1],
    [1] * 5, [1] * 3, [1],
)  # fmt: skip
"""New tokens of each sequence, step by step; some leave out the last sequences."""


def step(counts: list[int], contexts: list[int], vocab_size: int, seed: int) -> StepInputs:
    """Return a step of random tokens, each sequence over its own tiles, with logits of each one's last token."""
    starts = np.cumsum([0, *counts], dtype=np.int32)
    table = np.arange(TILES_PER_SEQ * len(counts), dtype=np.int32).reshape(len(counts), TILES_PER_SEQ)
    return StepInputs(
        input_ids=np.random.default_rng(seed).integers(0, vocab_size, starts[-1], dtype=np.int32),
        tile_table=table[:, ::-1].copy(),
        context_lens=np.array(contexts, dtype=np.int32),
        query_starts=starts,
        logit_indices=starts[1:] - 1,
    )


def check(launcher: BundleLauncher) -> None:
    """Run every step through both and compare their logits. Raises AssertionError where they differ."""
    torch.manual_seed(0)
    spec = llama_8b(num_layers=2)
    plain = random_decoder(spec, "cuda")
    taken = copy.deepcopy(plain)
    plain.dequantize_(torch.float16)
    tile, batch = TileSpec.of(spec), len(STEPS[0])
    tiles = batch * TILES_PER_SEQ
    limits = EngineLimits(batch, 4096, TILES_PER_SEQ * tile.tile_tokens, tiles)
    eager, cuda = EagerRunner(plain, tile, tiles), CudaRunner(taken, tile, tiles, limits, launcher)
    contexts = [0] * batch
    for number, counts in enumerate(STEPS):
        inputs = step(counts, contexts[: len(counts)], spec.vocab_size, number)
        theirs, ours = eager.run(inputs), cuda.run(inputs)
        error = float((ours - theirs).norm() / theirs.norm())
        what = f"step {number}: {len(counts)} sequences, {sum(counts)} tokens"
        print(f"{error:.1e} of {TOLERANCE:.0e}  {what}", flush=True)
        assert error < TOLERANCE, what
        contexts[: len(counts)] = [context + count for context, count in zip(contexts, counts, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="a directory of compiled kernels for this GPU")
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    check(BundleLauncher(KernelBundle.load(arguments.bundle)))


if __name__ == "__main__":
    main()
