"""Attention kernels in OpenAI Triton, run by its interpreter, against the ops; fresh random steps, poisoned memory.

The interpreter multiplies bfloat16 as integers, and where it should round an FP8 number up to the next power of two
it halves it; so bfloat16 is left to the GPU (scripts/bench_attention.py), and FP8 codes are held to a factor of two.
"""

from __future__ import annotations

import pytest
import torch
from sits_plugins.attention_enqueue import enqueue_attention
from sits_plugins.launcher import AttentionCall

from sits_trt.errors import PluginError
from tests.support.attention import InterpreterLauncher, Step, random_step, run_step

# Products are of float16 numbers, sums float32: what is left is the rounding of q, of weights and of the result.
TOLERANCE = 1e-3


def check(step: Step, launcher: InterpreterLauncher, arrivals: torch.Tensor | None = None) -> None:
    want, _, _ = step.reference()
    out, pool, scales = run_step(step, launcher, arrivals)
    assert (out.float() - want).norm() < TOLERANCE * want.norm()
    assert torch.equal(step.rows(pool, scales), step.rows(*step.reference()[1:]))


@pytest.mark.parametrize(
    ("contexts", "new", "heads", "head_dim", "window"),
    [
        ([0, 5, 64, 63, 130], [1, 1, 1, 1, 1], (8, 2), 64, 0),
        ([200, 0, 1, 64], [1, 1, 0, 1], (3, 3), 96, 0),
        ([0, 5, 64, 130], [1, 3, 0, 0], (6, 2), 64, 0),
        ([70, 129, 20], [1, 1, 1], (4, 1), 64, 9),
        ([65, 128], [1, 1], (2, 2), 128, 64),
    ],
    ids=["ragged", "empty sequence", "several new tokens", "window", "window of a tile"],
)
def test_decode_equals_the_op(contexts, new, heads, head_dim, window):
    launcher = InterpreterLauncher(80, multiprocessors=3)
    check(random_step(contexts, new, heads, head_dim, window=window), launcher)
    assert launcher.launched == ["decode"]


@pytest.mark.parametrize("multiprocessors", [1, 2, 40])
def test_decode_is_the_same_however_the_work_is_split(multiprocessors):
    check(random_step([300, 0, 64], [1, 1, 1], (4, 2), 64), InterpreterLauncher(90, multiprocessors))


def test_decode_leaves_its_counters_as_it_found_them():
    arrivals = torch.zeros(3 * 2, dtype=torch.int32)
    launcher = InterpreterLauncher(90, multiprocessors=20)
    step = random_step([300, 130, 64], [1, 1, 1], (4, 2), 64)
    check(step, launcher, arrivals)
    assert not arrivals.any()
    check(step, launcher, arrivals)


@pytest.mark.parametrize(
    ("contexts", "new", "heads", "window"),
    [
        ([0, 5, 64, 63], [33, 1, 0, 20], (4, 2), 0),
        ([0], [70], (3, 1), 0),
        ([61, 10], [40, 1], (2, 2), 17),
    ],
    ids=["mixed", "one sequence", "window"],
)
def test_mixed_step_equals_the_op(contexts, new, heads, window):
    launcher = InterpreterLauncher(86, multiprocessors=3)
    check(random_step(contexts, new, heads, 64, window=window), launcher)
    assert launcher.launched == ["append", "prefill"] + ["decode"] * (len(contexts) > 1)


def test_append_clears_the_rest_of_v_in_the_last_tile():
    """The prefill kernel for SM 9.0 takes whole tiles: what lies behind the last token must be a number."""
    step = random_step([60], [10], (2, 2), 64)
    _, pool, _ = run_step(step, InterpreterLauncher(80, multiprocessors=2))
    assert not pool[step.tile_table[0, 1].long(), step.layer, 1, :, 6:].any()
    assert pool[step.tile_table[0, 1].long(), 0].isnan().all(), "another layer's rows are not touched"


@pytest.mark.parametrize("tile_tokens", [16, 32, 128])
@pytest.mark.parametrize("new", [[1, 1], [1, 40]], ids=["decode", "mixed"])
def test_any_tile_size(tile_tokens, new):
    launcher = InterpreterLauncher(80, multiprocessors=2)
    check(random_step([37, 150], new, (4, 2), 64, tile_tokens), launcher)
    assert ("spread" in launcher.launched) == (tile_tokens < 64)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 0, 36]], ids=["decode", "mixed"])
def test_quantized_pool_equals_its_op(kv_dtype, new):
    check(random_step([0, 130, 40], new, (4, 2), 64, kv_dtype=kv_dtype), InterpreterLauncher(80, 3))


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 0, 36]], ids=["decode", "mixed"])
def test_fp8_pool(new):
    step = random_step([0, 130, 40], new, (4, 2), 64, kv_dtype="float8_e4m3")
    want, want_pool, want_scales = step.reference()
    out, pool, scales = run_step(step, InterpreterLauncher(90, 3))
    written, wanted = step.rows(pool, scales), step.rows(want_pool, want_scales)
    assert ((written - wanted).abs() <= wanted.abs() / 2 + 1e-4).all()
    assert (written == wanted).float().mean() > 0.9
    assert (out.float() - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize(
    ("heads", "tile_tokens", "sentence"), [((34, 2), 64, "may have 1 to 16"), ((4, 2), 48, "use 16, 32, 64 or 128")]
)
def test_a_shape_without_a_kernel_is_refused(heads, tile_tokens, sentence):
    numbers = dict.fromkeys(AttentionCall._fields, 0)
    call = AttentionCall(
        **{
            **numbers, "dtype": "float16", "kv_dtype": "float16", "tokens": 1, "batch": 1, "head_dim": 64,
            "num_heads": heads[0], "num_kv_heads": heads[1], "tile_tokens": tile_tokens,
        }
    )  # fmt: skip
    with pytest.raises(PluginError, match=sentence):
        enqueue_attention(InterpreterLauncher(80, 1), call, 0)
