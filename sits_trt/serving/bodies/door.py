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

from sits_trt.serving.bodies.frames import read_frame, send_frame
from sits_trt.serving.bodies.reply import Sink
from sits_trt.serving.bodies.tensors import Arrays
from sits_trt.serving.room import room

logger = logging.getLogger(__name__)

PATIENCE_S = 10
"""How long the executor's side waits for a caller that neither sends its request nor reads its answer."""

BACKLOG = 1024


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
    """Listens for callers and hands each request to `take`, on a thread of its own, with the way back."""

    def __init__(self, path: Path, take: Callable[[Callable[[], Call], Sink], None]) -> None:
        self._path = path
        self._take = take
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
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), name="sits-caller", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        patience = struct.pack("ll", PATIENCE_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        try:
            frame = read_frame(connection)
        except OSError as error:
            logger.warning("a caller did not send its request: %s", error)
            frame = None
        if frame is None:
            connection.close()
            return
        head, arrays = frame
        call = Call(arrays, head["request_id"], head["wanted"], head["timeout_us"])
        self._take(lambda: call, SocketSink(connection))


class SocketSink:
    """The way back to one caller, for use from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._ended = False

    def send(self, arrays: Mapping[str, NDArray[Any]], final: bool) -> None:
        self._send({"final": final}, arrays, final)

    def fail(self, message: str, code: str) -> None:
        self._send({"final": True, "error": message, "code": code}, {}, final=True)

    def is_cancelled(self) -> bool:
        """Whether the caller has closed its side before the last response was sent."""
        with self._lock:
            if self._ended:
                return False
            try:
                return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True

    def _send(self, head: Mapping[str, Any], arrays: Arrays, final: bool) -> None:
        with self._lock:
            assert not self._ended, "a request has one last response"
            self._ended = final
            try:
                send_frame(self._connection, head, arrays)
            finally:
                if final:
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
                except OSError:
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
