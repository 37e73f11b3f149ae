"""A second way into the executor, for processes of the same server: a Unix socket in the server's room.

Triton's own way, a call from Python to a decoupled model, does not hold: in Triton Server 2.51 answers are taken and
given up on threads that do not hold the interpreter's lock, and one request in some thousands ended the process.

One connection is one request. The caller sends one frame and reads frames until one is final; it leaves by closing
its side, which cancels the request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sits_trt.serving.bodies.frames import FrameError, frame_bytes, read_frame, send_frame
from sits_trt.serving.bodies.reply import Sink
from sits_trt.serving.bodies.tensors import Arrays
from sits_trt.serving.room import room

logger = logging.getLogger(__name__)

PATIENCE_S = 10
"""How long the executor's side waits for a caller that neither sends its request nor reads its answer."""

BACKLOG = 1024

MAX_READ_AT_ONCE = 1024
"""Callers whose requests are still coming in; more wait in the backlog."""

_RETRY_S = 0.1


@dataclass(frozen=True)
class Call:
    """One request to the executor as it came in. `wanted` are the names of the outputs that it asks for."""

    arrays: Arrays
    request_id: str
    wanted: Collection[str]
    timeout_us: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)


def door_path() -> Path:
    """Return the socket's file, one for each running server."""
    return room() / f"sits-trt-door-{os.getppid()}"


