"""Tiny builds that Triton Server can serve: a random model, a byte-level tokenizer, an eager engine, a repository."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
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
PUBLISH_PERIOD_S = 0.2
"""stats_check_period_ms of the repository, in seconds."""


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


def http_generate(server: TritonServer, model: str, timeout_s: float = 60, **body: Any) -> tuple[int, dict[str, Any]]:
    """Call HTTP 'generate' and return status and JSON."""
    status, text = http_post(server, f"/v2/models/{model}/generate", json.dumps(body).encode(), timeout_s)
    return status, json.loads(text)


def http_stream(
    server: TritonServer, model: str, timeout_s: float = 60, **body: Any
) -> tuple[int, list[dict[str, Any]]]:
    """Call HTTP 'generate_stream' and return status and events."""
    path = f"/v2/models/{model}/generate_stream"
    status, text = http_post(server, path, json.dumps(body).encode(), timeout_s)
    events = text.decode("utf-8").split("\n\n")
    assert events.pop() == ""
    return status, [json.loads(event.removeprefix("data: ")) for event in events]


def http_post(server: TritonServer, path: str, body: bytes, timeout_s: float = 60) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.endpoints.http, timeout=timeout_s)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def http_drop(server: TritonServer, model: str, **body: Any) -> None:
    """Call HTTP 'generate_stream', wait for the first bytes of an event, and close the connection."""
    connection = http.client.HTTPConnection(server.endpoints.http, timeout=60)
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body).encode())
    assert connection.getresponse().read(6) == b"data: "
    connection.close()


def metrics(server: TritonServer) -> dict[str, float]:
    """Return the sits_* series of the metrics endpoint by name, with the outcome in brackets where there is one."""
    connection = http.client.HTTPConnection(server.endpoints.metrics, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = {}
    for name, labels, value in re.findall(r"^(sits_\w+)\{(.*?)\} (\S+)$", text, flags=re.MULTILINE):
        label = re.search(r'(?:outcome|le)="([^"]+)"', labels)
        found[f"{name}[{label[1]}]" if label else name] = float(value)
    return found


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    """Return once `condition` holds; fail naming `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def wait_until_idle(server: TritonServer) -> None:
    """Wait until no request is in flight, no tile is held, and the metrics, published now and then, say the last."""

    def idle() -> bool:
        first = metrics(server)
        busy = [first[f"sits_{name}"] for name in ("requests_running", "requests_waiting", "tiles_used")]
        time.sleep(2.5 * PUBLISH_PERIOD_S)
        return not any(busy) and metrics(server) == first

    wait_for(idle, "the executor idle")
