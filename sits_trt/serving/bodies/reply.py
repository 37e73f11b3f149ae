"""The answers to one Triton request: from the executor's events to responses, in one piece or many."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sits_trt.runtime.request import FinishReason, TokenEvent, join_events
from sits_trt.serving.bodies.request import Asked
from sits_trt.serving.bodies.tensors import strings
from sits_trt.serving.bodies.tickets import Ticket


class Sink(Protocol):
    """Where responses go: a Triton response sender. Nothing is sent after a `final` one."""

    def send(self, arrays: Mapping[str, NDArray[Any]], final: bool) -> None: ...

    def fail(self, message: str, code: str) -> None: ...

    def is_cancelled(self) -> bool: ...


class Reply:
    """Collects the events of one request and sends what the caller asked for, once.

    `push` is called by the executor's thread and never blocks; `flush` by the one thread that sends. A streamed
    answer is sent as it comes, several tokens in one response when the sender is behind; any other in one piece.
    The last response carries Triton's final flag and a finish_reason; an error is a response of its own and final.
    With a `ticket` each response carries it.
    """

    def __init__(
        self, asked: Asked, wanted: Collection[str], sink: Sink, prompt_text: str, ticket: Ticket | None
    ) -> None:  # fmt: skip
        self.sink = sink
        self.ticket = ticket
        self.done = False
        self._asked = asked
        self._wanted = frozenset(wanted)
        self._prompt_text = prompt_text
        self._logprob_sum = 0.0
        self._lock = threading.Lock()
        self._events: list[TokenEvent] = []

    def push(self, event: TokenEvent) -> bool:
        """Take an event; say whether there is now something to flush that was not there before."""
        with self._lock:
            self._events.append(event)
            if self._asked.streaming:
                return len(self._events) == 1
            return event.finish_reason is not None

    def flush(self) -> None:
        """Send what has been collected."""
        with self._lock:
            events, self._events = self._events, []
        if not events or self.done:
            return
        last = events[-1]
        self.done = last.finish_reason is not None
        if last.finish_reason is not FinishReason.ERROR:
            self.sink.send(self._tensors(join_events(events)), self.done)
            return
        told = events[:-1]
        if told and self._asked.streaming:
            self.sink.send(self._tensors(join_events(told)), False)
        # One that was never scheduled waited too long: that is for the caller to try again.
        code = "INTERNAL" if last.timings.first_scheduled_ns else "UNAVAILABLE"
        self.sink.fail(last.error, code)

    def _tensors(self, event: TokenEvent) -> dict[str, NDArray[Any]]:
        asked = self._asked
        ids = (*asked.request.prompt_ids, *event.token_ids) if asked.echo else event.token_ids
        made: dict[str, NDArray[Any]] = {
            "output_ids": np.array([[ids]], dtype=np.int32),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
            "output_text": strings([self._prompt_text + event.text if asked.echo else event.text]),
            "finish_reason": strings([event.finish_reason or ""]),
        }
        if asked.logprobs:
            self._logprob_sum += sum(event.logprobs)
            made["cum_log_probs"] = np.array([[self._logprob_sum]], dtype=np.float32)
            made["output_log_probs"] = np.array([[event.logprobs]], dtype=np.float32)
        if asked.input_count:
            made["num_input_tokens"] = _count(event.prompt_tokens)
        if asked.output_count:
            made["num_output_tokens"] = _count(len(event.token_ids))
        if asked.timings:
            times = event.timings
            made["arrival_time_ns"] = _time(times.arrival_ns)
            made["first_scheduled_time_ns"] = _time(times.first_scheduled_ns)
            made["first_token_time_ns"] = _time(times.first_token_ns)
            made["last_token_time_ns"] = _time(times.last_token_ns)
        if self.ticket is not None:
            made["ticket"] = np.array([[self.ticket.slot, self.ticket.number]], dtype=np.int64)
        return {name: array for name, array in made.items() if name in self._wanted}


def _count(value: int) -> NDArray[np.int32]:
    return np.array([[value]], dtype=np.int32)


def _time(value: int) -> NDArray[np.int64]:
    return np.array([[value]], dtype=np.int64)
