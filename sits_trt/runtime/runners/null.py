"""A runner without a model: what it answers depends on the whole history, through the pool, and can be foretold."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sits_trt.runtime.step import StepInputs
from sits_trt.spec import TileSpec

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
_MASK = 2**64 - 1

LIKELIEST_LOGIT = 10.0
"""Logit of the token that follows; all others have 0."""


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return base**0, base**1, ... modulo 2**64, uint64 [count]."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


def _tokens_of(hashes: NDArray[np.uint64], vocab_size: int) -> NDArray[np.int64]:
    # The low bits of a polynomial modulo 2**64 depend on the low bits of the tokens only: take the high ones.
    return ((hashes >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int64)


def null_answer(prompt_ids: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Return the `num_tokens` tokens that a NullRunner gives to a greedy request with this prompt."""
    state = 0
    for token in prompt_ids:
        state = (state * _BASE + token + 1) & _MASK
    answer = []
    for _ in range(num_tokens):
        token = (state >> 33) % vocab_size
        answer.append(token)
        state = (state * _BASE + token + 1) & _MASK
    return answer


class NullRunner:
    """Keeps in each pool slot a hash of all tokens up to it, and reads the one before through the tile table.

    So the next token depends on every token before it and on the tables being right: a lost, doubled or misplaced
    token, or a tile given to two sequences, changes the answer. `null_answer` foretells it. A slot is
    hash(history + token) = hash(history) * base + token + 1 modulo 2**64. The cost is that of the new tokens alone.

    `step_ms` is how long a step takes at least.
    """

    def __init__(self, tile: TileSpec, num_tiles: int, vocab_size: int, step_ms: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self.num_tiles = num_tiles
        self._step_ms = step_ms
        self._pool = np.zeros((num_tiles, tile.tile_tokens), dtype=np.uint64)

    def run(self, inputs: StepInputs) -> Tensor:
        if self._step_ms:
            time.sleep(self._step_ms / 1000)
        tile_tokens = self._pool.shape[1]
        ends = np.zeros(len(inputs.input_ids), dtype=np.uint64)
        starts = inputs.query_starts.tolist()
        for row, context in enumerate(inputs.context_lens.tolist()):
            table = inputs.tile_table[row]
            ids = inputs.input_ids[starts[row] : starts[row + 1]]
            position = np.arange(context, context + len(ids))
            before = self._pool[table[(context - 1) // tile_tokens], (context - 1) % tile_tokens] if context else 0
            hashes = self._extend(np.uint64(before), ids)
            self._pool[table[position // tile_tokens], position % tile_tokens] = hashes
            ends[starts[row] : starts[row + 1]] = hashes
        tokens = _tokens_of(ends[inputs.logit_indices], self.vocab_size)
        logits = torch.zeros(len(tokens), self.vocab_size)
        logits[torch.arange(len(tokens)), torch.from_numpy(tokens)] = LIKELIEST_LOGIT
        return logits

    @staticmethod
    def _extend(before: np.uint64, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the hash after each of `ids`: before * base**i + sum of (id_j + 1) * base**(i-j), all at once."""
        count = len(ids)
        forward, backward = _powers(_BASE, count + 1)[1:], _powers(_INVERSE, count + 1)[1:]
        terms = (ids.astype(np.uint64) + np.uint64(1)) * backward
        with np.errstate(over="ignore"):
            return (before + np.cumsum(terms, dtype=np.uint64)) * forward

    def close(self) -> None:
        self._pool = self._pool[:0]
