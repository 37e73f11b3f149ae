"""The decoder: one model over the ops, for every family. What differs between families is data in ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from sits_trt.checkpoint import Checkpoint
from sits_trt.errors import CheckpointError
from sits_trt.models.linear import DenseLinear, Linear, QuantizedLinear, RoundedLinear, W4A16Linear, dequantize_, fuse
from sits_trt.ops.attention import tiled_attention, tiled_attention_functional
from sits_trt.ops.kv_pool import code_kind
from sits_trt.ops.kv_quant import quantized_tiled_attention, quantized_tiled_attention_functional
from sits_trt.ops.rope import rope_table
from sits_trt.ops.scale_recover import scale_recover
from sits_trt.spec import ModelSpec, WeightFormat

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
}


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), or x as it is for a cap of 0."""
    return cap * torch.tanh(x / cap) if cap else x


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

    def norm(self, name: str, spec: ModelSpec) -> RmsNorm:
        weight = self.take(name)
        return RmsNorm(
            (spec.norm_offset + weight.float()).to(weight.dtype) if spec.norm_offset else weight, spec.norm_eps
        )

    def linear(self, name: str) -> Linear:
        bias, form = self.optional(f"{name}.bias"), self.formats.get(name)
        if form is None:
            return DenseLinear(self.take(f"{name}.weight"), bias)
        input_scale = self.optional(f"{name}.input_scale")
        if f"{name}.weight" in self.tensors:  # decoded before: what is left of the format is the input's rounding
            return RoundedLinear(self.take(f"{name}.weight"), bias, input_scale, form)
        qweight, scales = self.take(f"{name}.qweight"), self.take(f"{name}.scales")
        zeros = self.optional(f"{name}.zeros")
        if (form.bits, form.codes, form.activations) != (4, "int", "float16"):
            return QuantizedLinear(qweight, scales, zeros, bias, input_scale, form)
        width = form.group_width(2 * qweight.shape[1])
        return W4A16Linear(qweight, scales, zeros, bias, input_scale, width)

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
        self.input_norm = tensors.norm(f"{prefix}.input_layernorm.weight", spec)
        self.post_norm = tensors.norm(f"{prefix}.post_attention_layernorm.weight", spec)
        if spec.post_norms:
            self.attention_output_norm = tensors.norm(f"{prefix}.attention_output_layernorm.weight", spec)
            self.mlp_output_norm = tensors.norm(f"{prefix}.mlp_output_layernorm.weight", spec)
        self.qkv = fuse([tensors.linear(f"{prefix}.self_attn.{part}_proj") for part in ("q", "k", "v")])
        self.o = tensors.linear(f"{prefix}.self_attn.o_proj")
        self.gate_up = fuse([tensors.linear(f"{prefix}.mlp.{part}_proj") for part in ("gate", "up")])
        self.down = tensors.linear(f"{prefix}.mlp.down_proj")
        if spec.qk_norm:
            self.q_norm = tensors.norm(f"{prefix}.self_attn.q_norm.weight", spec)
            self.k_norm = tensors.norm(f"{prefix}.self_attn.k_norm.weight", spec)
        self.register_buffer("recover", tensors.optional(f"{prefix}.scale_recover"))

    def projected(self, x: Tensor) -> Tensor:
        """Return q, k and v, not yet rotated, side by side for the residual stream x [tokens, hidden]."""
        qkv: Tensor = self.qkv(self.input_norm(x))
        return self.normed_heads(qkv) if self.spec.qk_norm else qkv

    def normed_heads(self, qkv: Tensor) -> Tensor:
        """Return qkv [tokens, (heads + 2 * kv_heads) * head_dim] with each head of q and k normed."""
        heads = qkv.reshape(qkv.shape[0], -1, self.spec.head_dim)
        q, k, v = heads.split((self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads), dim=1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1).reshape(qkv.shape)

    def attended(
        self, x: Tensor, kv_pool: Tensor, tile_table: Tensor, context_lens: Tensor, query_starts: Tensor, table: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the input of `o` [tokens, heads * head_dim] for the residual stream x [tokens, hidden]."""
        qkv = self.projected(x)
        # Left out where there is none: the exported op then has no argument that engines do not know.
        softcap = (self.spec.attention_softcap,) if self.spec.attention_softcap else ()
        places = (tile_table, context_lens, query_starts, table)
        numbers = (
            self.index, self.spec.num_heads, self.spec.num_kv_heads, self.spec.layer_windows[self.index],
            self.spec.softmax_scale,
        )  # fmt: skip
        exporting = torch.compiler.is_exporting()
        if kv_scales is None:
            attention = tiled_attention_functional if exporting else tiled_attention
            return attention(qkv, kv_pool, *places, *numbers, *softcap)
        coded = quantized_tiled_attention_functional if exporting else quantized_tiled_attention
        return coded(qkv, kv_pool, kv_scales, *places, *numbers, code_kind(kv_pool), *softcap)

    def activated(self, x: Tensor) -> Tensor:
        """Return the input of `down` [tokens, intermediate] for the residual stream x [tokens, hidden]."""
        return self.gated(self.gate_up(self.post_norm(x)))

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) * up for gate and up side by side, [tokens, 2 * intermediate]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[self.spec.activation](gate) * up

    def attention_change(self, output: Tensor) -> Tensor:
        """Return what attention adds to the residual stream, for the output of `o`; both [tokens, hidden]."""
        return self.attention_output_norm(output) if self.spec.post_norms else output

    def mlp_change(self, output: Tensor) -> Tensor:
        """Return what the feed-forward network adds to the residual stream, for the output of `down`."""
        return self.mlp_output_norm(output) if self.spec.post_norms else output

    def forward(
        self, x: Tensor, kv_pool: Tensor, tile_table: Tensor, context_lens: Tensor, query_starts: Tensor, table: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.advanced(x, self.attended(x, kv_pool, tile_table, context_lens, query_starts, table, kv_scales))

    def advanced(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the layer for the stream x before it and `attended`."""
        x = x + self.attention_change(self.o(attended))
        x = x + self.mlp_change(self.down(self.activated(x)))
        return x if self.recover is None else scale_recover(x, self.recover)


class Decoder(nn.Module):
    """Embedding, layers, norm and head. Arguments and result of `forward` are `contract.bindings`."""

    embedding: Tensor
    rope: Tensor
    second_rope: Tensor

    def __init__(self, spec: ModelSpec, tensors: _Tensors, num_positions: int) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("embedding", tensors.take("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(DecoderLayer(spec, index, tensors) for index in range(spec.num_layers))
        self.norm = tensors.norm("model.norm.weight", spec)
        tied = spec.tie_word_embeddings and "lm_head.weight" not in tensors.tensors and "lm_head" not in tensors.formats
        self.head = DenseLinear(self.embedding, None) if tied else tensors.linear("lm_head")
        self.register_buffer("rope", rope_table(spec.rope, spec.head_dim, num_positions))
        if spec.second_rope is not None:
            self.register_buffer("second_rope", rope_table(spec.second_rope, spec.head_dim, num_positions))

    def forward(
        self,
        input_ids: Tensor,
        kv_pool: Tensor,
        tile_table: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        logit_indices: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, kv_pool, tile_table, context_lens, query_starts, self.layer_rope(index), kv_scales)
        return self.logits(self.norm(x.index_select(0, logit_indices)))

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the residual stream [tokens, hidden] before the first layer."""
        x = nn.functional.embedding(input_ids, self.embedding)
        return x if self.spec.embedding_scale == 1 else x * self.spec.embedding_scale

    def layer_rope(self, index: int) -> Tensor:
        """Return the table of layer `index`'s rotary embedding."""
        return self.second_rope if index in self.spec.second_rope_layers else self.rope

    def logits(self, normed: Tensor) -> Tensor:
        """Return float32 logits [outputs, vocab_size] for normed streams [outputs, hidden]."""
        return soft_cap(self.head(normed).float(), self.spec.logit_softcap)

    def dequantize_(self, dtype: torch.dtype) -> None:
        """Replace every quantized layer by its dense equal, in place: the same result, faster without kernels."""
        dequantize_(self, dtype)


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


def build_oracle(
    checkpoint: Checkpoint, num_positions: int | None = None, formats: Mapping[str, WeightFormat] | None = None
) -> Decoder:
    """Build a checkpoint's decoder in float32, quantized weights decoded once: exact, and fast enough to score.

    `formats` takes the place of the checkpoint's own. Raises CheckpointError as `build_decoder` does.
    """
    formats = checkpoint.formats if formats is None else formats
    decoder = build_decoder(checkpoint.spec, checkpoint, formats, torch.float32, num_positions)
    decoder.dequantize_(torch.float32)
    return decoder


def build_layer(
    spec: ModelSpec,
    index: int,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    formats: Mapping[str, WeightFormat] | None = None,
) -> DecoderLayer:
    """Build decoder layer `index` alone from its own canonical tensors; quantized weights come out dequantized.

    A linear in `formats` whose weight is given decoded rounds its input as its format says. It is the only layer of
    its model: its KV pool has one layer. A missing or left-over tensor raises CheckpointError.
    """
    own, first = f"model.layers.{index}.", "model.layers.0."
    source = _Tensors(
        {first + name.removeprefix(own): tensor for name, tensor in tensors.items()},
        {first + name.removeprefix(own): form for name, form in (formats or {}).items() if name.startswith(own)},
        dtype,
    )
    layer = DecoderLayer(spec.one_layer(index), 0, source)
    source.refuse_leftovers()
    dequantize_(layer, dtype)
    return layer.eval()
