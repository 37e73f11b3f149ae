"""From the executor's events to responses: one end each, nothing lost, nothing blocked; and who has gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sits_trt import wire
from sits_trt.runtime.request import FinishReason, Request, SamplingParams, Timings, TokenEvent
from sits_trt.serving.bodies.outbox import Outbox
from sits_trt.serving.bodies.reply import Reply
from sits_trt.serving.bodies.request import Asked
from sits_trt.serving.bodies.tickets import SLOTS, Ticket, Tickets, TicketTable

ALL = {tensor.name for tensor in wire.EXECUTOR_OUTPUTS}


class Sink:
    """Keeps what is sent; `gone` says whether the caller has left."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], bool]] = []
        self.failed: list[tuple[str, str]] = []
        self.gone = False
        self.broken = False

    def send(self, arrays: Any, final: bool) -> None:
        if self.broken:
            raise OSError("no way out")
        self.sent.append(({name: array.tolist() for name, array in arrays.items()}, final))

    def fail(self, message: str, code: str) -> None:
        self.failed.append((message, code))

    def is_cancelled(self) -> bool:
        return self.gone


def asked(streaming: bool = True, **changes: bool) -> Asked:
    flags = dict.fromkeys(("echo", "logprobs", "timings", "input_count", "output_count"), False)
    return Asked(Request("id", (1, 2), SamplingParams(9)), streaming, **{**flags, **changes})


def reply(sink: Sink, streaming: bool = True, ticket: Ticket | None = None, **changes: bool) -> Reply:
    return Reply(asked(streaming, **changes), ALL, sink, "prompt ", ticket)


def event(*ids: int, text: str = "", reason: FinishReason | None = None, **more: Any) -> TokenEvent:
    return TokenEvent("id", ids, text, reason, **more)


def text_of(sink: Sink) -> list[str]:
    return [arrays["output_text"][0][0].decode() for arrays, _ in sink.sent]


def test_b38_a_stream_ends_once_with_its_reason() -> None:
    sink = Sink()
    made = reply(sink)
    for one in (event(5, text="a"), event(6, text="é"), event(7, reason=FinishReason.LENGTH)):
        assert made.push(one)
        made.flush()
    assert text_of(sink) == ["a", "é", ""]
    assert [final for _, final in sink.sent] == [False, False, True]
    assert [arrays["finish_reason"] for arrays, _ in sink.sent] == [[[b""]], [[b""]], [[b"length"]]]
    assert [arrays["output_ids"] for arrays, _ in sink.sent] == [[[[5]]], [[[6]]], [[[7]]]]
    assert [arrays["sequence_length"] for arrays, _ in sink.sent] == [[[1]], [[1]], [[1]]]
    made.flush()
    assert len(sink.sent) == 3


def test_a_sender_that_is_behind_sends_several_tokens_at_once() -> None:
    sink = Sink()
    made = reply(sink)
    assert [made.push(event(token, text=str(token))) for token in (5, 6, 7)] == [True, False, False]
    made.flush()
    assert text_of(sink) == ["567"]
    assert sink.sent[0][0]["output_ids"] == [[[5, 6, 7]]]


def test_a_whole_answer_is_one_response() -> None:
    sink = Sink()
    made = reply(sink, streaming=False)
    assert not made.push(event(5, text="a"))
    assert made.push(event(6, text="b", reason=FinishReason.STOP))
    made.flush()
    assert text_of(sink) == ["ab"]
    assert sink.sent[0][1]
    assert sink.sent[0][0]["finish_reason"] == [[b"stop"]]


def test_an_echo_puts_the_prompt_before_a_whole_answer() -> None:
    sink = Sink()
    made = reply(sink, streaming=False, echo=True)
    made.push(event(5, text="a", reason=FinishReason.STOP))
    made.flush()
    assert text_of(sink) == ["prompt a"]
    assert sink.sent[0][0]["output_ids"] == [[[1, 2, 5]]]
    assert sink.sent[0][0]["sequence_length"] == [[3]]


