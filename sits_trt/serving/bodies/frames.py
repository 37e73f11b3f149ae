"""Messages between two processes of one server over a local socket: a JSON head, then the bytes of its tensors.

On the wire: the head's length as 4 bytes, the head, and the tensors in the order in which the head lists them. Texts
are written as in Triton's own binary format: each after its length in 4 bytes. All numbers are little-endian.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sits_trt.serving.bodies.tensors import Arrays

_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 1 << 18

MAX_FRAME_BYTES = 64 << 20
"""Of a message that is read: millions of tokens. A length beyond it is no message of ours."""


class FrameError(Exception):
    """What came is no message."""


def frame_bytes(head: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return one message as it goes over the socket."""
    bodies = [_body(array) for array in arrays.values()]
    listed = [
        [name, "" if array.dtype == np.object_ else array.dtype.str, array.shape, len(body)]
        for (name, array), body in zip(arrays.items(), bodies, strict=True)
    ]
    written = json.dumps({**head, "tensors": listed}).encode()
    return b"".join([_LENGTH.pack(len(written)), written, *bodies])


def send_frame(connection: socket.socket, head: Mapping[str, Any], arrays: Arrays) -> None:
    """Send one message. Raises OSError when the other side has gone or does not read."""
    connection.sendall(frame_bytes(head, arrays), socket.MSG_NOSIGNAL)


def read_frame(
    connection: socket.socket, patience_s: float = math.inf
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return head and tensors of the next message, None when the other side has ended between two messages.

    Raises OSError when it ends within one or has not sent all of it after `patience_s`, and FrameError for anything
    that is no message, before memory is taken for what it claims to hold.
    """
    deadline = time.monotonic() + patience_s
    first = connection.recv(_LENGTH.size)
    if not first:
        return None
    (length,) = _LENGTH.unpack(first + _read(connection, _LENGTH.size - len(first), deadline))
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"its head would have {length} bytes")
    try:
        head = json.loads(_read(connection, length, deadline))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"its head is not JSON ({error})") from None
    listed = _listed(head).items()
    return head, {
        name: _array(_read(connection, size, deadline), dtype, shape) for name, (dtype, shape, size) in listed
    }


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        if time.monotonic() > deadline:
            raise TimeoutError("the other process takes too long over a message")
        piece = connection.recv(min(size - len(found), _PIECE_BYTES))
        if not piece:
            raise ConnectionError("the other process ended within a message")
        found += piece
    return bytes(found)


def _body(array: NDArray[Any]) -> bytes:
    if array.dtype != np.object_:
        return array.tobytes()
    texts = [text.encode("utf-8") if isinstance(text, str) else bytes(text) for text in array.reshape(-1)]
    return b"".join(_LENGTH.pack(len(text)) + text for text in texts)


def _listed(head: Any) -> dict[str, tuple[np.dtype[Any] | None, list[int], int]]:
    """Take the list of tensors out of a head: type (None for texts), shape and bytes by name. Raises FrameError."""
    listed = head.pop("tensors", None) if isinstance(head, dict) else None
    if not isinstance(listed, list):
        raise FrameError("its head lists no tensors")
    found: dict[str, tuple[np.dtype[Any] | None, list[int], int]] = {}
    for entry in listed:
        match entry:
            case [str(name), str(kind), [*shape], int(size)] if all(type(side) is int and side >= 0 for side in shape):
                found[name] = (_dtype(kind), shape, size)
            case _:
                raise FrameError("its head describes something else than tensors")
        dtype, items = found[name][0], math.prod(shape)
        # Every text takes at least its length's bytes.
        if size < items * _LENGTH.size if dtype is None else size != items * dtype.itemsize:
            raise FrameError(f"tensor '{name}' of shape {shape} would have {size} bytes")
    if len(found) < len(listed):
        raise FrameError("its head lists a tensor twice")
    if (total := sum(size for _, _, size in found.values())) > MAX_FRAME_BYTES:
        raise FrameError(f"its tensors would have {total} bytes")
    return found


def _dtype(kind: str) -> np.dtype[Any] | None:
    """Return the type of numbers or truth values that numpy calls `kind`, None for texts."""
    if not kind:
        return None
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError):
        dtype = np.dtype(np.object_)
    if dtype.kind not in "biuf":
        raise FrameError(f"there are no tensors of type '{kind}'")
    return dtype


def _array(body: bytes, dtype: np.dtype[Any] | None, shape: list[int]) -> NDArray[Any]:
    if dtype is not None:
        return np.frombuffer(body, dtype).reshape(shape)
    texts = np.empty(math.prod(shape), dtype=np.object_)
    start = 0
    for index in range(len(texts)):
        if start + _LENGTH.size > len(body):
            raise FrameError("a tensor of texts ends early")
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size
        texts[index] = body[start : start + length]
        start += length
    if start != len(body):
        raise FrameError("a tensor of texts has another length than its texts")
    return texts.reshape(shape)
