"""The fp16 recipe behind Triton Server answers as transformers does, streamed and whole, alone and together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sits_trt.checkpoint.tokenizer import load_tokenizer
from sits_trt.console import stage_progress
from sits_trt.pipeline import BuildLine
from sits_trt.recipe import load_recipe
from sits_trt.serving.client import generate, stream
from sits_trt.serving.server import TritonServer
from tests.support.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "Python is a programming language that",
    "1, 2, 3, 4,",
    "The three primary colours are",
    "Repeat after me: 🔥 é 迭 🎉. Again: 🔥 é 迭",
    "日本の首都は",
    "To make tea, first",
    "def fibonacci(n):\n",
    "In the year 1969,",
)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rich.console import Console

    directory = tmp_path_factory.mktemp("smollm2")
    console = Console(quiet=True)
    for _ in BuildLine(load_recipe("cpu-fp16"), directory, lambda name: stage_progress(console, name)).run():
        pass
    return directory


@pytest.fixture(scope="module")
def expected(build: Path) -> list[str]:
    """What transformers generates greedily, in float32, from the same checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(build / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(build / "checkpoint", dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        texts.append(tokenizer.decode(answer[0, ids.shape[1] :].tolist()))
    return texts


@pytest.fixture(scope="module")
def server(build: Path) -> Iterator[TritonServer]:
    with running_server(build) as running:
        yield running


def test_ten_prompts_give_the_greedy_tokens_of_transformers(server: TritonServer, expected: list[str]) -> None:
    for prompt, text in zip(PROMPTS, expected, strict=True):
        answer = generate(server.endpoints.grpc, prompt, TOKENS, timeout_s=120)
        assert answer.text == text, prompt
        assert answer.output_tokens <= TOKENS


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_streamed_text_joined_is_the_whole_text_for_all_at_once(
    server: TritonServer, expected: list[str], model: str
) -> None:
    def joined(prompt: str) -> str:
        parts = list(stream(server.endpoints.grpc, prompt, TOKENS, model=model, timeout_s=240))
        assert [part.finish_reason for part in parts if part.finish_reason] in (["length"], ["stop"])
        # The last token of 64 may be one of several that make a character, and nothing follows it.
        assert all("\ufffd" not in part.text for part in parts[:-1])
        return "".join(part.text for part in parts)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(joined, PROMPTS)) == expected
