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
from functools import partial

import torch
from torch import Tensor

from sits_trt.checkpoint.expected import linear_shapes
from sits_trt.checkpoint.materialize import all_finite
from sits_trt.errors import QuantizationError
from sits_trt.models.decoder import DecoderLayer, build_layer
from sits_trt.quant.equalization import (
    fold_norm,
    fold_rows,
    pooled_by_kv_head,
    search_channel_scales,
    shared_by_queries,
)
from sits_trt.quant.grid import Grid, compact_codes, decode, stored_codes
from sits_trt.quant.keys import key_factors, smoothed_keys
from sits_trt.quant.rounding import DriftCorrection, Rounder, output_slices, uses_compensation
from sits_trt.quant.statistics import Statistics
from sits_trt.quant.streams import BlockRunner, Streams
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import ModelSpec, WeightFormat

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_O = ("self_attn.o_proj",)
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = ("mlp.down_proj",)
_ATTENTION, _MLP = "self_attn.", "mlp."

_KEPT_NUMBERS = 1 << 25
"""Most numbers, float32, of one linear's inputs that are kept instead of computed twice: 128 MiB."""

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

    `source` holds the layer's tensors by canonical name; each is asked for when it is needed, and not kept. Memory
    holds the linears of one half of the layer, attention or feed-forward network, in float32, two matrices
    [in, in] of one group's inputs, and slices. With `smooth_keys` the layer is made ready for a KV cache of integer
    codes (`quant.keys`). Raises QuantizationError, naming the layer, for values that are not finite.
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
        self.spec, self.source, self.section, self.streams, self.runner = spec, source, section, streams, runner
        self.prefix = f"model.layers.{streams.layer}."
        self.formats = {
            name.removeprefix(self.prefix): form for name, form in formats.items() if name.startswith(self.prefix)
        }
        for name in source:
            if not all_finite(source[name]):
                raise QuantizationError(f"tensor {name} holds values that are not finite; the checkpoint is damaged")
        self.shapes, self.smooth_keys = linear_shapes(spec), smooth_keys
        self.smoothed: dict[str, Tensor] = {}
        self.grids: dict[str, Grid] = {}
        self.codes: dict[str, Tensor] = {}
        self.result = LayerResult()
        self.rounding = {
            self.prefix + name: form for name, form in self.formats.items() if form.activations != "float16"
        }

    @torch.inference_mode()
    def run(self) -> LayerResult:
        """Decide the four groups, then the residual scale; return the layer as it is to be stored."""
        began = time.monotonic()
        reference, quantized = self.streams.reference, self.streams.quantized
        if self.smooth_keys:
            self._smooth_keys()
        self._attention()
        self._feed_forward()
        if self.section.scale_recover:
            self._recover_scale()
        self.result.drift = float((reference - quantized).square().sum() / reference.square().sum())
        self._collect()
        self.streams.layer += 1
        self.result.seconds = time.monotonic() - began
        return self.result

    def _smooth_keys(self) -> None:
        streams = (self.streams.reference[rows] for rows in self.streams.rows())
        factors = key_factors(self._build(_ATTENTION, self._original), streams)
        names = [name.removeprefix(self.prefix) for name in self.source]
        attention = {name: self._stored(name) for name in names if name.startswith(_ATTENTION)}
        for name, tensor in smoothed_keys(self.spec, attention, factors).items():
            self.smoothed[name] = tensor.to(attention[name].dtype)
            self._check_range(name, self.smoothed[name])

    def _attention(self) -> None:
        """Decide q, k, v and o, and advance both streams to behind them; gate and up with the statistics there."""
        reference, quantized = self.streams.reference, self.streams.quantized
        theirs, statistics = self._build(_ATTENTION, self._original), self._statistics(_QKV)
        for rows in self.streams.rows():
            statistics.add(theirs.input_norm(quantized[rows]), theirs.input_norm(reference[rows]))
        self._decide(_QKV, statistics, self._norm_fold("input_layernorm"))
        ours, statistics = self._build(_ATTENTION, self._acting), self._statistics(_O)
        inputs = _BlockInputs(quantized, self.spec.q_size)
        for rows in self.streams.rows():
            output = theirs.o(self.runner.attended(theirs, reference[rows]))
            reference[rows] += theirs.attention_change(output)
            missing = reference[rows] - quantized[rows]
            attended = inputs.of(rows, partial(self.runner.attended, ours))
            statistics.add(attended, *self._wanted(_O[0], output, missing))
        # Query heads that read one kv head share v's rows, hence their factors.
        statistics.absolute = self._per_query(self._per_kv(statistics.absolute))
        if self._decide(_O, statistics, self._fold_into_v):
            inputs.forget()
        ours, statistics = self._build(_ATTENTION, self._acting), self._statistics(_GATE_UP)
        for rows in self.streams.rows():
            attended = inputs.of(rows, partial(self.runner.attended, ours))
            quantized[rows] += ours.attention_change(ours.o(attended))
            statistics.add(ours.post_norm(quantized[rows]), theirs.post_norm(reference[rows]))
        del theirs, ours, inputs
        self._decide(_GATE_UP, statistics, self._norm_fold("post_attention_layernorm"))

    def _feed_forward(self) -> None:
        """Decide down, and advance both streams to behind it."""
        reference, quantized = self.streams.reference, self.streams.quantized
        theirs, outputs = self._build(_MLP, self._original), []
        for rows in self.streams.rows():
            output = theirs.down(theirs.activated(reference[rows]))
            reference[rows] += theirs.mlp_change(output)
            # Outputs are wanted behind norms only; without one the streams say it all.
            outputs.append(output if self.spec.post_norms else reference[:0])
        del theirs, output
        ours, statistics = self._build(_MLP, self._acting), self._statistics(_DOWN)
        inputs = _BlockInputs(quantized, self.spec.intermediate_size)
        for rows, output in zip(self.streams.rows(), outputs, strict=True):
            missing = reference[rows] - quantized[rows]
            statistics.add(inputs.of(rows, ours.activated), *self._wanted(_DOWN[0], output, missing))
        del ours, outputs, output, missing
        if self._decide(_DOWN, statistics, self._fold_into_up):
            inputs.forget()
        del statistics
        ours = self._build(_MLP, self._acting)
        for rows in self.streams.rows():
            quantized[rows] += ours.mlp_change(ours.down(inputs.of(rows, ours.activated)))

    def _wanted(self, name: str, output: Tensor, missing: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what the weight of o or down should make of its inputs [tokens, hidden], and sizes [tokens, 1].

        output: what the float layer makes of its own inputs. missing: what the quantized stream lacks to the float
        one after it, both [tokens, hidden]. The norm behind `output`, where there is one, brings every token to the
        same size: errors count relative to the token's.
        """
        bias = f"{name}.bias"
        added = self._original(bias) if self.prefix + bias in self.source else torch.zeros(())
        if not self.spec.post_norms:
            return missing - added, None
        sizes = output.square().mean(-1, keepdim=True).add_(self.spec.norm_eps).sqrt_()
        return output - added, sizes

    def _decide(self, names: tuple[str, ...], statistics: Statistics, fold: Fold) -> bool:
        """Choose factors, grids and codes of the linears `names`, which share the input of `statistics`.

        Those that are quantized share one format, as `plan_formats` gives it. Returns whether anything was folded
        into what produces the input. The statistics are used up.
        """
        form = next((self.formats[name] for name in names if name in self.formats), None)
        if form is None:
            return False
        statistics.finish()
        weight = self._corrected(names, statistics)
        rounder = Rounder(statistics.hessian, form, self.section)
        factors = torch.ones(weight.shape[1])
        if self.section.method == "awq":
            factors = search_channel_scales(weight, statistics.mean_abs, rounder)
        folded = not bool((factors == 1).all())
        if folded:
            factors = fold(factors)
        for name, part in zip(names, weight.split([self._rows(name) for name in names]), strict=True):
            if name in self.formats:
                self._round(name, part, rounder, factors)
            else:
                stored = self._stored(f"{name}.weight")
                self._keep_float(f"{name}.weight", (stored.float() * factors).to(stored.dtype))
        return folded

    def _corrected(self, names: tuple[str, ...], statistics: Statistics) -> Tensor:
        """Return the weights [out, in] of `names` one above the other, with compensation corrected for drift."""
        correct = DriftCorrection(statistics.hessian) if uses_compensation(self.section) else None
        weight = torch.empty(sum(self._rows(name) for name in names), len(statistics.hessian))
        for name, part in zip(names, weight.split([self._rows(name) for name in names]), strict=True):
            stored = self._stored(f"{name}.weight")
            for rows in output_slices(*stored.shape):
                part[rows] = original = stored[rows].float()
                if correct is not None:
                    wanted = statistics.wanted[rows] if names in (_O, _DOWN) else original @ statistics.wanted
                    part[rows] = correct(original, wanted)
        del statistics.wanted
        return weight

    def _round(self, name: str, weight: Tensor, rounder: Rounder, factors: Tensor) -> None:
        """Decide codes and grid of one linear from its corrected weight, slice by slice; note its error."""
        stored, form = self._stored(f"{name}.weight"), rounder.form
        slices, error, size = [], 0.0, 0.0
        for rows in output_slices(*weight.shape):
            codes, grid = rounder.round(weight[rows], factors)
            original = stored[rows].float()
            # A group that was zero stays exactly zero, whatever compensation would put there.
            empty = (original.reshape(*grid.scales.shape, -1) == 0).all(-1)
            grouped = codes.reshape(*grid.scales.shape, -1)
            codes = torch.where(empty[..., None], grid.zeros[..., None], grouped).reshape(codes.shape)
            error += rounder.error(original - decode(codes, grid) / factors)
            size += rounder.error(original)
            slices.append((compact_codes(codes, form), grid))
        self.codes[name] = torch.cat([codes for codes, _ in slices])
        scales, zeros = (torch.cat([getattr(grid, part) for _, grid in slices]) for part in ("scales", "zeros"))
        self._keep_grid(name, Grid(scales, zeros, form))
        self.result.errors[self.prefix + name] = error / max(size, 1e-30)

    def _keep_grid(self, name: str, grid: Grid) -> None:
        if not torch.isfinite(grid.scales).all():
            raise QuantizationError(
                f"a scale of {self.prefix}{name} does not fit into float16; its weights are too large: ignore it"
            )
        self.grids[name] = grid

    def _keep_float(self, name: str, stored: Tensor) -> None:
        self._check_range(name, stored)
        self.result.tensors[self.prefix + name] = stored

    def _check_range(self, name: str, stored: Tensor) -> None:
        if not all_finite(stored):
            raise QuantizationError(f"{self.prefix}{name} leaves the range of {stored.dtype} when scales are folded in")

    def _norm_fold(self, norm: str) -> Fold:
        def fold(factors: Tensor) -> Tensor:
            name, offset = f"{norm}.weight", self.spec.norm_offset
            before = offset + self._acting(name)
            self._keep_float(name, fold_norm(self._stored(name), factors, offset))
            after = offset + self._acting(name)
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
            self._keep_grid(name, grid.with_scales(fold_rows(grid.scales, factors)))
        else:
            dtype = self._stored(f"{name}.weight").dtype
            self._keep_float(f"{name}.weight", fold_rows(self._acting(f"{name}.weight"), factors).to(dtype))
        if self.prefix + f"{name}.bias" in self.source:
            stored = self._stored(f"{name}.bias")
            self._keep_float(f"{name}.bias", fold_rows(stored, factors).to(stored.dtype))

    def _recover_scale(self) -> None:
        """ScaleRecover: per channel the least-squares factor from the quantized to the float stream."""
        reference, quantized = self.streams.reference, self.streams.quantized
        power = quantized.square().sum(0)
        factors = torch.where(power > 0, (quantized * reference).sum(0) / power, torch.ones_like(power))
        stored = factors.to(self._stored("input_layernorm.weight").dtype)
        self._keep_float("scale_recover", stored)
        quantized *= stored.float()

    def _collect(self) -> None:
        for name in self.source:
            own = name.removeprefix(self.prefix)
            if own.removesuffix(".weight") not in self.codes:
                self.result.tensors.setdefault(name, self._stored(own))
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

    def _stored(self, name: str) -> Tensor:
        smoothed = self.smoothed.get(name)
        return self.source[self.prefix + name] if smoothed is None else smoothed

    def _rows(self, name: str) -> int:
        return self.shapes[self.prefix + name][0][0]

    def _original(self, name: str) -> Tensor:
        """Return a float tensor of the float model in float32."""
        return self._stored(name).float()

    def _acting(self, name: str) -> Tensor:
        """Return a float tensor as it acts in the quantized model so far: decoded codes, rounded folds."""
        linear = name.removesuffix(".weight")
        if linear in self.codes:
            return decode(self.codes[linear].float(), self.grids[linear])
        kept = self.result.tensors.get(self.prefix + name)
        return self._original(name) if kept is None else kept.float()

    def _build(self, half: str, tensor: Callable[[str], Tensor]) -> DecoderLayer:
        """Return the layer with the linears of one half only, of the float model or as decided so far."""
        absent = torch.empty(0, device="meta")
        other = _MLP if half == _ATTENTION else _ATTENTION
        names = [name.removeprefix(self.prefix) for name in self.source]
        named = {self.prefix + name: absent if name.startswith(other) else tensor(name) for name in names}
        formats = {} if tensor == self._original else self.rounding
        return build_layer(self.spec, self.streams.layer, named, torch.float32, formats)


class _BlockInputs:
    """The inputs of one linear in the quantized model by block: kept where they are small, else computed again."""

    def __init__(self, stream: Tensor, width: int) -> None:
        self.stream = stream
        self.keeps = len(stream) * width <= _KEPT_NUMBERS
        self.kept: dict[int, Tensor] = {}

    def of(self, rows: slice, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the inputs [tokens, width], what `compute` makes of the block at `rows` of the stream."""
        kept = self.kept.get(rows.start)
        if kept is None:
            kept = compute(self.stream[rows])
            if self.keeps:
                self.kept[rows.start] = kept
        return kept

    def forget(self) -> None:
        """The inputs have changed."""
        self.kept.clear()
