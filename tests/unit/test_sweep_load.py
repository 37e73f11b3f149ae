"""The load generator against a server that answers by script over real gRPC on loopback."""

from __future__ import annotations

import json
import struct

import pytest

from sits_trt.errors import SitsError
from sits_trt.sweep.load import LEVEL_OVER, UNFINISHED, Limits, run_level
from sits_trt.sweep.metrics import level_metrics, request_figures
from sits_trt.sweep.workload import Load
from tests.support.stream_server import scripted_server

LIMITS = Limits(output_tokens=4, request_timeout_s=20, level_timeout_s=60)


def test_b48_only_generated_tokens_count() -> None:
    scripts = [
        [[10, 0], [100, 1], [150, 2], [200, 1], [201, 0]],
        [[10, 0], [20, 0]],
        [[10, 1], [20, "the queue is full"]],
        [[10, 1], [20, "abort"]],
    ]
    with scripted_server() as (address, server):
        level = run_level(address, Load(concurrency=4), [json.dumps(s) for s in scripts], LIMITS, seed=0)
    answered, silent, refused, aborted = level.traces
    figures = request_figures(answered)
    assert figures is not None
    assert figures.tokens == 4
    assert [event.tokens for event in answered.events] == [0, 1, 2, 1, 0]
    # Lower bounds are the script's; the upper ones leave room for a busy machine.
    assert 100 <= figures.ttft_ms < 1000
    assert sum(figures.itl_ms) == pytest.approx(sum(figures.gap_ms))
    assert figures.e2e_ms >= 201
    assert request_figures(silent) is None
    assert not silent.error
    assert refused.error == "the queue is full"
    assert aborted.error == "server went away"
    metrics = level_metrics(level.traces, 2000, 200)
    assert (metrics.completed, metrics.empty, metrics.failed, metrics.output_tokens) == (1, 1, 2, 4)
    assert len(server.seen) == 4


def test_an_answer_that_was_cut_short_is_a_failure() -> None:
    scripts = [[[1, 1], [2, 1, "cancelled"]], [[1, 1, ""]], [[1, 1, "stop"]]]
    with scripted_server() as (address, _):
        level = run_level(address, Load(concurrency=3), [json.dumps(s) for s in scripts], LIMITS, seed=0)
    assert [trace.error for trace in level.traces] == ["the answer was cancelled", UNFINISHED, ""]


def test_requests_ask_for_greedy_text_of_fixed_length_and_token_counts() -> None:
    prompt = json.dumps([[0, 4]])
    with scripted_server() as (address, server):
        run_level(address, Load(concurrency=1), [prompt], LIMITS, seed=0)
    (seen,) = server.seen
    assert seen.pop("text_input")[4:].decode() == prompt
    four = struct.pack("<i", 4)
    assert seen == {"max_tokens": four, "min_tokens": four, "stream": b"\x01", "return_num_output_tokens": b"\x01"}


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_closed_loop_keeps_so_many_in_flight_and_asks_each_prompt_once(concurrency: int) -> None:
    prompts = [json.dumps([[30, 1], [30 + extra, 1]]) for extra in range(12)]
    done: list[int] = []
    with scripted_server() as (address, server):
        level = run_level(address, Load(concurrency=concurrency), prompts, LIMITS, 0, lambda: done.append(1))
    assert server.most_at_once == concurrency
    assert sorted(seen["text_input"][4:].decode() for seen in server.seen) == sorted(prompts)
    assert [trace.tokens for trace in level.traces] == [2] * 12
    assert len(done) == 12
    assert 0 < level.client_cpu < 2
    assert level.late_ms == 0


def test_open_loop_sends_on_time_whatever_the_server_does_and_counts_from_the_planned_moment() -> None:
    prompts = [json.dumps([[400, 1]])] * 10
    with scripted_server() as (address, server):
        level = run_level(address, Load(requests_per_s=50.0), prompts, LIMITS, seed=1)
    assert server.most_at_once == 10
    starts = [trace.started_ns for trace in level.traces]
    assert starts == sorted(starts)
    assert all(trace.sent_ns >= trace.started_ns for trace in level.traces)
    assert level.late_ms >= 0
    assert all(trace.ended_ns - trace.started_ns >= 400e6 for trace in level.traces)


def test_a_request_that_takes_too_long_is_cancelled_and_counted() -> None:
    limits = Limits(output_tokens=4, request_timeout_s=0.3, level_timeout_s=60)
    scripts = [[[10, 1], [3000, 1]], [[10, 1], [20, 1]]]
    with scripted_server() as (address, _):
        level = run_level(address, Load(concurrency=2), [json.dumps(s) for s in scripts], limits, seed=0)
    late, fine = level.traces
    assert late.error == "not complete within 0.3 s"
    assert 0.3e9 <= late.ended_ns - late.started_ns < 2e9
    assert not fine.error


def test_a_level_ends_in_time_and_says_what_it_left_out() -> None:
    limits = Limits(output_tokens=4, request_timeout_s=20, level_timeout_s=0.4)
    with scripted_server() as (address, _):
        level = run_level(address, Load(concurrency=1), [json.dumps([[150, 1]])] * 8, limits, seed=0)
    errors = [trace.error for trace in level.traces]
    assert not errors[0]
    assert set(errors[3:]) == {LEVEL_OVER}
    assert max(t.ended_ns for t in level.traces) - min(t.started_ns for t in level.traces) < 2e9


def test_a_server_that_is_gone_fails_each_request_not_the_sweep() -> None:
    with scripted_server() as (address, _):
        pass
    level = run_level(address, Load(concurrency=2), ["[]"] * 3, LIMITS, seed=0)
    assert all(trace.error for trace in level.traces)
    assert level_metrics(level.traces, 2000, 200).failed == 3


@pytest.mark.parametrize("address", ["192.0.2.7:8001", "example.org:8001", "0.0.0.0:8001", "[2001:db8::1]:8001"])
def test_load_stays_on_this_machine(address: str) -> None:
    with pytest.raises(SitsError, match="this machine only"):
        run_level(address, Load(concurrency=1), ["[]"], LIMITS, seed=0)
