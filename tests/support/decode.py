"""Runs a Decoder over scattered tiles, whole or in chunks, several sequences at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sits_trt.models import Decoder
from sits_trt.ops import allocate_pool
from sits_trt.spec import TileSpec


@dataclass
class ScatteredRun:
    """A pool whose tiles are handed out in random order, and the sequences that live in it.

    The pool, or the scales of a coded one, starts out full of NaN: whatever reads a place that was never written
    shows it. `kv_dtype` is the pool's type, by default the decoder's own.
    """

    decoder: Decoder
    num_sequences: int
    tiles_per_seq: int = 8
    tile_tokens: int = 16
    seed: int = 0
    kv_dtype: str = ""
    pool: Tensor = field(init=False)
    scales: Tensor | None = field(init=False)
    table: Tensor = field(init=False)
    contexts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        tiles = self.num_sequences * self.tiles_per_seq
        own = str(self.decoder.embedding.dtype).removeprefix("torch.")
        tile = TileSpec.of(self.decoder.spec, self.tile_tokens, self.kv_dtype or own)
        self.pool, self.scales = allocate_pool(tile, tiles)
        (self.pool if self.scales is None else self.scales).fill_(float("nan"))
        order = torch.randperm(tiles, generator=torch.Generator().manual_seed(self.seed))
        self.table = order.reshape(self.num_sequences, self.tiles_per_seq).int()
        self.contexts = [0] * self.num_sequences

    def step(self, new_tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Advance each sequence by its new tokens (possibly none); return the logits of each, [new, vocab]."""
        starts = [0]
        for tokens in new_tokens:
            starts.append(starts[-1] + len(tokens))
        with torch.inference_mode():
            logits = self.decoder(
                torch.tensor([token for tokens in new_tokens for token in tokens], dtype=torch.int32),
                self.pool,
                self.table,
                torch.tensor(self.contexts, dtype=torch.int32),
                torch.tensor(starts, dtype=torch.int32),
                torch.arange(starts[-1], dtype=torch.int32),
                self.scales,
            )
        self.contexts = [context + len(tokens) for context, tokens in zip(self.contexts, new_tokens, strict=True)]
        return list(logits.split([len(tokens) for tokens in new_tokens]))


def whole_logits(decoder: Decoder, ids: Sequence[int], kv_dtype: str = "") -> Tensor:
    """Return the logits [len(ids), vocab] of one sequence run in one step."""
    tile_tokens = 16
    run = ScatteredRun(decoder, 1, -(-len(ids) // tile_tokens), tile_tokens, kv_dtype=kv_dtype)
    return run.step([ids])[0]


def chunked_logits(decoder: Decoder, ids: Sequence[int], chunks: Sequence[int], kv_dtype: str = "") -> Tensor:
    """Return the logits of one sequence run in chunks of the given sizes, then token by token to its end."""
    tile_tokens = 16
    run = ScatteredRun(decoder, 1, -(-len(ids) // tile_tokens), tile_tokens, kv_dtype=kv_dtype)
    rest, parts = list(ids), []
    for size in (*chunks, *([1] * (len(ids) - sum(chunks)))):
        parts.append(run.step([rest[:size]])[0])
        rest = rest[size:]
    return torch.cat(parts)
