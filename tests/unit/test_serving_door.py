"""The door into the executor: each caller gets its own answer, leaving is noticed, and nobody holds up the others."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sits_trt.serving.bodies import door as door_module
from sits_trt.serving.bodies.door import Call, Caller, CallFailed, Door
from sits_trt.serving.bodies.frames import read_frame
from sits_trt.serving.bodies.reply import Sink
from tests.support.server import wait_for

Take = Callable[[Callable[[], Call], Sink], None]


class Kitchen:
    """Keeps what comes in through a door, for a test to answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Sink]] = []

    def take(self, read: Callable[[], Call], sink: Sink) -> None:
        self.calls.append((read(), sink))

    def next(self) -> tuple[Call, Any]:
        wait_for(lambda: bool(self.calls), "a call")
        return self.calls.pop(0)


@pytest.fixture
def kitchen() -> Kitchen:
    return Kitchen()


@pytest.fixture
def path(tmp_path: Path, kitchen: Kitchen) -> Iterator[Path]:
    door = Door(tmp_path / "door", kitchen.take)
    yield tmp_path / "door"
    door.close()


def call(number: int = 0) -> Call:
    return Call({"ids": np.array([[number]])}, f"id {number}", ("ids", "text"), 5)


def ids(value: int) -> dict[str, Any]:
    return {"ids": np.array([[value]])}


def test_a_call_arrives_whole_and_its_answers_in_order(path: Path, kitchen: Kitchen) -> None:
    answers = Caller(path, call(7)).answers()
    got, sink = kitchen.next()
    assert (got.request_id, list(got.wanted), got.timeout_us, got.parameters) == ("id 7", ["ids", "text"], 5, {})
    assert got.arrays["ids"].tolist() == [[7]]
    sink.send(ids(1), final=False)
    sink.send(ids(2), final=True)
    assert [(found["ids"].item(), final) for found, final in answers] == [(1, False), (2, True)]
    assert not sink.is_cancelled()


def test_many_callers_at_once_each_get_their_own(tmp_path: Path) -> None:
    def double(read: Callable[[], Call], sink: Sink) -> None:
        sink.send(ids(2 * read().arrays["ids"].item()), final=True)

    door = Door(tmp_path / "door", double)
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda i: list(Caller(tmp_path / "door", call(i)).answers()), range(200)))
    door.close()
    assert [[part["ids"].item() for part, _ in answers] for answers in found] == [[2 * i] for i in range(200)]


def test_an_error_is_the_end(path: Path, kitchen: Kitchen) -> None:
    answers = Caller(path, call()).answers()
    _, sink = kitchen.next()
    sink.send(ids(1), final=False)
    sink.fail("queue full", "UNAVAILABLE")
    next(answers)
    with pytest.raises(CallFailed, match="queue full") as caught:
        next(answers)
    assert caught.value.code == "UNAVAILABLE"
    assert not sink.is_cancelled()


def test_leaving_cancels_and_the_last_answer_still_comes(path: Path, kitchen: Kitchen) -> None:
    caller = Caller(path, call())
    answers = caller.answers()
    _, sink = kitchen.next()
    assert not sink.is_cancelled()
    caller.leave()
    wait_for(sink.is_cancelled, "cancelled")
    sink.send(ids(3), final=True)
    assert next(answers)[0]["ids"].item() == 3
    assert list(answers) == []
    caller.leave()


def test_a_caller_that_dies_counts_as_gone_and_sending_to_it_fails(path: Path, kitchen: Kitchen) -> None:
    answers = Caller(path, call()).answers()
    _, sink = kitchen.next()
    sink.send(ids(1), final=False)
    next(answers)
    answers.close()  # type: ignore[attr-defined]  # a generator
    wait_for(sink.is_cancelled, "cancelled")
    with pytest.raises(BrokenPipeError):
        sink.send(ids(2), final=False)


def test_an_executor_that_vanishes_is_an_error(path: Path, kitchen: Kitchen) -> None:
    answers = Caller(path, call()).answers()
    _, sink = kitchen.next()
    sink._connection.close()
    with pytest.raises(CallFailed, match="ended without an answer") as caught:
        next(answers)
    assert caught.value.code == "INTERNAL"


def test_nobody_at_home_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match="cannot be reached") as caught:
        Caller(tmp_path / "door", call())
    assert caught.value.code == "UNAVAILABLE"


def test_one_who_never_speaks_or_breaks_off_harms_nobody(
    tmp_path: Path, kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "PATIENCE_S", 1)
    door = Door(tmp_path / "door", kitchen.take)
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as broken:
        silent.connect(str(tmp_path / "door"))
        broken.connect(str(tmp_path / "door"))
        broken.sendall(b"\x09")
        broken.shutdown(socket.SHUT_WR)
        answers = Caller(tmp_path / "door", call()).answers()
        _, sink = kitchen.next()
        sink.send(ids(1), final=True)
        assert len(list(answers)) == 1
        assert silent.recv(1) == b"", "the silent one is shown out"
    door.close()
    assert not kitchen.calls


