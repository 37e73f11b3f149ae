"""One question, answered by a running server or by the engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sits_trt import wire
from sits_trt.errors import RequestError
from sits_trt.serving.client import Part, chat_prompt, stream, tokenizer_of


@dataclass(frozen=True)
class Question:
    """What is asked, and how the answer is sampled; numbers mean what they mean in `runtime.SamplingParams`."""

    prompt: str
    raw: bool
    system: str | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: tuple[str, ...]


def answer(question: Question, build: Path | None, url: str | None) -> Iterator[Part]:
    """Yield the parts of the answer.

    With `url` a running server is asked and `build` only gives the chat template; without, the engine of `build`
    answers in this process. Raises RequestError when neither is given, or a template is needed and there is none.
    """
    if build is None and (url is None or not question.raw):
        need = "the chat template" if url else "an engine or a server"
        raise RequestError(f"{need} is needed: give --build BUILD{', or --raw' if url else ' or --url HOST:PORT'}")
    prompt, special = question.prompt, True
    if not question.raw:
        assert build is not None
        chat = chat_prompt(tokenizer_of(build), question.prompt, question.system)
        prompt, special = chat["prompt"], chat["add_special_tokens"]
    if url is not None:
        yield from stream(
            url, prompt, question.max_tokens, model=wire.ENSEMBLE, temperature=question.temperature,
            top_k=question.top_k or None, top_p=question.top_p, seed=question.seed, stop_words=question.stop or None,
            add_special_tokens=special,
        )  # fmt: skip
        return
    assert build is not None
    from sits_trt.runtime.request import SamplingParams
    from sits_trt.serving.local import stream_local

    sampling = SamplingParams(
        question.max_tokens, temperature=question.temperature, top_k=question.top_k, top_p=question.top_p,
        seed=question.seed, stop=question.stop,
    )  # fmt: skip
    yield from stream_local(build, prompt, sampling, add_special_tokens=special)
