"""What a sampling kernel may draw: the draw by the book in float64, and what rounding makes of it at an edge."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 4e-6
"""Relative error of a float32 weight exp((x - top) / t), down to exp(-20): of exp2's argument, below 2 ** 5, a half
unit of 2 ** -19, and two units of exp2 itself. Sums and masses inherit it."""


def settings(rows: list[tuple[float, int, float, float]]) -> Tensor:
    """Return float64 [rows, 4] of (temperature, top_k, top_p, point)."""
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


def random_settings(rng: random.Random, vocab: int, top_ks: Sequence[int]) -> tuple[float, int, float, float]:
    """Return the settings of a row of `vocab` logits: a top_k of `top_ks`, off where it leaves all, or all but one."""
    top_k = rng.choice([*top_ks, vocab - 1])
    return (
        rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k if top_k < vocab else 0,
        rng.choice([1.0, 1.0, 0.05, 0.9, 0.999]),
        rng.choice([0.0, 1 - 2**-52, rng.random(), rng.random(), rng.random()]),
    )


def acceptable(logits: Tensor, temperature: float, top_k: int, top_p: float, point: float) -> set[int]:
    """Return the tokens that may be drawn from `logits` [vocab] by weights with an error of up to EPSILON.

    One token, unless an edge is as near: of top-p, of another weight to the last one kept, or of a token to the point.
    """
    if not logits.max().isfinite():
        return {-1}
    if temperature == 0:
        return {int(logits.cpu().float().argmax())}
    # The temperature and the quotients are float32 wherever tokens are drawn.
    scaled = (logits.float() / torch.tensor(temperature, dtype=torch.float32, device=logits.device)).double()
    weights = (scaled - scaled.max()).exp()
    surely, maybe = _kept(weights, top_k, top_p)
    # The part of the mass before and up to each token, smallest and largest, if any of the unsure are kept.
    least, most = (torch.where(kept, weights, 0.0) for kept in (surely, maybe))
    begins, ends = least.cumsum(0) - least, most.cumsum(0)
    begin = begins / (begins + most.sum() - ends + most)
    end = ends / (ends + least.sum() - least.cumsum(0))
    reached = maybe & (weights > 0) & (end > point - EPSILON) & (begin <= point + EPSILON)
    return set(reached.nonzero()[:, 0].tolist())


def _kept(weights: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return which tokens are surely, and which may be, among those that top-k and then top-p leave."""
    ordered = weights.sort(descending=True).values
    sums = ordered.cumsum(0)
    first = last = (top_k or len(weights)) - 1
    if top_p < 1:
        early, late = (int((sums < top_p * sums[last] * (1 + off)).sum()) for off in (-EPSILON, EPSILON))
        first, last = min(first, early), min(last, late)
    maybe = weights >= ordered[last] * (1 - EPSILON)
    unsure = maybe & (weights <= ordered[first] * (1 + EPSILON))
    # Weights that are equal to the last bit are kept together; only different ones can change places.
    alike = bool((weights[unsure] == ordered[last]).all())
    return (maybe if alike else maybe & (~unsure | (weights == 1))), maybe
