"""What quantizing each linear layer would cost, to first order: the loss's gradient times the weight's error.

For token t and a linear layer with input x_t and loss gradient g_t at its output, a weight error E changes the loss by
d_t = g_t . (E x_t). Half of its square, summed over tokens, estimates the KL divergence from the float model: the
quadratic form of the Fisher information in E, tokens taken as independent (its diagonal is what Optimal Brain Damage,
LeCun et al. 1989, weighs single weights by). The loss is that of tokens drawn from the model's own distribution, as the
Fisher information asks. Beyond |d_t| = 1 the estimate goes on as a line (Huber): single tokens with huge activations
would decide everything, although a distribution cannot diverge by more than the logits move.

The gradient is taken layer by layer, from the last to the first. Memory holds one layer in float32, its inputs and
output gradients over the text, and one block's activations inside it; the residual streams before the layers lie on
disk meanwhile, [tokens, hidden] in float32 each.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sits_trt.checkpoint import Checkpoint
from sits_trt.errors import QuantizationError
from sits_trt.models.decoder import DecoderLayer, RmsNorm, build_layer, soft_cap
from sits_trt.ops.attention import block_attention
from sits_trt.ops.rope import rope_table
from sits_trt.progress import Progress
from sits_trt.quant.grid import decode, encode, fit_grid
from sits_trt.quant.streams import LayerTensors, Streams
from sits_trt.spec import WeightFormat

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The modules of a decoder layer that are one matrix each, and the linears whose outputs they have side by side."""

_BLOCKS = 4
"""Blocks of the calibration text that are measured on."""


def measure_losses(
    checkpoint: Checkpoint,
    blocks: Sequence[Sequence[int]],
    candidates: Mapping[str, Mapping[str, WeightFormat]],
    out_dir: Path,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """Return by layer and name of a candidate format the estimated KL divergence, in nats a token.

    Weight errors are those of rounding to nearest. `candidates` may leave layers out. `out_dir` has the streams while
    this runs. The same arguments give the same result. Raises QuantizationError where an estimate is not finite.
    """
    spec, total = checkpoint.spec, 2 * checkpoint.spec.num_layers
    blocks = blocks[:_BLOCKS]
    streams = Streams.start(checkpoint["model.embed_tokens.weight"], blocks, spec.embedding_scale)
    rows, x = list(streams.rows()), streams.reference
    losses: dict[str, dict[str, float]] = {}
    with _emptied(out_dir / "streams") as work:
        for index in range(spec.num_layers):
            progress(index, total, "sensitivity: forward")
            save_file({"x": x}, work / f"{index}.safetensors")
            layer = _Layer(checkpoint, index, max(streams.lengths))
            with torch.no_grad():
                x = torch.cat([layer.run(x[block]) for block in rows])
        gradient = _gradient_at_the_end(checkpoint, x, rows)
        for index in reversed(range(spec.num_layers)):
            progress(total - index - 1, total, "sensitivity: backward")
            x = load_file(work / f"{index}.safetensors")["x"]
            layer = _Layer(checkpoint, index, max(streams.lengths))
            for block in rows:
                # A copy: what comes through the residual addition is the very tensor that goes in.
                gradient[block] = layer.backward(x[block], gradient[block].clone())
            losses |= layer.losses(candidates)
    return losses


@contextmanager
def _emptied(directory: Path) -> Iterator[Path]:
    """Yield a new, empty `directory` and remove it; what a killed run left is removed first."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _gradient_at_the_end(checkpoint: Checkpoint, x: Tensor, rows: Sequence[slice]) -> Tensor:
    """Return the loss's gradient [tokens, hidden] at the residual stream x after the last layer."""
    spec = checkpoint.spec
    norm = RmsNorm(spec.norm_offset + checkpoint["model.norm.weight"].float(), spec.norm_eps)
    name = "lm_head.weight" if "lm_head.weight" in checkpoint else "model.embed_tokens.weight"
    head, generator = checkpoint[name].float(), torch.Generator().manual_seed(0)
    gradient = torch.empty_like(x)
    for block in rows:
        own = x[block].clone().requires_grad_()
        logits = soft_cap(nn.functional.linear(norm(own), head), spec.logit_softcap)
        if not torch.isfinite(logits).all():
            raise QuantizationError("the float model's logits on the calibration text are not finite; is it damaged?")
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        loss = nn.functional.cross_entropy(logits, drawn, reduction="sum")
        (gradient[block],) = torch.autograd.grad(loss, own)
    return gradient


class _Layer:
    """One decoder layer that gradients flow through, and what its linears have seen."""

    def __init__(self, checkpoint: Checkpoint, index: int, longest: int) -> None:
        self.spec, self.index = checkpoint.spec, index
        self.tensors = LayerTensors(checkpoint, index)
        self.layer: DecoderLayer = build_layer(self.spec, index, self.tensors, torch.float32)
        self.table = rope_table(self.spec.layer_rope(index), self.spec.head_dim, longest)
        self.inputs: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        self.gradients: dict[str, list[Tensor]] = {part: [] for part in PARTS}

    def run(self, x: Tensor) -> Tensor:
        """Return the residual stream after the layer for x [tokens, hidden] of one block."""
        attended = block_attention(
            self.layer.projected(x), self.table, self.spec.num_heads, self.spec.num_kv_heads,
            self.spec.layer_windows[self.index], self.spec.softmax_scale, self.spec.attention_softcap,
        )  # fmt: skip
        return self.layer.advanced(x, attended)

    def backward(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient at x of one block, given that after the layer; keep what the linears see of it."""
        outputs: dict[str, Tensor] = {}

        def watch(part: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            self.inputs[part].append(inputs[0].detach())
            outputs[part] = output

        handles = [getattr(self.layer, part).register_forward_hook(partial(watch, part)) for part in PARTS]
        own = x.clone().requires_grad_()
        after = self.run(own)
        for handle in handles:
            handle.remove()
        before, *seen = torch.autograd.grad(after, [own, *(outputs[part] for part in PARTS)], gradient)
        for part, found in zip(PARTS, seen, strict=True):
            self.gradients[part].append(found)
        return before

    def losses(self, candidates: Mapping[str, Mapping[str, WeightFormat]]) -> dict[str, dict[str, float]]:
        losses: dict[str, dict[str, float]] = {}
        for part, members in PARTS.items():
            x, gradient = torch.cat(self.inputs[part]), torch.cat(self.gradients[part])
            names = [f"model.layers.{self.index}.{short}" for short in members]
            weights = [self.tensors[f"{name}.weight"].float() for name in names]
            for name, weight, own in zip(
                names, weights, gradient.split([len(weight) for weight in weights], 1), strict=True
            ):
                losses[name] = {
                    choice: _estimate(weight, form, x, own) for choice, form in candidates.get(name, {}).items()
                }
                if not all(loss < float("inf") for loss in losses[name].values()):
                    raise QuantizationError(f"gradients at {name} are not finite on the calibration text; ignore it")
        return losses


def _estimate(weight: Tensor, form: WeightFormat, x: Tensor, gradient: Tensor) -> float:
    grid = fit_grid(weight, form, None)
    error = decode(encode(weight, grid), grid) - weight
    change = ((x @ error.T) * gradient).sum(1).double().abs()
    return float(torch.where(change < 1, change.square() / 2, change - 0.5).mean())
