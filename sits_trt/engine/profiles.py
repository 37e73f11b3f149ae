"""Optimization profiles: the shapes that an engine accepts and those that it is tuned for.

Two profiles, because the two kinds of step differ by orders of magnitude in their largest dimension:

- decode: every sequence advances by one token, so there are as many tokens as sequences.
- mixed: up to max_tokens_per_step tokens of chunked prefill beside decoding sequences. Its ranges hold those of
  decode, so a runner that keeps one context uses this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sits_trt.contract import EngineLimits, bindings
from sits_trt.recipe.schema import PromptTokens
from sits_trt.spec import ModelSpec, TileSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """Range of one dimension: what is accepted at least, what is tuned for, what is accepted at most."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class Profile:
    """Shapes of every input: name to (min, opt, max)."""

    name: str
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "shapes": {name: [list(s) for s in three] for name, three in self.shapes.items()}}


def plan_profiles(
    model: ModelSpec, tile: TileSpec, limits: EngineLimits, prompt: PromptTokens, max_output_tokens: int
) -> tuple[Profile, Profile]:
    """Return the decode and the mixed profile, in the order in which the engine numbers them.

    Tuned for a full batch whose sequences are half-way through answering a median prompt; mixed steps for one
    chunk as long as the 95th percentile of prompts beside it.
    """
    batch = limits.max_batch_size
    decode_tokens = min(batch, limits.max_tokens_per_step)
    typical_tiles = tile.tiles_for(min(limits.max_seq_tokens, prompt.p50 + max_output_tokens // 2))
    shared = {
        "batch": Extent(1, batch, batch),
        "batch_plus_1": Extent(2, batch + 1, batch + 1),
        "outputs": Extent(1, batch, batch),
        "tiles": Extent(1, limits.num_tiles, limits.num_tiles),
        "tiles_per_seq": Extent(1, typical_tiles, tile.tiles_for(limits.max_seq_tokens)),
    }
    chunk_tokens = min(limits.max_tokens_per_step, prompt.p95 + batch - 1)
    return (
        _profile("decode", model, tile, shared | {"tokens": Extent(1, decode_tokens, decode_tokens)}),
        _profile("mixed", model, tile, shared | {"tokens": Extent(1, chunk_tokens, limits.max_tokens_per_step)}),
    )


def _profile(name: str, model: ModelSpec, tile: TileSpec, extents: Mapping[str, Extent]) -> Profile:
    def shape(dims: tuple[str | int, ...], which: str) -> Shape:
        return tuple(getattr(extents[d], which) if isinstance(d, str) else d for d in dims)

    shapes = {
        b.name: (shape(b.shape, "min"), shape(b.shape, "opt"), shape(b.shape, "max"))
        for b in bindings(model, tile)
        if b.is_input
    }
    return Profile(name, shapes)
