"""The tiled attention op against a plain dense twin in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sits_trt.ops import rope_table, tiled_attention, tiled_attention_functional
from sits_trt.spec import RopeSpec

LAYERS, LAYER = 2, 1


@dataclass
class Batch:
    """Sequences of random q, k, v [heads, length, head_dim], the pool they live in, and how far each has come."""

    heads: int
    kv_heads: int
    dim: int
    tile_tokens: int
    lengths: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        width = self.heads + 2 * self.kv_heads
        self.tokens = [torch.randn(n, width, self.dim, generator=generator, dtype=torch.float64) for n in self.lengths]
        tiles_per_seq = max(-(-n // self.tile_tokens) for n in self.lengths) + 1
        num_tiles = tiles_per_seq * len(self.lengths) + 3
        # Poisoned: a place that was never written must never be read.
        shape = (num_tiles, LAYERS, 2, self.kv_heads, self.tile_tokens, self.dim)
        self.pool = torch.full(shape, float("nan"), dtype=torch.float64)
        order = torch.randperm(num_tiles, generator=generator)[: tiles_per_seq * len(self.lengths)]
        self.table = order.reshape(len(self.lengths), tiles_per_seq).int()
        self.done = [0] * len(self.lengths)
        self.rope = rope_table(RopeSpec(theta=100.0), self.dim, 128)

    def arguments(self, counts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        new = [t[d : d + c] for t, d, c in zip(self.tokens, self.done, counts, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        qkv = torch.cat(new).reshape(sum(counts), -1)
        return qkv, self.pool, self.table, torch.tensor(self.done, dtype=torch.int32), starts, self.rope

    def step(self, counts: tuple[int, ...], window: int, scale: float, *softcap: float) -> list[Tensor]:
        """Advance each sequence by `counts` tokens; return each one's output [count, heads * dim]."""
        out = tiled_attention(*self.arguments(counts), LAYER, self.heads, self.kv_heads, window, scale, *softcap)
        self.done = [d + c for d, c in zip(self.done, counts, strict=True)]
        return list(out.split(list(counts)))

    def dense(self, index: int, window: int, scale: float, softcap: float = math.inf) -> Tensor:
        """The twin: rotate by complex numbers, repeat k and v for their heads, mask, softmax. [length, heads * dim]"""
        tokens = self.tokens[index]
        length, half = tokens.shape[0], self.dim // 2
        frequencies = 100.0 ** (-2 * torch.arange(half, dtype=torch.float64) / self.dim)
        turn = torch.polar(torch.ones(length, half, dtype=torch.float64),
                           torch.outer(torch.arange(length, dtype=torch.float64), frequencies))  # fmt: skip

        def rotate(x: Tensor) -> Tensor:
            turned = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
            return torch.cat((turned.real, turned.imag), -1)

        q, k, v = tokens.split((self.heads, self.kv_heads, self.kv_heads), 1)
        group = self.heads // self.kv_heads
        k, v = rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", rotate(q), k) * scale
        if softcap < math.inf:
            scores = softcap * torch.tanh(scores / softcap)
        age = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        hidden = (age < 0) | ((age >= window) if window else False)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)


# float64 arithmetic over a float32 RoPE table: its cosines carry 6e-8.
TOLERANCE = 1e-5

SCHEDULES = {
    "all at once": ((37, 16, 1, 50),),
    "chunk edges at tile edges": ((16, 16, 0, 32), (16, 0, 1, 16), (5, 0, 0, 2)),
    "chunk edges inside and across tiles": ((7, 3, 1, 15), (9, 12, 0, 2), (21, 1, 0, 33)),
    "decode steps beside a prefill": ((36, 15, 0, 49), (1, 1, 1, 1)),
}


@pytest.mark.parametrize("window", [0, 1, 5, 16, 64])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_equals_dense_attention(schedule: str, window: int) -> None:
    batch = Batch(heads=6, kv_heads=2, dim=8, tile_tokens=16, lengths=(37, 16, 1, 50), seed=window)
    parts: list[list[Tensor]] = [[] for _ in batch.lengths]
    for counts in SCHEDULES[schedule]:
        for sequence, out in zip(parts, batch.step(counts, window, 0.3), strict=True):
            sequence.append(out)
    assert batch.done == list(batch.lengths)
    for index, sequence in enumerate(parts):
        assert (torch.cat(sequence) - batch.dense(index, window, 0.3)).abs().max() < TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (4, 4, 16), (4, 1, 32), (9, 3, 64)])
