"""On the way into the executor: whatever goes wrong with a request, its caller hears it, and only its caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sits_trt.errors import EngineDead, RequestError
from sits_trt.serving.bodies.door import Call
from sits_trt.serving.bodies.intake import Intake
from sits_trt.serving.bodies.outbox import Outbox
from sits_trt.serving.bodies.request import Defaults
from sits_trt.serving.bodies.tickets import SLOTS, Tickets, TicketTable


class Sink:
    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []

    def send(self, arrays: Any, final: bool) -> None:
        raise AssertionError("nothing is answered here")

    def fail(self, message: str, code: str) -> None:
        self.failed.append((message, code))

    def is_cancelled(self) -> bool:
        return False


class Closed:
    """An executor that takes nothing, and says so with `error`."""

    vocab_size, max_seq_tokens = 100, 50

    def __init__(self, error: Exception) -> None:
        self._error = error

    def submit(self, request: Any, on_event: Any) -> Any:
        raise self._error


class Words:
    eos_token_ids = (0,)


def call(**changes: Any) -> Call:
    arrays = {
        "input_ids": np.array([[1, 2, 3]], dtype=np.int32),
        "input_lengths": np.array([[3]], dtype=np.int32),
        "request_output_len": np.array([[4]], dtype=np.int32),
        "streaming": np.array([[True]]),
    }
    return Call(arrays | changes, "id", ("output_ids", "ticket"))


@pytest.fixture
def tickets() -> Tickets:
    return Tickets()


def told(error: Exception, read: Any, tickets: Tickets, folder: Path) -> tuple[str, str]:
    outbox = Outbox(1.0, tickets, TicketTable(folder / "tickets", create=True))
    intake = Intake(cast(Any, Closed(error)), cast(Any, Words()), Defaults(True, 0), outbox, tickets)
    sink = Sink()
    intake.take(read, sink)
    (failed,) = sink.failed
    assert outbox.num_open == 0
    return failed


def test_a_bad_request_is_its_senders_fault(tmp_path: Path, tickets: Tickets) -> None:
    bad = call(request_output_len=np.array([[0]], dtype=np.int32))
    message, code = told(EngineDead("never asked"), lambda: bad, tickets, tmp_path)
    assert "max_tokens" in message
    assert code == "INVALID_ARG"


@pytest.mark.parametrize("error", [RequestError("the queue is full"), EngineDead("the engine has died")])
def test_one_that_finds_no_room_may_try_again_and_leaves_no_ticket_behind(
    error: Exception, tmp_path: Path, tickets: Tickets
) -> None:
    assert told(error, call, tickets, tmp_path) == (str(error), "UNAVAILABLE")
    assert sum(tickets.take() is not None for _ in range(SLOTS + 1)) == SLOTS


def test_a_fault_of_ours_is_told_as_such(tmp_path: Path, tickets: Tickets) -> None:
    def read() -> Call:
        raise ValueError("memory has gone")

    message, code = told(EngineDead("never asked"), read, tickets, tmp_path)
    assert message == "the server failed on this request: memory has gone"
    assert code == "INTERNAL"
