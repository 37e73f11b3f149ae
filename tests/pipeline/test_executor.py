"""The executor over a real decoder: every request gets the tokens that it would get alone."""

import random
from collections.abc import Sequence

import pytest
import torch

from sits_trt.models import Decoder, build_decoder
from sits_trt.runtime.executor import Executor
from sits_trt.runtime.request import FinishReason, Request, SamplingParams, join_events
from sits_trt.runtime.runners.eager import EagerRunner
from sits_trt.runtime.sampler import NOT_FINITE
from sits_trt.spec import CODED_KV_DTYPES, TileSpec
from tests.support.decode import ScatteredRun
from tests.support.quantized import quantize_tensors
from tests.support.runtime import Inbox, limits
from tests.support.tiny import tiny_spec, tiny_tensors

SEEDS = (1, 1, 2, 2**63)


def make_decoder(quantized: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **spec: object) -> Decoder:
    model = tiny_spec(**spec)
    # Spread out, so that the two likeliest tokens are never as near as the rounding of two batch sizes.
    tensors = {name: tensor * 2 if "proj" in name else tensor for name, tensor in tiny_tensors(model, seed).items()}
    formats = {}
    if quantized:
        tensors, formats = quantize_tensors(tensors, scale_recover=True)
    decoder = build_decoder(model, tensors, formats, dtype)
    decoder.dequantize_(dtype)
    return decoder


def alone(decoder: Decoder, ids: Sequence[int], count: int, kv_dtype: str = "") -> list[int]:
    """Greedy decoding of one request, one step a token, without scheduler, sampler or shared tiles."""
    run = ScatteredRun(decoder, 1, 32, kv_dtype=kv_dtype)
    answer = [int(run.step([ids])[0][-1].argmax())]
    while len(answer) < count:
        answer.append(int(run.step([answer[-1:]])[0][-1].argmax()))
    return answer


def make_executor(
    decoder: Decoder, batch: int = 16, step_tokens: int = 48, tiles: int = 120, kv_dtype: str = "float32"
) -> Executor:
    tile = TileSpec.of(decoder.spec, 16, kv_dtype)
    return Executor(EagerRunner(decoder, tile, tiles), tile, limits(batch, step_tokens, 512, tiles))


def prompt_of(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(97) for _ in range(length))


@pytest.mark.parametrize(
    ("quantized", "spec"),
    [
        (False, {}),
        (True, {}),
        (False, {"family": "qwen3", "qk_norm": True, "tie_word_embeddings": True}),
        (False, {"layer_windows": (20, 0)}),
    ],
    ids=["dense", "int4", "qk_norm", "window"],
)
def test_concurrent_requests_equal_one_at_a_time(quantized: bool, spec: dict[str, object]) -> None:
    rng, decoder = random.Random(11), make_decoder(quantized, **spec)
    system = prompt_of(rng, 70)
    with make_executor(decoder) as executor:
        asked = []
        for n in range(24):
            ids = (system if n % 3 == 0 else ()) + prompt_of(rng, rng.choice([1, 2, 15, 16, 17, 48, 49, 100]))
            inbox, count = Inbox(), rng.randrange(1, 30)
            executor.submit(Request(str(n), ids, SamplingParams(count)), inbox)
            asked.append((ids, count, inbox))
        for ids, count, inbox in asked:
            event = inbox.result()
            assert list(event.token_ids) == alone(decoder, ids, count)
            assert event.finish_reason is FinishReason.LENGTH
        stats = executor.stats()
        # All at once, they still share: the steps are far fewer than the tokens.
        assert stats.steps < stats.generated_tokens / 2
        assert stats.cached_tokens >= 7 * 64


@pytest.mark.parametrize("kv_dtype", CODED_KV_DTYPES)
def test_a_coded_pool_gives_the_same_tokens_with_chunks_and_shared_prefixes(kv_dtype: str) -> None:
    """What a tile holds depends on its tokens alone. Float64 keeps sums of other orders off the bounds of codes."""
    rng, decoder = random.Random(17), make_decoder(dtype=torch.float64)
    system = prompt_of(rng, 70)
    prompts = [(system if n % 2 else ()) + prompt_of(rng, 5 + 20 * n) for n in range(6)]
    with make_executor(decoder, kv_dtype=kv_dtype) as executor:
        inboxes = [Inbox() for _ in prompts]
        for ids, inbox in zip(prompts, inboxes, strict=True):
            executor.submit(Request("", ids, SamplingParams(20)), inbox)
        answers = [list(inbox.result().token_ids) for inbox in inboxes]
        assert executor.stats().cached_tokens >= 2 * 64
    assert answers == [alone(decoder, ids, 20, kv_dtype) for ids in prompts]
    if kv_dtype == "int4":
        assert answers != [alone(decoder, ids, 20) for ids in prompts], "codes of four bits must show"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gives_the_tokens_of_the_cpu() -> None:
    rng, decoder = random.Random(13), make_decoder()
    wanted = [
        Request(
            "", prompt_of(rng, length), SamplingParams(20, temperature=temperature, top_k=20, top_p=0.9, seed=length)
        )
        for length in (1, 17, 60)
        for temperature in (0.0, 1.0)
    ]
    with make_executor(decoder) as executor:
        expected = [join_events(executor.stream(request)).token_ids for request in wanted]
    decoder.to("cuda")
    with make_executor(decoder) as executor:
        inboxes = [Inbox() for _ in wanted]
        for request, inbox in zip(wanted, inboxes, strict=True):
            executor.submit(request, inbox)
        assert [inbox.result().token_ids for inbox in inboxes] == expected


def test_b43_seeded_sampling_does_not_depend_on_traffic() -> None:
    rng, decoder = random.Random(12), make_decoder()
    prompts = prompt_of(rng, 5), prompt_of(rng, 40)
    wanted = [
        Request("", ids, SamplingParams(24, temperature=1.0, top_p=top_p, seed=seed))
        for ids, top_p in zip(prompts, (1.0, 0.9), strict=True)
        for seed in SEEDS
    ]
    with make_executor(decoder) as executor:
        one_by_one = [join_events(executor.stream(request)).token_ids for request in wanted]
        inboxes = [Inbox() for _ in wanted]
        for request, inbox in zip(wanted, inboxes, strict=True):
            executor.submit(request, inbox)
        for other in range(8):
            executor.submit(Request("", prompt_of(rng, 30 + other), SamplingParams(30, temperature=0.7)), Inbox())
        together = [inbox.result().token_ids for inbox in inboxes]
    assert together == one_by_one
    for first in (0, 4):
        assert one_by_one[first] == one_by_one[first + 1]
        assert len(set(one_by_one[first : first + 4])) == 3


def test_a_model_without_finite_logits_fails_the_request_and_not_the_engine() -> None:
    decoder = make_decoder()
    decoder.embedding[13] = float("inf")
    with make_executor(decoder) as executor:
        good, bad = Inbox(), Inbox()
        executor.submit(Request("", (1, 2, 3), SamplingParams(20)), good)
        executor.submit(Request("", (1, 13, 3), SamplingParams(20)), bad)
        assert (bad.result().finish_reason, bad.result().error) == (FinishReason.ERROR, NOT_FINITE)
        answer = alone(decoder, (1, 2, 3), 20)
        assert 13 not in answer, "the seed gives an answer that does not meet the spoiled token"
        assert list(good.result().token_ids) == answer
        # Tiles with NaN in them are handed out again, and written before they are read.
        again = [join_events(executor.stream(Request("", (1, 2, 3) * n, SamplingParams(3)))) for n in range(1, 30)]
        assert all(event.finish_reason is FinishReason.LENGTH for event in again)
