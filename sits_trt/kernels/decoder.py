"""`models.Decoder` on a GPU: the same function, its linears, attention and small operations from a kernel bundle."""

from __future__ import annotations

from typing import cast

import torch
from sits_plugins.launch import BundleLauncher
from torch import Tensor, nn

from sits_trt.errors import SitsError
from sits_trt.kernels.attention import KernelAttention
from sits_trt.kernels.fused import add_norm, silu_mul
from sits_trt.kernels.linear import KernelLinear
from sits_trt.models import Decoder
from sits_trt.models.decoder import DecoderLayer
from sits_trt.models.linear import W4A16Linear


class KernelDecoder:
    """Runs a decoder whose INT4 layers are still INT4; takes it over, and lays their weights anew.

    Arguments and result of a call are those of `Decoder.forward`, for up to `max_tokens` new tokens. Fit for CUDA
    graph capture once the launcher has loaded its kernels. Raises SitsError for a model that the kernels lack
    something for.
    """

    def __init__(self, decoder: Decoder, launcher: BundleLauncher, max_tokens: int) -> None:
        spec = decoder.spec
        if spec.attention_softcap:
            raise SitsError(f"the kernels have no soft cap, which models of family '{spec.family}' need; use eager")
        self._decoder, self._launcher = decoder, launcher
        device = str(decoder.embedding.device)
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._attention = KernelAttention(launcher, max_tokens, *sizes, device)
        _relay(decoder, decoder.embedding.dtype, launcher)

    def __call__(
        self,
        input_ids: Tensor,
        kv_pool: Tensor,
        tile_table: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        logit_indices: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        decoder, spec = self._decoder, self._decoder.spec
        layers = cast(list[DecoderLayer], list(decoder.layers))
        residual = decoder.embed(input_ids)
        normed = add_norm(self._launcher, residual, layers[0].input_norm.weight, spec.norm_eps)
        for index, layer in enumerate(layers):
            qkv = layer.qkv(normed)
            if spec.qk_norm:
                qkv = layer.normed_heads(qkv)
            attended = self._attention(
                qkv, kv_pool, tile_table, context_lens, query_starts, decoder.layer_rope(index), index,
                spec.layer_windows[index], spec.softmax_scale, kv_scales,
            )  # fmt: skip
            out = layer.o(attended)
            out = layer.attention_output_norm(out) if spec.post_norms else out
            normed = add_norm(self._launcher, residual, layer.post_norm.weight, spec.norm_eps, out)
            out = layer.down(self._activated(layer, normed))
            out = layer.mlp_output_norm(out) if spec.post_norms else out
            following = layers[index + 1].input_norm if index + 1 < len(layers) else decoder.norm
            normed = add_norm(self._launcher, residual, following.weight, spec.norm_eps, out, layer.recover)
        return decoder.logits(normed.index_select(0, logit_indices))

    def _activated(self, layer: DecoderLayer, normed: Tensor) -> Tensor:
        if layer.spec.activation != "silu":
            return layer.gated(layer.gate_up(normed))
        if isinstance(layer.gate_up, KernelLinear):
            return layer.gate_up.silu_gated(normed)
        return silu_mul(self._launcher, layer.gate_up(normed))


def _relay(module: nn.Module, dtype: torch.dtype, launcher: BundleLauncher) -> None:
    """Replace every INT4 layer below `module` by the one that launches kernels."""
    for name, child in list(module.named_children()):
        if isinstance(child, W4A16Linear):
            setattr(module, name, KernelLinear(child, dtype, launcher))
        else:
            _relay(child, dtype, launcher)
