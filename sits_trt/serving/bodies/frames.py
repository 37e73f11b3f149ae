"""Messages between two processes of one server over a local socket: a JSON head, then the bytes of its tensors.

On the wire: the head's length as 4 bytes, the head, and the tensors in the order in which the head lists them. Texts
are written as in Triton's own binary format: each after its length in 4 bytes. All numbers are little-endian.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sits_trt.serving.bodies.tensors import Arrays

_LENGTH = struct.Struct("<I")


def send_frame(connection: socket.socket, head: Mapping[str, Any], arrays: Arrays) -> None:
    """Send one message. Raises OSError when the other side has gone or does not read."""
    bodies = [_body(array) for array in arrays.values()]
    listed = [
        [name, "" if array.dtype == np.object_ else array.dtype.str, array.shape, len(body)]
        for (name, array), body in zip(arrays.items(), bodies, strict=True)
    ]
    written = json.dumps({**head, "tensors": listed}).encode()
    connection.sendall(b"".join([_LENGTH.pack(len(written)), written, *bodies]), socket.MSG_NOSIGNAL)


def read_frame(connection: socket.socket) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return head and tensors of the next message, None when the other side has ended between two messages.

    Raises OSError when it ends within one.
    """
    first = connection.recv(_LENGTH.size)
    if not first:
        return None
    (length,) = _LENGTH.unpack(first + _read(connection, _LENGTH.size - len(first)))
    head: dict[str, Any] = json.loads(_read(connection, length))
    listed = head.pop("tensors")
    return head, {name: _array(_read(connection, size), dtype, shape) for name, dtype, shape, size in listed}


def _read(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            raise ConnectionError("the other process ended within a message")
        found += piece
    return bytes(found)


def _body(array: NDArray[Any]) -> bytes:
    if array.dtype != np.object_:
        return array.tobytes()
    texts = [text.encode("utf-8") if isinstance(text, str) else bytes(text) for text in array.reshape(-1)]
    return b"".join(_LENGTH.pack(len(text)) + text for text in texts)


def _array(body: bytes, dtype: str, shape: list[int]) -> NDArray[Any]:
    if dtype:
        return np.frombuffer(body, dtype).reshape(shape)
    texts = np.empty(math.prod(shape), dtype=np.object_)
    start = 0
    for index in range(len(texts)):
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size
        texts[index] = body[start : start + length]
        start += length
    return texts.reshape(shape)
