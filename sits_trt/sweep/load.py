"""The load generator: many response streams at once from one process, over tritonclient's asynchronous gRPC.

One event loop carries all streams, which takes about half the CPU of a thread a stream. Each level reports
the share of a core that the client used, so that a reader sees when the client itself was the bottleneck.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import InferRequestedOutput

from sits_trt import wire
from sits_trt.errors import SitsError
from sits_trt.runtime.request import FinishReason
from sits_trt.serving.client import text_inputs
from sits_trt.sweep.trace import RequestTrace, StreamEvent
from sits_trt.sweep.workload import Load, arrival_offsets_s

OUTPUTS = (wire.TEXT_OUTPUT, "num_output_tokens", "finish_reason")
UNFINISHED = "the stream ended without a finish_reason"
LEVEL_OVER = "not complete when the time of the level was over"


@dataclass(frozen=True)
class Limits:
    """What bounds a level: the length of each answer and the time of each request and of them all."""

    output_tokens: int
    request_timeout_s: float
    level_timeout_s: float


@dataclass(frozen=True)
class LevelTraces:
    """What one level saw.

    `client_cpu` is this process's CPU time divided by the wall time: near 1.0 the client, not the server,
    set the pace. `late_ms` is the longest time between the planned and the real sending of a request.
    """

    traces: list[RequestTrace]
    client_cpu: float
    late_ms: float


def run_level(
    address: str,
    load: Load,
    prompts: Sequence[str],
    limits: Limits,
    seed: int,
    on_request_done: Callable[[], None] = lambda: None,
) -> LevelTraces:
    """Send every prompt once at the given load and return what came back, in the order of the prompts.

    `address` is the server's gRPC 'host:port' and must be on this machine: this is a load generator.
    Nothing raises for a request that fails; its trace says why. Raises SitsError for another address.
    """
    _require_loopback(address)
    cpu_before_s, began_s = time.process_time(), time.perf_counter()
    traces = asyncio.run(_run_level(address, load, prompts, limits, seed, on_request_done))
    return LevelTraces(
        traces=traces,
        client_cpu=(time.process_time() - cpu_before_s) / (time.perf_counter() - began_s),
        late_ms=max((trace.sent_ns - trace.started_ns) / 1e6 for trace in traces),
    )


def _require_loopback(address: str) -> None:
    host = address.rpartition(":")[0].strip("[]")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise SitsError(f"the load generator sends to this machine only, not to '{address}'; use 127.0.0.1")


async def _run_level(
    address: str,
    load: Load,
    prompts: Sequence[str],
    limits: Limits,
    seed: int,
    on_request_done: Callable[[], None],
) -> list[RequestTrace]:
    end_s = time.perf_counter() + limits.level_timeout_s
    traces: list[RequestTrace] = [RequestTrace(0, 0)] * len(prompts)

    async def one(index: int, due_ns: int | None) -> None:
        traces[index] = await _ask(client, str(index), prompts[index], limits, end_s, due_ns)
        on_request_done()

    async with triton_aio.InferenceServerClient(address) as client:
        if load.concurrency:
            await _closed_loop(load.concurrency, len(prompts), one)
        else:
            await _open_loop(arrival_offsets_s(load, len(prompts), seed), one)
    return traces


async def _closed_loop(concurrency: int, count: int, one: Callable) -> None:
    waiting = iter(range(count))

    async def worker() -> None:
        for index in waiting:
            await one(index, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(worker())


async def _open_loop(offsets_s: Sequence[float], one: Callable) -> None:
    start_ns = time.perf_counter_ns()
    async with asyncio.TaskGroup() as group:
        for index, offset_s in enumerate(offsets_s):
            due_ns = start_ns + int(offset_s * 1e9)
            await asyncio.sleep((due_ns - time.perf_counter_ns()) / 1e9)
            group.create_task(one(index, due_ns))


async def _ask(
    client: triton_aio.InferenceServerClient,
    request_id: str,
    prompt: str,
    limits: Limits,
    end_s: float,
    due_ns: int | None,
) -> RequestTrace:
    """Send one request and note when each message of its stream arrives."""
    sent_ns = time.perf_counter_ns()
    trace = RequestTrace(started_ns=due_ns or sent_ns, sent_ns=sent_ns)
    left_s = end_s - time.perf_counter()
    timeout_s = min(limits.request_timeout_s, left_s)
    too_late = LEVEL_OVER if left_s < limits.request_timeout_s else f"not complete within {timeout_s:g} s"
    if timeout_s <= 0:
        trace.ended_ns, trace.error = sent_ns, too_late
        return trace

    # Greedy, exactly so many tokens, streamed, with the number of tokens in each message.
    asked = {
        "text_input": prompt,
        "max_tokens": limits.output_tokens,
        "min_tokens": limits.output_tokens,
        "stream": True,
        "return_num_output_tokens": True,
    }
    request = {
        "model_name": wire.ENSEMBLE,
        "inputs": text_inputs(asked),
        "outputs": [InferRequestedOutput(name) for name in OUTPUTS],
        "request_id": request_id,
    }

    async def only_request() -> AsyncIterator[dict]:
        yield request

    trace.error = UNFINISHED
    stream = client.stream_infer(only_request(), stream_timeout=timeout_s)
    try:
        async for result, error in stream:
            if error is not None:
                trace.error = _sentence(error.message())
                break
            trace.events.append(StreamEvent(time.perf_counter_ns(), int(result.as_numpy("num_output_tokens").sum())))
            if reason := result.as_numpy("finish_reason").item().decode():
                trace.error = "" if reason in (FinishReason.STOP, FinishReason.LENGTH) else f"the answer was {reason}"
    except grpc.aio.AioRpcError as error:
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        trace.error = too_late if late else _sentence(error.details() or str(error.code()))
    finally:
        stream.cancel()
    trace.ended_ns = time.perf_counter_ns()
    return trace


def _sentence(message: str) -> str:
    """One line of bounded length, so that equal failures are counted together and fit a table."""
    line = " ".join(message.split())
    return line if len(line) <= 200 else line[:199] + "…"
