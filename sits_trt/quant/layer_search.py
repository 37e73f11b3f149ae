"""The search in one decoder layer: four groups of linear layers in the order in which they compute.

Each group's input is that of the model as quantized so far, and is gathered before the group is decided:

    q, k, v    input: normed stream        wanted: what the float model computes
    o          input: attention's result   wanted: the float model's stream after attention
    gate, up   input: normed stream        wanted: what the float model computes
    down       input: gated activations    wanted: the float model's stream after the layer

so that, with compensation, each group also makes up for the drift of everything before it. Where a norm follows o
and down before the residual stream (Gemma 2 and 3), drift cannot pass through it: what is wanted there is the float
layer's own output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sits_trt.errors import QuantizationError
from sits_trt.models.decoder import DecoderLayer, build_layer
from sits_trt.quant.compensation import output_error
from sits_trt.quant.equalization import (
    fold_norm,
    fold_rows,
    pooled_by_kv_head,
    search_channel_scales,
    shared_by_queries,
)
from sits_trt.quant.grid import Grid, compact_codes, decode, stored_codes
from sits_trt.quant.keys import key_factors, smoothed_keys
from sits_trt.quant.rounding import correct_drift, round_weight, scale_inputs, uses_compensation
from sits_trt.quant.statistics import Statistics
from sits_trt.quant.streams import BlockRunner, Streams
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import ModelSpec, WeightFormat

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

Fold = Callable[[Tensor], Tensor]
"""Divides what produces an input by factors [in] and returns the factors that this came to after rounding."""


@dataclass
class LayerResult:
    """A decided layer: its canonical tensors as the quantized checkpoint holds them, and what it cost.

    `errors` maps the name of each quantized linear to its squared output error on the calibration text, relative to
    the squared output; `drift` is the relative squared difference of the two residual streams after the layer;
    `seconds` is how long the search took.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    drift: float = 0.0
    seconds: float = 0.0


