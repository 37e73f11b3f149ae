"""Waiting requests: a bounded queue, a longest wait and priorities do what they say, through every door."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from tritonclient.grpc import InferenceServerClient

from sits_trt.errors import RequestError
from sits_trt.serving.client import generate, stream, text_inputs
from sits_trt.serving.server import TritonServer
from tests.support.server import http_generate, metrics, running_server, wait_for, wait_until_idle, write_build

pytestmark = pytest.mark.server

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
QUEUE = 3
ENDLESS = {"end_id": -1}


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with one sequence in flight and room for three that wait."""
    build = write_build(
        tmp_path_factory.mktemp("narrow"),
        runner="null",
        max_batch_size=1,
        max_seq_tokens=60_000,
        max_queue_size=QUEUE,
    )
    with running_server(build) as server:
        yield server


@contextmanager
def busy(server: TritonServer) -> Iterator[None]:
    """Hold the only place in flight with an answer that does not end."""
    wait_until_idle(server)
    parts = stream(server.endpoints.grpc, "busy", 50_000, **ENDLESS)
    next(parts)
    try:
        yield
    finally:
        parts.close()
        wait_until_idle(server)


def waiting(server: TritonServer, count: int) -> None:
    wait_for(lambda: metrics(server)["sits_requests_waiting"] == count, f"{count} waiting requests")


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_one_request_more_than_the_queue_holds_is_refused_at_once(model: str, narrow_server: TritonServer) -> None:
    rejected = metrics(narrow_server)["sits_requests_total[rejected]"]
    with ThreadPoolExecutor(QUEUE) as pool:
        with busy(narrow_server):
            url = narrow_server.endpoints.grpc
            jobs = [pool.submit(generate, url, f"wait {i}", 2, model=model, **ENDLESS) for i in range(QUEUE)]
            waiting(narrow_server, QUEUE)
            began = time.monotonic()
            status, answer = http_generate(narrow_server, model, text_input="one more", max_tokens=2)
            assert time.monotonic() - began < 2
            assert status == 400
            assert f"the queue is full: {QUEUE} requests wait and serving.max_queue_size is {QUEUE}" in answer["error"]
        assert [job.result().output_tokens for job in jobs] == [2] * QUEUE
    wait_until_idle(narrow_server)
    assert metrics(narrow_server)["sits_requests_total[rejected]"] == rejected + 1


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_request_leaves_the_queue_when_its_time_is_up(model: str, narrow_server: TritonServer) -> None:
    """Triton's own `timeout`, in microseconds: a parameter over HTTP, an argument over gRPC."""
    timed_out = metrics(narrow_server)["sits_requests_total[timed_out]"]
    sentence = "the request waited longer than its queue timeout of 400 ms"
    with busy(narrow_server):
        began = time.monotonic()
        status, answer = http_generate(
            narrow_server, model, text_input="soon", max_tokens=2, parameters={"timeout": 400_000}
        )
        assert (status, sentence in answer["error"]) == (400, True)
        assert 0.4 <= time.monotonic() - began < 5
        with InferenceServerClient(narrow_server.endpoints.grpc) as client:
            arrived: SimpleQueue[Any] = SimpleQueue()
            client.start_stream(lambda result, error: arrived.put(error))
            inputs = text_inputs({"text_input": "soon", "max_tokens": 2})
            client.async_stream_infer(model, inputs, timeout=400_000)
            assert sentence in str(arrived.get(timeout=10))
            client.stop_stream()
    assert metrics(narrow_server)["sits_requests_total[timed_out]"] == timed_out + 2


def test_a_waiting_request_that_is_given_up_leaves_the_queue(narrow_server: TritonServer) -> None:
    """A whole answer through the ensemble cannot be given up, see model_repo/README.md."""
    with busy(narrow_server):
        caught: list[RequestError] = []

        def ask() -> None:
            with pytest.raises(RequestError, match="was not complete within") as error:
                list(stream(narrow_server.endpoints.grpc, "given up", 2, model="tensorrt_llm_bls", timeout_s=0.5))
            caught.append(error.value)

        thread = threading.Thread(target=ask)
        thread.start()
        waiting(narrow_server, 1)
        thread.join(10)
        assert caught
        waiting(narrow_server, 0)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_greater_priority_starts_first_and_equals_in_turn(model: str, narrow_server: TritonServer) -> None:
    priorities = {"low": -1, "none": None, "high": 5}
    ended: list[str] = []

    def ask(name: str) -> None:
        generate(narrow_server.endpoints.grpc, name, 300, model=model, priority=priorities[name], **ENDLESS)
        ended.append(name)

    with ThreadPoolExecutor(QUEUE) as pool, busy(narrow_server):
        for count, name in enumerate(priorities, 1):
            pool.submit(ask, name)
            waiting(narrow_server, count)
    assert ended == ["high", "none", "low"]