def test_head_groupings(heads: int, kv_heads: int, dim: int) -> None:
    batch = Batch(heads, kv_heads, dim, tile_tokens=8, lengths=(19, 3))
    for index, out in enumerate(batch.step((19, 3), 0, dim**-0.5)):
        assert (out - batch.dense(index, 0, dim**-0.5)).abs().max() < TOLERANCE


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_capped_scores(softcap: float) -> None:
    batch = Batch(heads=4, kv_heads=2, dim=8, tile_tokens=16, lengths=(37, 16))
    uncapped = batch.dense(0, 9, 1.0)
    for index, out in enumerate(batch.step((37, 16), 9, 1.0, softcap)):
        assert (out - batch.dense(index, 9, 1.0, softcap)).abs().max() < TOLERANCE
    assert (batch.dense(0, 9, 1.0, softcap) - uncapped).abs().max() > 100 * TOLERANCE


def test_only_the_places_of_the_new_tokens_are_written() -> None:
    batch = Batch(heads=2, kv_heads=2, dim=4, tile_tokens=8, lengths=(11, 9))
    batch.step((11, 0), 0, 1.0)
    before = batch.pool.clone()
    batch.step((0, 9), 0, 1.0)
    changed = ~torch.eq(batch.pool.nan_to_num(1e9), before.nan_to_num(1e9))
    assert not changed[:, 0].any(), "the other layer is not touched"
    mine = torch.zeros_like(changed)
    tiles = batch.table[1].long()
    mine[tiles[0], LAYER], mine[tiles[1], LAYER, :, :, :1] = True, True
    assert torch.equal(changed, mine)


def test_stored_values_are_rotated_keys_and_plain_values() -> None:
    batch = Batch(heads=2, kv_heads=1, dim=4, tile_tokens=8, lengths=(3,))
    batch.step((3,), 0, 1.0)
    tile = batch.pool[batch.table[0, 0].long(), LAYER]
    tokens = batch.tokens[0]
    assert torch.equal(tile[1, 0, :3], tokens[:, 3])
    # Position 0 is not turned at all; later ones keep their length.
    assert torch.allclose(tile[0, 0, 0], tokens[0, 2])
    assert not torch.allclose(tile[0, 0, 2], tokens[2, 2])
    assert torch.allclose(tile[0, 0, :3].norm(dim=1), tokens[:, 2].norm(dim=1), atol=TOLERANCE)


def test_functional_twin_is_equal_and_leaves_the_pool_alone() -> None:
    batch = Batch(heads=4, kv_heads=2, dim=8, tile_tokens=16, lengths=(20, 5))
    arguments = batch.arguments((20, 5))
    settings = (LAYER, 4, 2, 7, 0.5, 3.0)
    functional = tiled_attention_functional(*arguments, *settings)
    assert batch.pool.isnan().all()
    assert torch.equal(functional, tiled_attention(*arguments, *settings))


def test_half_precision_input_keeps_its_type_and_is_exact_inside() -> None:
    batch = Batch(heads=4, kv_heads=2, dim=8, tile_tokens=16, lengths=(33,))
    qkv, pool, *rest = batch.arguments((33,))
    out = tiled_attention(qkv.half(), pool.half(), *rest, LAYER, 4, 2, 0, 0.35)
    assert out.dtype == torch.float16
    # Inputs, stored keys and values and the output are rounded to 11 bits each; sums are not.
    assert (out.double() - batch.dense(0, 0, 0.35)).abs().max() < 8e-3


@pytest.mark.parametrize("op", [torch.ops.sits.tiled_attention, torch.ops.sits.tiled_attention_functional])
def test_schemas_and_fakes_agree_with_the_bodies(op: torch._ops.OpOverloadPacket) -> None:
    batch = Batch(heads=4, kv_heads=2, dim=8, tile_tokens=16, lengths=(6, 2))
    batch.pool.zero_()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.default, (*batch.arguments((6, 2)), LAYER, 4, 2, 0, 0.5), test_utils=checks)
