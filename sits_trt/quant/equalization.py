"""Equalization: scaling a linear layer's input channels, and folding the inverse into what produces them.

AWQ (Lin et al. 2023): input channels with large activations get larger weights, hence a finer grid, and their
producer is divided by the same factors; the float model computes the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.quant.rounding import Rounder

_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_COMPENSATED_RATIOS = (0.0, 0.1, 0.2, 0.3)
"""Compensation already protects strong inputs: larger ratios only take precision from the weak ones."""

_LIMIT = 64.0
"""Largest factor, and inverse of the smallest: beyond it a folded norm or row would leave the range of float16."""


def channel_scales(mean_abs: Tensor, ratio: float) -> Tensor:
    """Return the AWQ factors [in] of one ratio: mean |activation| ** ratio, centred on one.

    A channel that is never active has no say: it gets the factor of the weakest active one.
    """
    active = mean_abs > 0
    if ratio == 0 or not bool(active.any()):
        return torch.ones_like(mean_abs)
    levels = mean_abs.clamp(min=float(mean_abs[active].min())) ** ratio
    centre = (levels.max() * levels.min()).sqrt()
    return (levels / centre).clamp(1 / _LIMIT, _LIMIT)


def search_channel_scales(weight: Tensor, mean_abs: Tensor, rounder: Rounder) -> Tensor:
    """Return the factors [in] with the smallest output error after rounding.

    weight: float32 [out, in] of all layers that share the input. mean_abs: [in] mean |activation|.
    Floating-point codes round large and small weights alike: no factor helps them.
    """
    if rounder.form.codes != "int":
        return torch.ones_like(mean_abs)
    ratios = _RATIOS if rounder.feedback is None else _COMPENSATED_RATIOS
    trials = torch.stack([channel_scales(mean_abs, ratio) for ratio in ratios])
    errors = rounder.trial_errors(weight, trials)
    return trials[errors.index(min(errors))]


def fold_norm(weight: Tensor, factors: Tensor, offset: float = 0.0) -> Tensor:
    """Return the stored weight [size] of a norm that multiplies by offset + weight, divided by `factors`.

    Gemma's norms have the offset 1. The result has the weight's dtype; a channel that would be zero in it, but was
    not, keeps its weight.
    """
    before = offset + weight.float()
    folded = (before / factors - offset).to(weight.dtype)
    return torch.where((offset + folded.float() == 0) & (before != 0), weight, folded)


def fold_rows(weight: Tensor, factors: Tensor) -> Tensor:
    """Return a linear layer's weight [out, in], or bias [out], with each output divided by its factor, in float32."""
    return weight.float() / (factors[:, None] if weight.dim() == 2 else factors)


def shared_by_queries(per_kv_channel: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Return factors [num_heads * head_dim] of o's input from those of v's output [kv_heads * head_dim].

    In grouped-query attention query head h reads kv head h // (heads per kv head): each head is repeated in a row.
    """
    heads = per_kv_channel.reshape(-1, head_dim)
    return heads.repeat_interleave(num_heads // len(heads), dim=0).reshape(-1)


def pooled_by_kv_head(per_query_channel: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return the mean over the query heads of each kv head: [heads * head_dim] to [kv_heads * head_dim]."""
    return per_query_channel.reshape(num_kv_heads, -1, head_dim).mean(1).reshape(-1)
