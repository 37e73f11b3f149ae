"""Tiny builds that Triton Server can serve: a random model, a byte-level tokenizer, an eager engine, a repository."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sits_trt.artifacts import Manifest, writing
from sits_trt.contract import EngineDetails, EngineLimits
from sits_trt.recipe.schema import KvCacheSection, ServingSection
from sits_trt.repository import write_repository
from sits_trt.serving.server import TritonServer
from sits_trt.spec import ModelSpec, TileSpec
from tests.support.tiny import save_byte_tokenizer, tiny_spec, write_checkpoint

VOCABULARY = 257
"""Tokens of the byte-level tokenizer: the end token (id 0) and every byte."""

TILE_TOKENS = 16


def write_build(
    directory: Path,
    *,
    runner: str = "auto",
    max_seq_tokens: int = 512,
    max_batch_size: int = 16,
    **serving: Any,
) -> Path:
    """Write the checkpoint, engine and repository stages of a tiny build and return its directory.

    `runner` 'null' serves without a model: answers are those of `null_answer`. `serving` are keys of the recipe's
    section of that name.
    """
    checkpoint = directory / "checkpoint"
    write_checkpoint(checkpoint, vocab_size=VOCABULARY)
    save_byte_tokenizer(checkpoint)
    spec: ModelSpec = tiny_spec(vocab_size=VOCABULARY)
    limits = EngineLimits(max_batch_size, 256, max_seq_tokens, max_batch_size * max_seq_tokens // TILE_TOKENS)
    details = EngineDetails("eager", spec, TileSpec.of(spec, TILE_TOKENS), limits, "../checkpoint")
    with writing(directory / "engine", Manifest("engine", "tiny")) as (_, found):
        found.update(details.to_dict())
    section = ServingSection(max_batch_size=max_batch_size, **serving)
    with writing(directory / "repository", Manifest("repository", "tiny")) as (partial, found):
        found.update(write_repository(partial, directory / "engine", section, KvCacheSection()))
        config = partial / "tensorrt_llm" / "config.pbtxt"
        text = config.read_text()
        assert 'key: "runner" value { string_value: "auto" }' in text
        config.write_text(text.replace('"auto"', f'"{runner}"'))
    return directory


@contextmanager
def running_server(build: Path) -> Iterator[TritonServer]:
    """Serve a build on free ports of the loopback interface."""
    with TritonServer(build / "repository", build / "server.log", "127.0.0.1", 0, 0, 0) as server:
        server.start(timeout_s=120)
        yield server
