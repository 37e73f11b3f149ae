"""Smoothing of keys: what makes the steps of an integer KV cache fit all channels of a head.

A key's codes have one step for all its channels, and a few channels of keys are far larger than the others: these
decide the step, and the others are rounded to nothing. Dividing key channels by factors and multiplying those of the
queries that meet them leaves every score as it is (SmoothQuant, Xiao et al. 2023, does so for linear layers). The two
channels that RoPE turns into each other share a factor, so that turning and scaling commute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sits_trt.models.decoder import DecoderLayer
from sits_trt.quant.equalization import channel_scales, fold_norm, fold_rows, shared_by_queries
from sits_trt.spec import ModelSpec

_RATIO = 0.75
"""A factor is the largest key of its pair of channels to this power; a search per layer finds nothing better."""


def key_factors(layer: DecoderLayer, streams: Iterable[Tensor]) -> Tensor:
    """Return the factors [kv_heads, head_dim] of a layer's keys, for residual streams [tokens, hidden] before it.

    Where the keys are normed, all heads share one norm weight, hence their factors.
    """
    spec = layer.spec
    largest = torch.zeros(spec.num_kv_heads, spec.head_dim // 2)
    for stream in streams:
        qkv = layer.qkv(layer.input_norm(stream))
        heads = (layer.normed_heads(qkv) if spec.qk_norm else qkv).reshape(len(stream), -1, spec.head_dim)
        first, second = heads[:, spec.num_heads : spec.num_heads + spec.num_kv_heads].chunk(2, dim=-1)
        largest = torch.maximum(largest, (first.square() + second.square()).amax(0).sqrt())
    if spec.qk_norm:
        largest = largest.amax(0, keepdim=True).expand_as(largest)
    return torch.stack([channel_scales(head, _RATIO) for head in largest]).repeat(1, 2)


def smoothed_keys(spec: ModelSpec, tensors: Mapping[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    """Return what of a layer's tensors (by canonical name without the layer) changes under `key_factors`, in float32.

    Keys become smaller by the factors and queries larger: in the norms of both where there are some, else in weights
    and biases.
    """
    prefix = "self_attn."
    if spec.qk_norm:
        return {
            f"{prefix}{part}_norm.weight": fold_norm(
                tensors[f"{prefix}{part}_norm.weight"].float(), by, spec.norm_offset
            )
            for part, by in (("k", factors[0]), ("q", 1 / factors[0]))
        }
    by_query = 1 / shared_by_queries(factors.reshape(-1), spec.num_heads, spec.head_dim)
    return {
        name: fold_rows(tensors[name], by)
        for part, by in (("k", factors.reshape(-1)), ("q", by_query))
        for name in (f"{prefix}{part}_proj.weight", f"{prefix}{part}_proj.bias")
        if name in tensors
    }
