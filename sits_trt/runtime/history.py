"""How often the tokens of one request occur: what penalties need, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Counted(NamedTuple):
    """Each different token of prompt and answer once, int64 [n], and how often it is in the answer, int64 [n]."""

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]


class TokenCounts:
    """Counts of one request. Adding a token takes the same short time however long the request is."""

    def __init__(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        known = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._size = len(known)
        self._tokens = np.concatenate((known, np.zeros(max_tokens, dtype=np.int64)))
        self._counts = np.zeros(len(self._tokens), dtype=np.int64)
        self._places = {token: place for place, token in enumerate(known.tolist())}

    def add(self, token: int) -> None:
        """Count one more token of the answer."""
        place = self._places.setdefault(token, self._size)
        if place == self._size:
            self._tokens[place] = token
            self._size += 1
        self._counts[place] += 1

    def snapshot(self) -> Counted:
        """Return the counts of now; later tokens do not change them."""
        return Counted(self._tokens[: self._size], self._counts[: self._size].copy())