class Door:
    """Listens for callers and hands each request to `take`, on a thread of its own, with the way back.

    It stays open whatever callers do: one that sends no request is told so and shown out.
    """

    def __init__(self, path: Path, take: Callable[[Callable[[], Call], Sink], None]) -> None:
        self._path = path
        self._take = take
        self._closing = threading.Event()
        self._places = threading.BoundedSemaphore(MAX_READ_AT_ONCE)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        with _short(path) as address:
            self._listener.bind(address)
        path.chmod(0o600)
        self._listener.listen(BACKLOG)
        self._thread = threading.Thread(target=self._accept, name="sits-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more requests; those in flight go on."""
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            # Not without end: close() must be heard.
            while not self._places.acquire(timeout=_RETRY_S):
                if self._closing.is_set():
                    return
            try:
                connection, _ = self._listener.accept()
                self._start(connection)
            # No file handle or thread is left: the caller waits in the backlog, or sees its connection closed.
            except (OSError, RuntimeError) as error:
                self._places.release()
                if self._closing.wait(_RETRY_S):
                    return
                logger.warning("a caller could not be let in: %s", error)

    def _start(self, connection: socket.socket) -> None:
        try:
            threading.Thread(target=self._serve, args=(connection,), name="sits-caller", daemon=True).start()
        except RuntimeError:
            connection.close()
            raise

    def _serve(self, connection: socket.socket) -> None:
        sink = SocketSink(connection)
        try:
            call = self._read(connection, sink)
        finally:
            self._places.release()
        if call is not None:
            self._take(lambda: call, sink)

    def _read(self, connection: socket.socket, sink: SocketSink) -> Call | None:
        """Return the request of a caller. None, and the connection is closed, where it sends none."""
        try:
            patience = struct.pack("ll", PATIENCE_S, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
            frame = read_frame(connection, PATIENCE_S)
            if frame is not None:
                return _call_of(*frame)
        except OSError as error:
            logger.warning("a caller did not send its request: %s", error)
        except FrameError as error:
            logger.warning("a caller sent what is no request: %s", error)
            sink.fail(f"this is no request: {error}", "INVALID_ARG")
            return None
        connection.close()
        return None


def _call_of(head: Mapping[str, Any], arrays: Arrays) -> Call:
    """Return the request in a frame. Raises FrameError when the head is that of something else."""
    match head:
        case {"request_id": str(request_id), "wanted": [*wanted], "timeout_us": int(timeout_us)} if all(
            isinstance(name, str) for name in wanted
        ):
            return Call(arrays, request_id, wanted, timeout_us)
    raise FrameError("its head is that of no request")


class SocketSink:
    """The way back to one caller, for use from several threads.

    Sending never waits: one thread sends to all callers, and what one of them does not read is kept, and sent by a
    thread of its own. A caller that reads nothing for PATIENCE_S is given up.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._ended = False
        self._gone = False
        self._unsent = b""

    def send(self, arrays: Mapping[str, NDArray[Any]], final: bool) -> None:
        """Send a response, or keep it to be sent. Raises OSError when the caller has gone or been given up."""
        self._send({"final": final}, arrays, final)

    def fail(self, message: str, code: str) -> None:
        """Send an error as the last response; a caller that has gone misses it."""
        with contextlib.suppress(OSError):
            self._send({"final": True, "error": message, "code": code}, {}, final=True)

    def is_cancelled(self) -> bool:
        """Whether the caller has closed its side, or sent more than a request, before the last response was sent."""
        with self._lock:
            if self._ended or self._gone:
                return self._gone and not self._ended
            try:
                self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True
            return True

    def _send(self, head: Mapping[str, Any], arrays: Arrays, final: bool) -> None:
        message = frame_bytes(head, arrays)
        with self._lock:
            if self._gone:
                raise BrokenPipeError("the caller has gone or been given up")
            assert not self._ended, "a request has one last response"
            self._ended = final
            if self._unsent:
                self._unsent += message
                return
            try:
                self._send_now(message, final)
            # No thread is left to wait for it, or the caller has gone.
            except (RuntimeError, OSError):
                self._leave()
                raise

    def _send_now(self, message: bytes, final: bool) -> None:
        try:
            sent = self._connection.send(message, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        self._unsent = message[sent:]
        if self._unsent:
            threading.Thread(target=self._send_rest, name="sits-slow-caller", daemon=True).start()
        elif final:
            self._connection.close()

    def _send_rest(self) -> None:
        unsent = self._unsent
        while unsent:
            try:
                sent = self._connection.send(unsent, socket.MSG_NOSIGNAL)
            except OSError as error:
                logger.warning("a caller does not read its answer: %s", error)
                with self._lock:
                    self._leave()
                return
            with self._lock:
                unsent = self._unsent = self._unsent[sent:]
                if self._ended and not unsent:
                    self._connection.close()

    def _leave(self) -> None:
        self._gone = True
        self._unsent = b""
        self._connection.close()


class CallFailed(Exception):
    """The executor's error for one call; `code` is a name of Triton's error codes such as INVALID_ARG."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Caller:
    """One request through the door, from the other side."""

    def __init__(self, path: Path, call: Call) -> None:
        """Connect and send. Raises CallFailed when nobody listens."""
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            with _short(path) as address:
                self._connection.connect(address)
            head = {"request_id": call.request_id, "wanted": sorted(call.wanted), "timeout_us": call.timeout_us}
            send_frame(self._connection, head, call.arrays)
        except OSError as error:
            self._connection.close()
            raise CallFailed(f"the executor cannot be reached ({error})", "UNAVAILABLE") from None

    def answers(self) -> Iterator[tuple[dict[str, NDArray[Any]], bool]]:
        """Yield the tensors of each response and whether it is the last. Raises CallFailed."""
        with self._connection:
            final = False
            while not final:
                try:
                    frame = read_frame(self._connection)
                except (OSError, FrameError):
                    frame = None
                if frame is None:
                    raise CallFailed("the executor ended without an answer", "INTERNAL")
                head, arrays = frame
                if "error" in head:
                    raise CallFailed(head["error"], head["code"])
                final = head["final"]
                yield arrays, final

    def leave(self) -> None:
        """Tell the executor that nobody waits any more; its last response still comes. From any thread."""
        # The answer may have ended, and the connection with it.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield an address for `path` that fits into the 107 bytes of a Unix socket's, however long the folder's name."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
