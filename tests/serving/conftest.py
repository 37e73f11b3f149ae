"""Two servers that the tests of this folder share: one without a model for traffic, one with a tiny random one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sits_trt.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sits_trt.runtime.runners.null import null_answer
from sits_trt.serving.server import TritonServer
from tests.support.server import VOCABULARY, running_server, write_build

MAX_BATCH_SIZE = 24
MAX_SEQ_TOKENS = 16384


@pytest.fixture(scope="session")
def null_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_build(
        tmp_path_factory.mktemp("null"), runner="null", max_seq_tokens=MAX_SEQ_TOKENS, max_batch_size=MAX_BATCH_SIZE
    )


@pytest.fixture(scope="session")
def null_server(null_build: Path) -> Iterator[TritonServer]:
    """A server whose answers are long, cheap and foretold by `Foretold`."""
    with running_server(null_build) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_server(tiny_build: Path) -> Iterator[TritonServer]:
    """A server with a random model of two layers and a byte-level tokenizer."""
    with running_server(tiny_build) as server:
        yield server


class Foretold:
    """What the null runner answers to a prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, prompt: str, tokens: int) -> str:
        """Return the text of an answer of `tokens` tokens that no end token ends."""
        return self._tokenizer.decode(null_answer(self._tokenizer.encode(prompt), tokens, VOCABULARY))


@pytest.fixture(scope="session")
def foretold(null_build: Path) -> Foretold:
    return Foretold(load_tokenizer(null_build / "checkpoint"))