@pytest.mark.parametrize("streaming", [True, False])
def test_an_error_is_a_response_of_its_own(streaming: bool) -> None:
    sink = Sink()
    made = reply(sink, streaming=streaming)
    made.push(event(5, text="a", timings=Timings(1, 2, 3, 4)))
    made.push(event(reason=FinishReason.ERROR, error="row failed", timings=Timings(1, 2, 3, 4)))
    made.flush()
    assert text_of(sink) == (["a"] if streaming else [])
    assert not any(final for _, final in sink.sent)
    assert sink.failed == [("row failed", "INTERNAL")]
    assert made.done


def test_a_request_that_never_ran_may_be_sent_again() -> None:
    sink = Sink()
    made = reply(sink)
    made.push(event(reason=FinishReason.ERROR, error="waited too long", timings=Timings(arrival_ns=1)))
    made.flush()
    assert sink.failed == [("waited too long", "UNAVAILABLE")]


def test_details_come_when_asked_for_and_wanted() -> None:
    sink = Sink()
    made = reply(sink, logprobs=True, timings=True, input_count=True, output_count=True)
    made.push(event(5, logprobs=(-0.5,), prompt_tokens=2, output_tokens=1, timings=Timings(1, 2, 3, 3)))
    made.flush()
    made.push(event(6, reason=FinishReason.STOP, logprobs=(-0.25,), prompt_tokens=2, output_tokens=2))
    made.flush()
    first, second = (arrays for arrays, _ in sink.sent)
    assert (first["cum_log_probs"], second["cum_log_probs"]) == ([[-0.5]], [[-0.75]])
    assert second["output_log_probs"] == [[[-0.25]]]
    assert (second["num_input_tokens"], second["num_output_tokens"]) == ([[2]], [[1]])
    assert (first["arrival_time_ns"], first["last_token_time_ns"]) == ([[1]], [[3]])
    assert set(first) == ALL - {"ticket"}
    narrow = Sink()
    only = Reply(asked(logprobs=True), {"output_text"}, narrow, "", None)
    only.push(event(5, reason=FinishReason.STOP))
    only.flush()
    assert set(narrow.sent[0][0]) == {"output_text"}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Handle:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def opened(outbox: Outbox, made: Reply, request_id: str = "id") -> tuple[Handle, Any]:
    handle = Handle(request_id)
    receivers: list[Any] = []

    def submit(on_event: Any) -> Handle:
        receivers.append(on_event)
        return handle

    outbox.open(made, submit)  # type: ignore[arg-type]
    return handle, receivers[0]


def made_outbox(room: Path, cancel_check_s: float = 60) -> Outbox:
    return Outbox(cancel_check_s, Tickets(), TicketTable(room / "tickets", create=True))


def test_the_outbox_sends_in_order_and_forgets_what_has_ended(tmp_path: Path) -> None:
    outbox = made_outbox(tmp_path)
    sinks = [Sink(), Sink()]
    receivers = [opened(outbox, reply(sink))[1] for sink in sinks]
    outbox.start()
    for token in range(20):
        for receive in receivers:
            receive(event(token, text=f"{token} "))
    for receive in receivers:
        receive(event(20, reason=FinishReason.STOP))
    outbox._closing.set()
    outbox.close()
    for sink in sinks:
        assert "".join(text_of(sink)) == "".join(f"{token} " for token in range(20))
        assert [final for _, final in sink.sent].count(True) == 1
    assert outbox.num_open == 0


def test_a_reply_that_cannot_be_sent_ends_alone(tmp_path: Path) -> None:
    outbox = made_outbox(tmp_path)
    broken, sound = Sink(), Sink()
    broken.broken = True
    handle, receive_broken = opened(outbox, reply(broken))
    _, receive_sound = opened(outbox, reply(sound))
    outbox.start()
    receive_broken(event(1))
    receive_sound(event(2, text="fine", reason=FinishReason.STOP))
    outbox.close()
    assert handle.cancelled.is_set()
    assert text_of(sound) == ["fine"]


