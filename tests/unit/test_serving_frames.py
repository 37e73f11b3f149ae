"""Messages over a local socket: what goes in comes out, and an end in mid-message is an error."""

from __future__ import annotations

import json
import socket
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sits_trt.serving.bodies.frames import FrameError, frame_bytes, read_frame, send_frame

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        yield here, there


def texts(*values: bytes) -> np.ndarray[Any, Any]:
    array = np.empty((1, len(values)), dtype=np.object_)
    array[0, :] = values
    return array


def test_every_kind_of_tensor_arrives_as_it_was(pair: Pair) -> None:
    rng = np.random.default_rng()
    arrays = {
        "ids": rng.integers(-5, 5, (1, 1, 37), dtype=np.int32),
        "seed": np.array([[2**64 - 1]], dtype=np.uint64),
        "temperature": rng.random((1, 1), dtype=np.float32),
        "stream": np.array([[True]]),
        "none": np.empty((1, 2, 0), dtype=np.int32),
        "scalar": np.array(7, dtype=np.int64),
        "text": texts("wörter 🦊".encode(), b"", b"\xff\x00\n"),
        "no text": texts(),
    }
    send_frame(pair[0], {"final": True, "why": "ü"}, arrays)
    send_frame(pair[0], {"final": False}, {})
    pair[0].close()
    frame = read_frame(pair[1])
    assert frame is not None
    head, found = frame
    assert head == {"final": True, "why": "ü"}
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tolist() == array.tolist()
    assert read_frame(pair[1]) == ({"final": False}, {})
    assert read_frame(pair[1]) is None


def test_an_end_within_a_message_is_an_error_wherever_it_comes(pair: Pair) -> None:
    send_frame(pair[0], {"final": True}, {"ids": np.arange(5)})
    whole = pair[1].recv(10_000)
    for end in range(1, len(whole)):
        here, there = socket.socketpair(socket.AF_UNIX)
        with there:
            here.sendall(whole[:end])
            here.close()
            with pytest.raises(ConnectionError, match="ended within a message"):
                read_frame(there)


def test_sending_to_one_who_has_gone_is_an_error(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        send_frame(pair[0], {}, {})


@pytest.mark.parametrize(
    ("listed", "body", "match"),
    [
        ([["a", "<i4", [1], -4]], b"", "would have -4 bytes"),
        ([["a", "<i4", [1], 4.0]], b"1234", "something else"),
        ([["a", "<i4", [7], 4]], b"1234", "would have 4 bytes"),
        ([["a", "<i4", [-1, -1], 4]], b"1234", "something else"),
        ([["a", "<i4", [True], 4]], b"1234", "something else"),
        ([["a", "<i4", [10**18], 4 * 10**18]], b"", "would have 4000000000000000000 bytes"),
        ([["a", "<i4", [1], 4], ["a", "<i4", [1], 4]], b"12341234", "twice"),
        ([["a", "|O", [1], 8]], b"12345678", "type"),
        ([["a", "<M8[s]", [1], 8]], b"12345678", "type"),
        ([["a", "i4,i4", [1], 8]], b"12345678", "type"),
        ([["a", "what", [1], 4]], b"1234", "type"),
        ([["a", "", [10**15], 4]], b"1234", "would have 4 bytes"),
        ([["a", "", [1], 4]], b"\xff\xff\xff\xff", "another length"),
        ([["a", "", [2], 8]], b"\x03\0\0\0abc\0", "ends early"),
        ([["a", "", [1], 6]], b"\1\0\0\0ab", "another length"),
        ([["a"]], b"", "something else"),
        ([3], b"", "something else"),
        ({"a": 3}, b"", "lists no tensors"),
    ],
)
def test_what_no_sender_writes_is_refused_before_memory_is_taken(
    pair: Pair, listed: Any, body: bytes, match: str
) -> None:
    head = json.dumps({"tensors": listed}).encode()
    pair[0].sendall(len(head).to_bytes(4, "little") + head + body)
    tracemalloc.start()
    with pytest.raises(FrameError, match=match):
        read_frame(pair[1])
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 1 << 20


def test_a_giant_head_is_refused(pair: Pair) -> None:
    pair[0].sendall(b"\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="4294967295 bytes"):
        read_frame(pair[1])


def test_a_message_that_takes_too_long_is_an_error(pair: Pair) -> None:
    pair[0].sendall(frame_bytes({}, {}))
    with pytest.raises(TimeoutError):
        read_frame(pair[1], patience_s=-1)
