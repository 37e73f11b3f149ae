"""The CUDA runner on a real GPU against the eager one, through prefill, decode by graph, and mixed steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sits_trt.contract import EngineLimits
from sits_trt.models import build_decoder
from sits_trt.runtime.runners.eager import EagerRunner
from sits_trt.runtime.step import StepInputs
from sits_trt.spec import TileSpec
from tests.support.gpu_launcher import gpu_launcher
from tests.support.quantized import quantize_tensors
from tests.support.tiny import tiny_spec, tiny_tensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# Random weights this wide give scores that spread by 16, so that one key takes everything: rounding then moves logits
# by 2% of their norm, and a lost key often by nothing. A sixteenth of the usual scale makes scores spread by one.
SPEC = tiny_spec(
    hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, attention_scale=1 / 128
)
TOLERANCE = 1e-2
"""Of the norm of a row: float16 through two layers differs by up to 0.4%, one key left out by 3% at least."""


def step(counts: list[int], contexts: list[int], seed: int) -> StepInputs:
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *counts], dtype=np.int32)
    return StepInputs(
        input_ids=rng.integers(1, SPEC.vocab_size, starts[-1], dtype=np.int32),
        tile_table=np.arange(4 * len(counts), dtype=np.int32).reshape(len(counts), 4)[:, ::-1].copy(),
        context_lens=np.array(contexts, dtype=np.int32),
        query_starts=starts,
        logit_indices=starts[1:] - 1,
    )


def assert_rows_agree(ours: Tensor, theirs: Tensor, what: str) -> None:
    errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    assert errors.max() < TOLERANCE, f"{what}: {errors.tolist()}"


def test_it_gives_the_eager_runners_logits(tmp_path) -> None:
    from sits_trt.runtime.runners.cuda import CudaRunner

    tensors, formats = quantize_tensors(tiny_tensors(SPEC), 64, scale_recover=True, dense=("up_proj",))
    launcher = gpu_launcher(tmp_path / "kernels")
    tile, limits = TileSpec.of(SPEC, 64), EngineLimits(5, 256, 256, 20)
    plain, taken = (build_decoder(SPEC, tensors, formats, torch.float16).to("cuda") for _ in range(2))
    eager, cuda = EagerRunner(plain, tile, 20), CudaRunner(taken, tile, 20, limits, launcher)
    contexts = [0] * 5
    for number, counts in enumerate([[70, 1, 33, 5, 64], [1] * 5, [1] * 5, [1, 40, 1, 1, 7], [1] * 5]):
        inputs = step(counts, contexts, number)
        theirs, ours = eager.run(inputs), cuda.run(inputs)
        assert_rows_agree(ours, theirs, f"step {number}, new tokens {counts}")
        contexts = [context + count for context, count in zip(contexts, counts, strict=True)]
    three = step([1] * 3, contexts[:3], 99)
    logits = cuda.run(three)
    assert_rows_agree(logits, eager.run(three), "the first three")
    largest = np.array([[0.0, 0.0, 1.0, 0.0]] * 3)
    assert torch.equal(cuda.draw(logits, largest), logits.argmax(-1))
