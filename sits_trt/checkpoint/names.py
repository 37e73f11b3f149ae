"""Where each canonical tensor lies in a family's files: under another name, in a fused matrix, in another row order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sits_trt.checkpoint.expected import Shape, linear_shapes
from sits_trt.checkpoint.families import Family
from sits_trt.errors import CheckpointError
from sits_trt.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints store although they follow from the config."""

_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")


@dataclass(frozen=True)
class Place:
    """A canonical tensor as a part of a stored one: rows `first` to `end`, each head's rows in the order `rows`."""

    stored: str
    shape: Shape
    first: int = 0
    end: int | None = None
    rows: tuple[int, ...] = ()

    def cut(self, stored: Tensor) -> Tensor:
        """Return the canonical tensor out of the stored one."""
        part = stored if self.end is None else stored[self.first : self.end]
        if not self.rows:
            return part
        heads = part.unflatten(0, (-1, len(self.rows)))
        return heads[:, list(self.rows)].flatten(0, 1)


def places(stored: Mapping[str, Shape], spec: ModelSpec, family: Family | None) -> dict[str, Place]:
    """Return canonical name -> place of every tensor in a file; without a family the names are canonical already.

    What is not known keeps its name, to be refused later.

    Raises CheckpointError when a fused matrix does not have the rows of its parts.
    """
    if family is None:
        return {name: Place(name, shape) for name, shape in stored.items()}
    found: dict[str, Place] = {}
    order = partial_rotary_order(spec)
    for name, shape in stored.items():
        if _RECOMPUTED.fullmatch(name):
            continue
        for canonical, place in _parts(_renamed(name, family), name, shape, spec, family):
            rows = order if _ROTATED.fullmatch(canonical) else ()
            found[canonical] = Place(place.stored, place.shape, place.first, place.end, rows)
    return found


def _renamed(name: str, family: Family) -> str:
    parts = name.split(".")
    return ".".join(family.renamed.get(part, part) for part in parts)


def _parts(name: str, stored: str, shape: Shape, spec: ModelSpec, family: Family) -> Iterator[tuple[str, Place]]:
    for fused, pieces in family.fused.items():
        match = re.fullmatch(rf"(model\.layers\.\d+\.){re.escape(fused)}(\.\w+)", name)
        if match is None:
            continue
        linears = linear_shapes(spec)
        names = [f"{match[1]}{piece}" for piece in pieces]
        if any(piece not in linears for piece in names):
            break
        rows = [linears[piece][0][0] for piece in names]
        if sum(rows) != shape[0]:
            raise CheckpointError(f"has {shape[0]} rows, config.json needs {' + '.join(map(str, rows))}", stored)
        first = 0
        for piece, count in zip(names, rows, strict=True):
            yield f"{piece}{match[2]}", Place(stored, (count, *shape[1:]), first, first + count)
            first += count
        return
    yield name, Place(stored, shape)


def partial_rotary_order(spec: ModelSpec) -> tuple[int, ...]:
    """Return, for each row of a head of q or k, the stored row; empty when all of a head is rotated.

    RoPE here pairs row j with row j + head_dim/2. A model that rotates only its first `rotary_dim` rows pairs
    j with j + rotary_dim/2, so its rows are moved apart, and the rows that are not rotated lie between and behind
    them, with frequency zero. Scores are sums over rows: their order does not matter as long as q and k agree.
    """
    rotary, dim = spec.rope.rotary_dim, spec.head_dim
    if not rotary:
        return ()
    half, still = rotary // 2, (dim - rotary) // 2
    return (
        *range(half),
        *range(rotary, rotary + still),
        *range(half, rotary),
        *range(rotary + still, dim),
    )