def test_one_who_does_not_read_holds_up_nobody_and_is_given_up(
    tmp_path: Path, kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "PATIENCE_S", 1)
    door = Door(tmp_path / "door", kitchen.take)
    caller = Caller(tmp_path / "door", call())
    _, sink = kitchen.next()
    began = time.monotonic()
    for value in range(5):
        sink.send({"ids": np.full((1, 200_000), value)}, final=False)
    assert time.monotonic() - began < 0.5
    assert not sink.is_cancelled()
    wait_for(sink.is_cancelled, "given up")
    with pytest.raises(BrokenPipeError):
        sink.send(ids(1), final=True)
    sink.fail("for nobody", "INTERNAL")
    caller.leave()
    door.close()


def test_one_who_reads_late_gets_all_of_it_in_order(path: Path, kitchen: Kitchen) -> None:
    answers = Caller(path, call()).answers()
    _, sink = kitchen.next()
    for value in range(20):
        sink.send({"ids": np.full((1, 50_000), value)}, final=value == 19)
    assert [(set(found["ids"][0].tolist()), final) for found, final in answers] == [({v}, v == 19) for v in range(20)]


GOOD = {"request_id": "", "wanted": [], "timeout_us": 0, "tensors": []}


@pytest.mark.parametrize(
    "head",
    [
        b"\xff", b"[", b"[" * 100_000, b"null", [], {}, {**GOOD, "tensors": 3}, {**GOOD, "request_id": 1},
        {**GOOD, "wanted": None}, {**GOOD, "wanted": [1]}, {**GOOD, "timeout_us": "x"}, {"tensors": []},
    ],
    ids=repr,
)  # fmt: skip
def test_one_who_sends_no_request_is_told_and_shown_out(head: Any, path: Path, kitchen: Kitchen) -> None:
    written = head if isinstance(head, bytes) else json.dumps(head).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(len(written).to_bytes(4, "little") + written)
        frame = read_frame(connection)
        assert frame is not None
        assert frame[0].pop("error").startswith("this is no request: ")
        assert frame == ({"final": True, "code": "INVALID_ARG"}, {})
        assert connection.recv(1) == b""
    assert not kitchen.calls


def test_one_who_sends_byte_by_byte_is_shown_out(
    tmp_path: Path, kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(door_module, "PATIENCE_S", 1)
    door = Door(tmp_path / "door", kitchen.take)
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(tmp_path / "door"))
        slow.sendall((1000).to_bytes(4, "little"))

        def is_out() -> bool:
            try:
                slow.sendall(b" ")
            except BrokenPipeError:
                return True
            return False

        wait_for(is_out, "the slow one shown out")
    door.close()
    assert not kitchen.calls


def test_one_who_sends_more_than_a_request_counts_as_gone(path: Path, kitchen: Kitchen) -> None:
    caller = Caller(path, call())
    _, sink = kitchen.next()
    caller._connection.sendall(b"and then")
    wait_for(sink.is_cancelled, "cancelled")


def test_the_door_stays_open_where_files_or_threads_run_out(
    path: Path, kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may have 1024 files and a bounded number of threads; both come back."""
    first = Caller(path, call()).answers()
    _, sink = kitchen.next()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as waiting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
        try:
            waiting.connect(str(path))
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "sits-caller":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with socket.socket(socket.AF_UNIX) as turned_away:
        turned_away.connect(str(path))
        assert turned_away.recv(1) == b""
    monkeypatch.undo()
    sink.send(ids(1), final=True)
    assert len(list(first)) == 1
    second = Caller(path, call()).answers()
    kitchen.next()[1].send(ids(2), final=True)
    assert [found["ids"].item() for found, _ in second] == [2]


def test_more_callers_than_are_read_at_once_wait_their_turn(
    tmp_path: Path, kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "PATIENCE_S", 1)
    monkeypatch.setattr(door_module, "MAX_READ_AT_ONCE", 2)
    door = Door(tmp_path / "door", kitchen.take)
    before = threading.active_count()
    with contextlib.ExitStack() as silent:
        for _ in range(5):
            silent.enter_context(socket.socket(socket.AF_UNIX)).connect(str(tmp_path / "door"))
        answers = Caller(tmp_path / "door", call(3)).answers()
        assert threading.active_count() <= before + 2
        wait_for(lambda: bool(kitchen.calls), "a call")
    kitchen.next()[1].send(ids(4), final=True)
    assert [found["ids"].item() for found, _ in answers] == [4]
    door.close()


def test_the_door_is_ours_alone_fits_any_folder_and_is_taken_away(tmp_path: Path, kitchen: Kitchen) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    (folder / "door").write_text("left by one that was killed")
    door = Door(folder / "door", kitchen.take)
    assert stat.S_IMODE((folder / "door").stat().st_mode) == 0o600
    answers = Caller(folder / "door", call()).answers()
    _, sink = kitchen.next()
    sink.send(ids(1), final=True)
    assert len(list(answers)) == 1
    before = threading.active_count()
    door.close()
    assert threading.active_count() == before - 1
    assert not (folder / "door").exists()
