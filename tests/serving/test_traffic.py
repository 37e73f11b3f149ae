"""Many clients at once: each gets its own answer, the quick one does not wait for the slow, leaving frees the tiles."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sits_trt.errors import RequestError
from sits_trt.serving.client import Part, generate, stream
from sits_trt.serving.server import TritonServer
from tests.serving.conftest import MAX_BATCH_SIZE, Foretold
from tests.support.server import http_drop, http_stream, metrics, wait_for, wait_until_idle

pytestmark = pytest.mark.server

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
LONG = 16000
"""Tokens of an answer that is never waited for: it takes many seconds."""
ENDLESS = {"end_id": -1}
"""Random answers hold end tokens, too: without this an answer ends anywhere."""


def ask(server: TritonServer, prompt: str, tokens: int, model: str, request_id: str = "") -> list[Part]:
    return list(stream(server.endpoints.grpc, prompt, tokens, model=model, request_id=request_id, **ENDLESS))


def check_own_answer(parts: list[Part], expected: str, tokens: int) -> None:
    assert "".join(part.text for part in parts) == expected
    assert sum(part.output_tokens for part in parts) == tokens
    assert [part.finish_reason for part in parts[:-1]] == [""] * (len(parts) - 1)
    assert parts[-1].finish_reason == "length"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_b38_sixteen_streams_each_get_their_own_text_and_one_end(
    model: str, null_server: TritonServer, foretold: Foretold
) -> None:
    lengths = [1 + 37 * index for index in range(16)]
    prompts = [f"prompt {index} " + "wörter " * index for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: ask(null_server, prompts[i], lengths[i], model), range(16)))
    for prompt, length, parts in zip(prompts, lengths, answers, strict=True):
        check_own_answer(parts, foretold.text(prompt, length), length)
    wait_until_idle(null_server)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_later_short_request_overtakes_an_earlier_long_one(model: str, null_server: TritonServer) -> None:
    long = stream(null_server.endpoints.grpc, "long", 2000, model=model, **ENDLESS)
    next(long)
    ended = []

    def read_on() -> None:
        assert sum(part.output_tokens for part in long) > 1000
        ended.append("long")

    thread = threading.Thread(target=read_on)
    thread.start()
    ask(null_server, "short", 3, model)
    ended.append("short")
    thread.join()
    assert ended == ["short", "long"]


def test_requests_are_batched_in_flight_and_not_in_turn(null_server: TritonServer) -> None:
    """BLS has one instance here: requests through it must not wait for each other."""
    before = metrics(null_server)["sits_steps_total"]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: ask(null_server, f"{i}", 200, "tensorrt_llm_bls"), range(16)))
    wait_until_idle(null_server)
    steps = metrics(null_server)["sits_steps_total"] - before
    assert steps < 16 * 200 / 2, "fewer than two requests shared a step on average"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_cancelled_request_frees_its_tiles(model: str, null_server: TritonServer) -> None:
    wait_until_idle(null_server)
    cancelled = metrics(null_server)["sits_requests_total[cancelled]"]
    parts = stream(null_server.endpoints.grpc, "cancel me", LONG, model=model, **ENDLESS)
    next(parts)
    wait_for(lambda: metrics(null_server)["sits_tiles_used"] > 0, "tiles in use")
    parts.close()
    wait_until_idle(null_server)
    assert metrics(null_server)["sits_requests_total[cancelled]"] == cancelled + 1


def test_a_caller_that_waits_for_a_whole_answer_and_leaves_frees_its_tiles(null_server: TritonServer) -> None:
    cancelled = metrics(null_server)["sits_requests_total[cancelled]"]
    with pytest.raises(RequestError, match="was not complete within"):
        generate(null_server.endpoints.grpc, "too long", LONG, model="tensorrt_llm_bls", timeout_s=0.5, **ENDLESS)
    wait_until_idle(null_server)
    assert metrics(null_server)["sits_requests_total[cancelled]"] == cancelled + 1


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_b39_twenty_dropped_clients_leave_the_survivor_alone(
    model: str, null_server: TritonServer, foretold: Foretold
) -> None:
    """Ten leave over gRPC and ten over HTTP, each after its first chunk."""
    wait_until_idle(null_server)
    cancelled = metrics(null_server)["sits_requests_total[cancelled]"]

    def drop(index: int) -> None:
        if index % 2:
            http_drop(null_server, model, text_input=f"gone {index}", max_tokens=LONG, stream=True, **ENDLESS)
            return
        parts = stream(null_server.endpoints.grpc, f"gone {index}", LONG, model=model, **ENDLESS)
        next(parts)
        parts.close()

    with ThreadPoolExecutor(21) as pool:
        survivor = pool.submit(ask, null_server, "survivor", 2000, model)
        list(pool.map(drop, range(20)))
        check_own_answer(survivor.result(), foretold.text("survivor", 2000), 2000)
    wait_until_idle(null_server)
    assert metrics(null_server)["sits_requests_total[cancelled]"] == cancelled + 20


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("ids", [["1"] * 8, [""] * 8, ["1", "01", "1", "001", "1 ", "1.0", "é", "1"]])
def test_b41_equal_request_ids_do_not_collide(
    ids: list[str], model: str, null_server: TritonServer, foretold: Foretold
) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask, null_server, f"id {i}", 60 + i, model, request_id) for i, request_id in enumerate(ids)]
        for index, job in enumerate(jobs):
            check_own_answer(job.result(), foretold.text(f"id {index}", 60 + index), 60 + index)


def test_b38_a_bad_request_among_good_ones_harms_only_itself(null_server: TritonServer, foretold: Foretold) -> None:
    bad = [{"max_tokens": 0}, {"top_p": 7.0}, {"beam_width": 4}, {"max_tokens": 100_000}]

    def one(index: int) -> list[Part] | str:
        if index % 2:
            values = {"max_tokens": 20, "model": TEXT_MODELS[index // 2 % 2], **bad[index // 2 % 4]}
            with pytest.raises(RequestError) as caught:
                list(stream(null_server.endpoints.grpc, "bad", **values))
            return str(caught.value)
        return ask(null_server, f"good {index}", 150, TEXT_MODELS[index // 2 % 2])

    with ThreadPoolExecutor(16) as pool:
        for index, got in enumerate(pool.map(one, range(16))):
            if isinstance(got, list):
                check_own_answer(got, foretold.text(f"good {index}", 150), 150)


def test_more_requests_than_places_are_all_served(null_server: TritonServer, foretold: Foretold) -> None:
    count = MAX_BATCH_SIZE + 8
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda i: ask(null_server, f"q {i}", 100, "ensemble"), range(count)))
    for index, parts in enumerate(answers):
        check_own_answer(parts, foretold.text(f"q {index}", 100), 100)


def test_stop_ends_the_requests_of_its_id_with_a_reason(null_server: TritonServer) -> None:
    """As in tensorrtllm_backend a request with `stop` cancels the one of the same id."""
    ended: list[tuple[int, list[dict]]] = []
    body = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": LONG, "streaming": True, **ENDLESS}

    def run() -> None:
        ended.append(http_stream(null_server, "tensorrt_llm", id="mine", **body))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: metrics(null_server)["sits_requests_running"] == 1, "the request running")
    time.sleep(0.2)
    _, told = http_stream(
        null_server, "tensorrt_llm", id="mine", stop=True, input_lengths=1, request_output_len=1
    )  # fmt: skip
    assert told[-1]["finish_reason"] == "cancelled"
    thread.join(20)
    (status, events) = ended[0]
    assert status == 200
    assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + ["cancelled"]
