"""The served model's text: what the executor gives, streamed or not, whole characters in every part."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sits_trt.errors import RequestError
from sits_trt.runtime.executor import Executor
from sits_trt.runtime.load import load_executor
from sits_trt.runtime.request import Request, SamplingParams, join_events
from sits_trt.serving.client import Answer, chat_prompt, generate, stream, tokenizer_of
from sits_trt.serving.server import TritonServer
from tests.support.server import http_stream

pytestmark = pytest.mark.server

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
PROMPTS = ("hello", "hi 🔥é迭!", "漢字かな", "a b c", "Zürich\n")
TOKENS = 60


@pytest.fixture(scope="module")
def expected(tiny_build: Path) -> dict[tuple[str, int | None], str]:
    """The answers of an executor of this process, greedy and by seed, for each prompt."""
    executor: Executor = load_executor(tiny_build / "engine")
    tokenizer = tokenizer_of(tiny_build)
    answers = {}
    with executor:
        for prompt in PROMPTS:
            for seed in (None, 7):
                sampling = SamplingParams(TOKENS, temperature=0.0 if seed is None else 1.0, seed=seed, ignore_eos=True)
                events = executor.stream(Request("", tuple(tokenizer.encode(prompt)), sampling))
                answers[prompt, seed] = join_events(events).text
    return answers


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("seed", [None, 7])
def test_b43_streamed_and_whole_answers_equal_the_executors(
    seed: int | None, model: str, tiny_server: TritonServer, expected: dict[tuple[str, int | None], str]
) -> None:
    """All prompts at once, so that sequences share steps: the same seed gives the same tokens in traffic."""
    url = tiny_server.endpoints.grpc
    sampling = {"end_id": -1} | ({} if seed is None else {"temperature": 1.0, "seed": seed})

    def both(prompt: str) -> tuple[str, str]:
        parts = stream(url, prompt, TOKENS, model=model, **sampling)
        return "".join(part.text for part in parts), generate(url, prompt, TOKENS, model=model, **sampling).text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for prompt, (streamed, whole) in zip(PROMPTS, pool.map(both, PROMPTS), strict=True):
            assert streamed == whole == expected[prompt, seed]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_b35_no_part_of_a_stream_breaks_a_character(model: str, tiny_server: TritonServer) -> None:
    """Random bytes make characters and fragments; a part ends in a replacement mark only where the whole has one."""
    for seed in range(6):
        status, events = http_stream(
            tiny_server, model, text_input="🔥é迭", max_tokens=80, stream=True, temperature=1.0, seed=seed, end_id=-1
        )
        assert status == 200
        whole = generate(
            tiny_server.endpoints.grpc, "🔥é迭", 80, model=model, temperature=1.0, seed=seed, end_id=-1
        ).text  # fmt: skip
        assert "".join(event["text_output"] for event in events) == whole
        assert sum(event["text_output"].count("\ufffd") for event in events) == whole.count("\ufffd")


def test_b38_end_of_sequence_is_a_reason_of_its_own(tiny_server: TritonServer) -> None:
    """The random model draws its end token sooner or later when sampled hot."""

    def ask(seed: int) -> Answer:
        return generate(tiny_server.endpoints.grpc, "end", 120, temperature=3.0, seed=seed)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(24)))
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert all(answer.finish_reason == "stop" for answer in answers if answer.output_tokens < 120)
    assert all(answer.output_tokens == 120 for answer in answers if answer.finish_reason == "length")


def test_a_chat_prompt_has_its_special_tokens_once(tiny_build: Path, tiny_server: TritonServer) -> None:
    asked = chat_prompt(tokenizer_of(tiny_build), "hi", system="be brief")
    assert asked["prompt"] == "system: be brief\nuser: hi\nassistant: "
    answer = generate(tiny_server.endpoints.grpc, max_tokens=3, **asked)
    assert answer.prompt_tokens == len(asked["prompt"])


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_b30_a_text_beyond_all_bounds_is_refused_at_once(model: str, tiny_server: TritonServer) -> None:
    """Eight million characters took 25 s to be cut into tokens, and every other prompt waited for them."""
    url = tiny_server.endpoints.grpc
    began = time.monotonic()
    with pytest.raises(RequestError, match="8000000 characters"):
        generate(url, "word " * 1_600_000, 3, model=model, timeout_s=60)
    assert generate(url, "hello", 3, model=model, end_id=-1, timeout_s=60).output_tokens == 3
    assert time.monotonic() - began < 10
