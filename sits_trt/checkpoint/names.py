"""Where each canonical tensor lies in a family's files: under another name, in a fused matrix, in another row order.

`places` says it for reading, `stored_parts` and `to_stored` for writing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sits_trt.checkpoint.expected import Shape, linear_shapes
from sits_trt.checkpoint.families import Family
from sits_trt.errors import CheckpointError
from sits_trt.spec import ModelSpec, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints store although they follow from the config."""

_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias|qweight|scales|zeros)")


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


def canonical_formats(stored: Mapping[str, WeightFormat], spec: ModelSpec, family: Family) -> dict[str, WeightFormat]:
    """Return the formats of canonical linear layers from those of stored ones; a fused one gives its to each part."""
    found = {}
    for name, form in stored.items():
        renamed = _renamed(name, family)
        pieces = next((pieces for fused, pieces in family.fused.items() if renamed.endswith(f".{fused}")), None)
        for canonical in [renamed] if pieces is None else _pieces(renamed, pieces):
            found[canonical] = form
    return {name: found.pop(name) for name in linear_shapes(spec) if name in found} | found


def stored_parts(names: Iterable[str], spec: ModelSpec, family: Family) -> dict[str, tuple[str, ...]]:
    """Return, for canonical tensor names, stored name -> canonical names of what it holds, one above the other.

    The inverse of `places`. Raises CheckpointError when only some of the parts of a fused matrix are there: they
    differ in kind, and one matrix cannot hold both.
    """
    renamed = {canonical: stored for stored, canonical in family.renamed.items()}
    fused = {piece: (whole, pieces) for whole, pieces in family.fused.items() for piece in pieces}
    present = set(names)
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        layer, _, kind = name.rpartition(".")
        match = re.fullmatch(r"(model\.layers\.\d+)\.(.+)", layer)
        if match is None or match[2] not in fused:
            found[".".join(renamed.get(part, part) for part in name.split("."))] = (name,)
            continue
        whole, pieces = fused[match[2]]
        parts = tuple(f"{match[1]}.{piece}.{kind}" for piece in pieces)
        missing = [part for part in parts if part not in present]
        if missing:
            raise CheckpointError(
                f"lies in one matrix with {missing[0].rpartition('.')[0]} in files of family '{spec.family}', which "
                "has another format; quantize all parts of that matrix alike, or none",
                name,
            )
        found[f"{match[1]}.{whole}.{kind}"] = parts
    return found


def to_stored(name: str, tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Return a canonical tensor with its rows in the order of the family's files: the inverse of `Place.cut`."""
    order = partial_rotary_order(spec)
    if not order or not _ROTATED.fullmatch(name):
        return tensor
    heads = tensor.unflatten(0, (-1, len(order)))
    return heads[:, [order.index(row) for row in range(len(order))]].flatten(0, 1)


def _pieces(fused: str, pieces: tuple[str, ...]) -> list[str]:
    layer = ".".join(fused.split(".")[:3])
    return [f"{layer}.{piece}" for piece in pieces]


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
        if match[2] == ".input_scale":  # it multiplies the inputs, which the parts share
            yield from ((f"{piece}{match[2]}", Place(stored, shape)) for piece in names)
            return
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