class LayerSearch:
    """Decides one layer and advances both streams over it, in place.

    `source` holds the layer's tensors by canonical name. With `smooth_keys` the layer is made ready for a KV cache of
    integer codes (`quant.keys`). Raises QuantizationError, naming the layer, for values that are not finite.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: Mapping[str, Tensor],
        formats: Mapping[str, WeightFormat],
        section: QuantizationSection,
        streams: Streams,
        runner: BlockRunner,
        smooth_keys: bool = False,
    ) -> None:
        self.spec, self.section, self.streams, self.runner = spec, section, streams, runner
        self.prefix = f"model.layers.{streams.layer}."
        self.source = {name.removeprefix(self.prefix): tensor for name, tensor in source.items()}
        self.formats = {name.removeprefix(self.prefix): form for name, form in formats.items()}
        for name, tensor in source.items():
            if not torch.isfinite(tensor).all():
                raise QuantizationError(f"tensor {name} holds values that are not finite; the checkpoint is damaged")
        # Float tensors as they act in the quantized model: decoded codes, rounded folds.
        self.acting = {name: tensor.float() for name, tensor in self.source.items()}
        self.grids: dict[str, Grid] = {}
        self.codes: dict[str, Tensor] = {}
        self.result = LayerResult()
        self.rounding = {
            self.prefix + name: form for name, form in self.formats.items() if form.activations != "float16"
        }
        self.reference_layer = self._build(self.acting, {})
        self.layer = self.reference_layer
        self.smooth_keys = smooth_keys

    @torch.inference_mode()
    def run(self) -> LayerResult:
        """Decide the four groups, then the residual scale; return the layer as it is to be stored."""
        began = time.monotonic()
        reference, quantized = self.streams.reference, self.streams.quantized
        if self.smooth_keys:
            self._smooth_keys()
        self._attention_inputs()
        self._attention_output()
        self._feed_forward_inputs()
        self._feed_forward_output()
        for rows in self.streams.rows():
            quantized[rows] += self.layer.mlp_change(self.layer.down(self.layer.activated(quantized[rows])))
        if self.section.scale_recover:
            self._recover_scale()
        self.result.drift = float((reference - quantized).square().sum() / reference.square().sum())
        self._collect()
        self.streams.layer += 1
        self.result.seconds = time.monotonic() - began
        return self.result

    def _smooth_keys(self) -> None:
        streams = (self.streams.reference[rows] for rows in self.streams.rows())
        factors = key_factors(self.reference_layer, streams)
        for name, tensor in smoothed_keys(self.spec, self.source, factors).items():
            self.source[name] = self._stored(name, tensor.to(self.source[name].dtype))
            self.acting[name] = self.source[name].float()
        self.layer = self._build(self.acting, self.rounding)

    def _attention_inputs(self) -> None:
        statistics = self._statistics(_QKV)
        for rows in self.streams.rows():
            statistics.add(
                self.layer.input_norm(self.streams.quantized[rows]),
                self.reference_layer.input_norm(self.streams.reference[rows]),
            )
        self._decide(_QKV, statistics, self._weights(_QKV) @ statistics.wanted, self._norm_fold("input_layernorm"))

    def _attention_output(self) -> None:
        reference, quantized = self.streams.reference, self.streams.quantized
        statistics = self._statistics(("self_attn.o_proj",))
        for rows in self.streams.rows():
            output = self.reference_layer.o(self.runner.attended(self.reference_layer, reference[rows]))
            reference[rows] += self.reference_layer.attention_change(output)
            attended = self.runner.attended(self.layer, quantized[rows])
            statistics.add(attended, *self._wanted("self_attn.o_proj", output, reference[rows] - quantized[rows]))
        # Query heads that read one kv head share v's rows, hence their factors.
        statistics.absolute = self._per_query(self._per_kv(statistics.absolute))
        self._decide(("self_attn.o_proj",), statistics, statistics.wanted, self._fold_into_v)

    def _feed_forward_inputs(self) -> None:
        reference, quantized = self.streams.reference, self.streams.quantized
        statistics = self._statistics(_GATE_UP)
        for rows in self.streams.rows():
            attended = self.runner.attended(self.layer, quantized[rows])
            quantized[rows] += self.layer.attention_change(self.layer.o(attended))
            statistics.add(self.layer.post_norm(quantized[rows]), self.reference_layer.post_norm(reference[rows]))
        wanted = self._weights(_GATE_UP) @ statistics.wanted
        self._decide(_GATE_UP, statistics, wanted, self._norm_fold("post_attention_layernorm"))

    def _feed_forward_output(self) -> None:
        reference, quantized = self.streams.reference, self.streams.quantized
        statistics = self._statistics(("mlp.down_proj",))
        for rows in self.streams.rows():
            output = self.reference_layer.down(self.reference_layer.activated(reference[rows]))
            reference[rows] += self.reference_layer.mlp_change(output)
            activated = self.layer.activated(quantized[rows])
            statistics.add(activated, *self._wanted("mlp.down_proj", output, reference[rows] - quantized[rows]))
        self._decide(("mlp.down_proj",), statistics, statistics.wanted, self._fold_into_up)

    def _wanted(self, name: str, output: Tensor, missing: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what the weight of o or down should make of its inputs [tokens, hidden], and sizes [tokens, 1].

        output: what the float layer makes of its own inputs. missing: what the quantized stream lacks to the float
        one after it, both [tokens, hidden]. The norm behind `output`, where there is one, brings every token to the
        same size: errors count relative to the token's.
        """
        bias = self.acting.get(f"{name}.bias", torch.zeros(()))
        if not self.spec.post_norms:
            return missing - bias, None
        sizes = output.square().mean(-1, keepdim=True).add_(self.spec.norm_eps).sqrt_()
        return output - bias, sizes

    def _decide(self, names: tuple[str, ...], statistics: Statistics, wanted: Tensor, fold: Fold) -> None:
        """Choose factors, grids and codes of the linears `names`, which share the input of `statistics`.

        Those that are quantized share one format, as `plan_formats` gives it.
        """
        form = next((self.formats[name] for name in names if name in self.formats), None)
        if form is None:
            return
        hessian, original = statistics.hessian, self._weights(names)
        weight = correct_drift(original, hessian, wanted) if uses_compensation(self.section) else original
        factors = torch.ones(weight.shape[1])
        if self.section.method == "awq":
            factors = fold(search_channel_scales(weight, statistics.mean_abs, hessian, form, self.section))
        codes, grid = round_weight(*scale_inputs(weight, hessian, factors), form, self.section)
        start = 0
        for name in names:
            rows = slice(start, start + len(self.source[f"{name}.weight"]))
            start = rows.stop
            if name in self.formats:
                own = Grid(grid.scales[rows], grid.zeros[rows], form)
                self._keep_codes(name, codes[rows], own)
                error = output_error(original[rows] - self.acting[f"{name}.weight"] / factors, hessian)
                self.result.errors[self.prefix + name] = error / max(output_error(original[rows], hessian), 1e-30)
            else:
                stored = self.source[f"{name}.weight"]
                self._keep_float(f"{name}.weight", (stored.float() * factors).to(stored.dtype))
        self.layer = self._build(self.acting, self.rounding)

    def _keep_codes(self, name: str, codes: Tensor, grid: Grid) -> None:
        if not torch.isfinite(grid.scales).all():
            raise QuantizationError(
                f"a scale of {self.prefix}{name} does not fit into float16; its weights are too large: ignore it"
            )
        # A group that was zero stays exactly zero, whatever compensation would put there.
        empty = (self.source[f"{name}.weight"].reshape(*grid.scales.shape, -1) == 0).all(-1)
        grouped = codes.reshape(*grid.scales.shape, -1)
        kept = torch.where(empty[..., None], grid.zeros[..., None], grouped).reshape(codes.shape)
        self.codes[name], self.grids[name] = compact_codes(kept, grid.form), grid
        self.acting[f"{name}.weight"] = decode(kept, grid)

    def _keep_float(self, name: str, stored: Tensor) -> None:
        self.result.tensors[self.prefix + name] = self._stored(name, stored)
        self.acting[name] = stored.float()

    def _stored(self, name: str, stored: Tensor) -> Tensor:
        if not torch.isfinite(stored).all():
            raise QuantizationError(f"{self.prefix}{name} leaves the range of {stored.dtype} when scales are folded in")
        return stored

    def _norm_fold(self, norm: str) -> Fold:
        def fold(factors: Tensor) -> Tensor:
            name, offset = f"{norm}.weight", self.spec.norm_offset
            before = offset + self.acting[name]
            self._keep_float(name, fold_norm(self.source[name], factors, offset))
            after = offset + self.acting[name]
            return torch.where(after == 0, torch.ones_like(factors), before / after)

        return fold

    def _fold_into_v(self, factors: Tensor) -> Tensor:
        self._fold_into_rows("self_attn.v_proj", self._per_kv(factors))
        return factors

    def _fold_into_up(self, factors: Tensor) -> Tensor:
        self._fold_into_rows("mlp.up_proj", factors)
        return factors

    def _fold_into_rows(self, name: str, factors: Tensor) -> None:
        if name in self.grids:
            grid = self.grids[name]
            self._keep_codes(name, self.codes[name].float(), grid.with_scales(fold_rows(grid.scales, factors)))
        else:
            stored = self.source[f"{name}.weight"]
            self._keep_float(f"{name}.weight", fold_rows(self.acting[f"{name}.weight"], factors).to(stored.dtype))
        if f"{name}.bias" in self.source:
            stored = self.source[f"{name}.bias"]
            self._keep_float(f"{name}.bias", fold_rows(stored, factors).to(stored.dtype))

    def _recover_scale(self) -> None:
        """ScaleRecover: per channel the least-squares factor from the quantized to the float stream."""
        reference, quantized = self.streams.reference, self.streams.quantized
        power = quantized.square().sum(0)
        factors = torch.where(power > 0, (quantized * reference).sum(0) / power, torch.ones_like(power))
        stored = factors.to(self.source["input_layernorm.weight"].dtype)
        self._keep_float("scale_recover", stored)
        del self.acting["scale_recover"]
        quantized *= stored.float()

    def _collect(self) -> None:
        for name, tensor in self.source.items():
            if name.removesuffix(".weight") not in self.codes:
                self.result.tensors.setdefault(self.prefix + name, tensor)
        for name, codes in self.codes.items():
            self.result.tensors[f"{self.prefix}{name}.qweight"] = stored_codes(codes, self.formats[name])
            self.result.tensors[f"{self.prefix}{name}.scales"] = self.grids[name].scales.half()
            if not self.formats[name].symmetric:
                self.result.tensors[f"{self.prefix}{name}.zeros"] = self.grids[name].zeros.to(torch.uint8)

    def _per_kv(self, per_query: Tensor) -> Tensor:
        return pooled_by_kv_head(per_query, self.spec.num_kv_heads, self.spec.head_dim)

    def _per_query(self, per_kv: Tensor) -> Tensor:
        return shared_by_queries(per_kv, self.spec.num_heads, self.spec.head_dim)

    def _statistics(self, names: tuple[str, ...]) -> Statistics:
        form = next((self.formats[name] for name in names if name in self.formats), None)
        return Statistics(self.prefix + names[0], form)

    def _weights(self, names: tuple[str, ...]) -> Tensor:
        return torch.cat([self.acting[f"{name}.weight"] for name in names])

    def _build(self, tensors: Mapping[str, Tensor], formats: Mapping[str, WeightFormat]) -> DecoderLayer:
        named = {self.prefix + name: tensor for name, tensor in tensors.items()}
        return build_layer(self.spec, self.streams.layer, named, torch.float32, formats)
