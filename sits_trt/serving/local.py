"""Answers without a server: the same executor in this process, behind the client's interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sits_trt.artifacts import BuildDirectory
from sits_trt.errors import RequestError
from sits_trt.runtime.load import load_executor
from sits_trt.runtime.request import FinishReason, Request, SamplingParams
from sits_trt.serving.client import Part, tokenizer_of


def stream_local(
    build_dir: Path, prompt: str, sampling: SamplingParams, *, add_special_tokens: bool = True
) -> Iterator[Part]:
    """Load the engine of a build and yield the parts of one answer as they come.

    Raises RequestError when the engine refuses or fails the request, SitsError when it cannot run here.
    """
    ids = tuple(tokenizer_of(build_dir).encode(prompt, add_special_tokens=add_special_tokens))
    executor = load_executor(BuildDirectory(build_dir).engine, max_batch_size=1)
    with executor:
        for event in executor.stream(Request("generate", ids, sampling)):
            if event.finish_reason is FinishReason.ERROR:
                raise RequestError(event.error)
            yield Part(event.text, event.output_tokens, event.prompt_tokens, event.finish_reason or "")
