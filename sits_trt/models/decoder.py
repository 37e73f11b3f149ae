"""The decoder: one model over the ops, for every family. What differs between families is data in ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sits_trt.errors import CheckpointError
from sits_trt.models.linear import DenseLinear, W4A16Linear, fuse
from sits_trt.ops.attention import tiled_attention, tiled_attention_functional
from sits_trt.ops.rope import rope_table
from sits_trt.ops.scale_recover import scale_recover
from sits_trt.spec import ModelSpec, WeightFormat


class RmsNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019) over the last dimension; weight [size]."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _Tensors:
    """Hands out a checkpoint's tensors as layers, and knows which nobody asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], formats: Mapping[str, WeightFormat], dtype: torch.dtype) -> None:
        self.tensors, self.formats, self.dtype = tensors, formats, dtype
        self.used: set[str] = set()

    def take(self, name: str) -> Tensor:
        found = self.optional(name)
        if found is None:
            raise CheckpointError("missing from the checkpoint; is the download complete?", name)
        return found

    def optional(self, name: str) -> Tensor | None:
        if name not in self.tensors:
            return None
        self.used.add(name)
        found = self.tensors[name]
        return found.to(self.dtype) if found.is_floating_point() else found

    def linear(self, name: str) -> DenseLinear | W4A16Linear:
        bias = self.optional(f"{name}.bias")
        if name not in self.formats:
            return DenseLinear(self.take(f"{name}.weight"), bias)
        return W4A16Linear(
            self.take(f"{name}.qweight"),
            self.take(f"{name}.scales"),
            self.optional(f"{name}.zeros"),
            bias,
            self.optional(f"{name}.input_scale"),
            self.formats[name].group_size,
        )

    def refuse_leftovers(self) -> None:
        left = sorted(set(self.tensors) - self.used)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(
                f"this model has no place for it{more}; leaving it out would change the result", left[0]
            )


class DecoderLayer(nn.Module):
    """One transformer layer: attention over the tile pool and a gated feed-forward network, both residual."""

    recover: Tensor | None

    def __init__(self, spec: ModelSpec, index: int, tensors: _Tensors) -> None:
        super().__init__()
        self.spec, self.index = spec, index
        prefix = f"model.layers.{index}"
        self.input_norm = RmsNorm(tensors.take(f"{prefix}.input_layernorm.weight"), spec.norm_eps)
        self.post_norm = RmsNorm(tensors.take(f"{prefix}.post_attention_layernorm.weight"), spec.norm_eps)
        self.qkv = fuse([tensors.linear(f"{prefix}.self_attn.{part}_proj") for part in ("q", "k", "v")])
        self.o = tensors.linear(f"{prefix}.self_attn.o_proj")
        self.gate_up = fuse([tensors.linear(f"{prefix}.mlp.{part}_proj") for part in ("gate", "up")])
        self.down = tensors.linear(f"{prefix}.mlp.down_proj")
        if spec.qk_norm:
            self.q_norm = RmsNorm(tensors.take(f"{prefix}.self_attn.q_norm.weight"), spec.norm_eps)
            self.k_norm = RmsNorm(tensors.take(f"{prefix}.self_attn.k_norm.weight"), spec.norm_eps)
        self.register_buffer("recover", tensors.optional(f"{prefix}.scale_recover"))

    def _normed_heads(self, qkv: Tensor) -> Tensor:
        heads = qkv.reshape(qkv.shape[0], -1, self.spec.head_dim)
        q, k, v = heads.split((self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads), dim=1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1).reshape(qkv.shape)

    def forward(
        self, x: Tensor, kv_pool: Tensor, tile_table: Tensor, context_lens: Tensor, query_starts: Tensor, table: Tensor
    ) -> Tensor:
        qkv = self.qkv(self.input_norm(x))
        if self.spec.qk_norm:
            qkv = self._normed_heads(qkv)
        attention = tiled_attention_functional if torch.compiler.is_exporting() else tiled_attention
        attended = attention(
            qkv, kv_pool, tile_table, context_lens, query_starts, table,
            self.index, self.spec.num_heads, self.spec.num_kv_heads,
            self.spec.layer_windows[self.index], self.spec.head_dim**-0.5,
        )  # fmt: skip
        x = x + self.o(attended)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        x = x + self.down(nn.functional.silu(gate) * up)
        return x if self.recover is None else scale_recover(x, self.recover)


class Decoder(nn.Module):
    """Embedding, layers, norm and head. Arguments and result of `forward` are `contract.bindings`."""

    embedding: Tensor
    rope: Tensor

    def __init__(self, spec: ModelSpec, tensors: _Tensors, num_positions: int) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("embedding", tensors.take("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(DecoderLayer(spec, index, tensors) for index in range(spec.num_layers))
        self.norm = RmsNorm(tensors.take("model.norm.weight"), spec.norm_eps)
        tied = spec.tie_word_embeddings and "lm_head.weight" not in tensors.tensors and "lm_head" not in tensors.formats
        self.head = DenseLinear(self.embedding, None) if tied else tensors.linear("lm_head")
        self.register_buffer("rope", rope_table(spec.rope, spec.head_dim, num_positions))

    def forward(
        self,
        input_ids: Tensor,
        kv_pool: Tensor,
        tile_table: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        logit_indices: Tensor,
    ) -> Tensor:
        x = nn.functional.embedding(input_ids, self.embedding)
        for layer in self.layers:
            x = layer(x, kv_pool, tile_table, context_lens, query_starts, self.rope)
        return self.head(self.norm(x.index_select(0, logit_indices))).float()

    def dequantize_(self, dtype: torch.dtype) -> None:
        """Replace every INT4 layer by its dense equal, in place: the same result, faster without INT4 kernels."""
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, W4A16Linear):
                    setattr(module, name, child.to_dense(dtype))


def build_decoder(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    formats: Mapping[str, WeightFormat] | None = None,
    dtype: torch.dtype = torch.float16,
    num_positions: int | None = None,
) -> Decoder:
    """Build the decoder from canonical tensors (Hugging Face Llama names; quantized layers as qweight/scales/zeros).

    `formats` maps the names of quantized layers to their formats. `num_positions` bounds positions
    (default: the model's own). Every tensor must find its place: a missing or a left-over one raises CheckpointError.
    """
    source = _Tensors(tensors, formats or {}, dtype)
    decoder = Decoder(spec, source, num_positions or spec.max_positions)
    source.refuse_leftovers()
    return decoder.eval()
