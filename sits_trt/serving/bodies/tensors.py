"""Tensors of Triton requests and responses to Python values and back. Every tensor has a batch dimension of 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sits_trt.errors import RequestError

Arrays = Mapping[str, NDArray[Any]]


def one(arrays: Arrays, name: str) -> Any:
    """Return the only value of input `name` as a Python value, None when it is absent or empty."""
    array = arrays.get(name)
    if array is None or array.size == 0:
        return None
    if array.size > 1:
        raise RequestError(f"input '{name}' has {array.size} values; send one")
    value = array.reshape(-1)[0]
    return value.item() if isinstance(value, np.generic) else value


def texts(arrays: Arrays, name: str, called: str = "") -> tuple[str, ...]:
    """Return the texts of a STRING input, empty ones left out.

    Raises RequestError for bytes that are no UTF-8, naming the input as its sender `called` it.
    """
    array = arrays.get(name)
    if array is None:
        return ()
    decoded = []
    for value in array.reshape(-1):
        try:
            decoded.append(value.decode("utf-8") if isinstance(value, bytes) else str(value))
        except UnicodeDecodeError as error:
            raise RequestError(
                f"input '{called or name}' is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
            ) from None
    return tuple(text for text in decoded if text)


def word_ids(arrays: Arrays, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the words of a [2, n] list: token ids in row 0, the end of each word in row 1, padded with -1."""
    array = arrays.get(name)
    if array is None or array.size == 0:
        return ()
    if array.ndim < 2 or array.shape[-2] != 2:
        raise RequestError(f"input '{name}' has the shape {list(array.shape)}; send [1, 2, n]")
    ids, ends = array.reshape(-1, 2, array.shape[-1])[0].tolist()
    if min(ids) < 0:
        raise RequestError(f"input '{name}' has the token id {min(ids)}; ids start at 0")
    words, start = [], 0
    for end in ends:
        if end < 0:
            break
        if not start <= end <= len(ids):
            raise RequestError(f"input '{name}' has the end offsets {ends}; they must rise and stay within {len(ids)}")
        words.append(tuple(ids[start:end]))
        start = end
    return tuple(word for word in words if word)


def pack_word_ids(words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return words as int32 [1, 2, n], the inverse of `word_ids`. No word gives one column of 0 and -1."""
    ids = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    columns = max(len(ids), 1)
    packed = np.full((1, 2, columns), -1, dtype=np.int32)
    packed[0, 0] = 0
    packed[0, 0, : len(ids)] = ids
    packed[0, 1, : len(ends)] = ends
    return packed


def strings(values: Iterable[str]) -> NDArray[np.object_]:
    """Return texts as a STRING tensor [1, n] of UTF-8 bytes."""
    encoded = [value.encode("utf-8") for value in values]
    array = np.empty((1, len(encoded)), dtype=np.object_)
    array[0, :] = encoded
    return array