def test_a_reply_that_was_given_up_frees_its_ticket_once(tmp_path: Path) -> None:
    tickets = Tickets()
    outbox = Outbox(60, tickets, TicketTable(tmp_path / "t", create=True))
    sink = Sink()
    sink.broken = True
    made = reply(sink, ticket=tickets.take())
    _, receive = opened(outbox, made)
    outbox.start()
    receive(event(1))
    wait_until(lambda: outbox.num_open == 0)
    receive(event(reason=FinishReason.CANCELLED))
    outbox.close()
    assert sink.failed == [("the server could not send the answer", "INTERNAL")]
    taken = [tickets.take() for _ in range(SLOTS + 1)]
    assert taken.count(None) == 1
    assert len({ticket.slot for ticket in taken if ticket}) == SLOTS


def test_a_caller_that_has_gone_is_cancelled(tmp_path: Path) -> None:
    outbox = made_outbox(tmp_path, 0.01)
    gone, here = Sink(), Sink()
    leaver, _ = opened(outbox, reply(gone))
    stayer, _ = opened(outbox, reply(here))
    outbox.start()
    gone.gone = True
    assert leaver.cancelled.wait(5)
    assert not stayer.cancelled.is_set()
    outbox.close()


def test_b41_cancelling_by_id_takes_equal_ids_only(tmp_path: Path) -> None:
    outbox = made_outbox(tmp_path)
    handles = [opened(outbox, reply(Sink()), request_id)[0] for request_id in ("1", "01", "1", "")]
    outbox.cancel("1")
    assert [handle.cancelled.is_set() for handle in handles] == [True, False, True, False]


def test_what_submit_refuses_is_not_open(tmp_path: Path) -> None:
    outbox = made_outbox(tmp_path)

    def submit(on_event: Any) -> Any:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        outbox.open(reply(Sink()), submit)
    assert outbox.num_open == 0


def test_b39_a_caller_reported_by_postprocessing_is_cancelled(tmp_path: Path) -> None:
    """The two tables stand for the two processes that have the file mapped."""
    ours, theirs = TicketTable(tmp_path / "t", create=True), TicketTable(tmp_path / "t")
    tickets = Tickets()
    outbox = Outbox(0.01, tickets, ours)
    taken = [tickets.take(), tickets.take()]
    (leaver, _), (stayer, receive) = (opened(outbox, reply(Sink(), ticket=ticket)) for ticket in taken)
    outbox.start()
    assert taken[0] is not None
    theirs.mark_gone(taken[0])
    assert leaver.cancelled.wait(5)
    assert not stayer.cancelled.is_set()
    receive(event(1, reason=FinishReason.STOP))
    outbox.close()


def test_a_slot_used_again_is_not_confused_by_a_late_report(tmp_path: Path) -> None:
    table, tickets = TicketTable(tmp_path / "t", create=True), Tickets()
    first = tickets.take()
    assert first is not None
    tickets.give_back(first)
    second = tickets.take()
    assert second is not None
    assert second.slot == first.slot
    table.mark_gone(first)
    assert not table.is_gone(second)


def test_more_answers_than_slots_go_without_a_ticket() -> None:
    tickets = Tickets()
    taken = [tickets.take() for _ in range(SLOTS + 3)]
    assert taken.count(None) == 3
    assert len({ticket.slot for ticket in taken if ticket}) == SLOTS


def test_every_response_of_a_stream_carries_its_ticket() -> None:
    sink = Sink()
    made = reply(sink, ticket=Ticket(5, 77))
    for reason in (None, FinishReason.STOP):
        made.push(event(1, reason=reason))
        made.flush()
    assert [arrays["ticket"] for arrays, _ in sink.sent] == [[[5, 77]]] * 2
