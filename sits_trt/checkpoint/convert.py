"""A checkpoint in another format, with nothing decided anew: the codes, scales and zero points that are there.

ScaleRecover has no place in any other format. It multiplies the residual stream h after layer i by s, and everything
later adds to the product: h' = s * h, and for all that follows c * h with c the product of the factors so far. With
the stream kept as u = h / c, what writes to it could be divided by c in its rows; but what reads it is a norm, and
rms(c * u) is not c * rms(u) unless all channels of c are equal. So nothing next to it can take s in, and a checkpoint
with any s other than one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sits_trt.artifacts import new_directory
from sits_trt.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sits_trt.checkpoint.config import family_of
from sits_trt.checkpoint.expected import linear_shapes
from sits_trt.checkpoint.formats import autoawq, compressed_tensors, dense, modelopt
from sits_trt.checkpoint.formats.detect import KEY
from sits_trt.checkpoint.formats.layer import SITS, Format, Plan, QuantizedLayer, require_plain_activations
from sits_trt.checkpoint.materialize import DTYPES, converted, in_dtype, write_config
from sits_trt.checkpoint.names import stored_parts, to_stored
from sits_trt.checkpoint.quantized import write_quantized
from sits_trt.checkpoint.shard_writer import ShardWriter
from sits_trt.checkpoint.tokenizer import load_tokenizer
from sits_trt.errors import CheckpointError, did_you_mean
from sits_trt.progress import Progress, silent
from sits_trt.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

_MODULES: tuple[Format, ...] = (autoawq, modelopt, compressed_tensors)
QUANTIZED: Mapping[str, Format] = {module.NAME: module for module in _MODULES}
"""Name of a quantized format of others to the module that writes it."""

FORMATS = (dense.NAME, SITS, *QUANTIZED)

_OF_A_LAYER = ("scales", "zeros", "input_scale")


def convert(
    source: Path | str,
    target: str,
    out_dir: Path,
    dtype: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write `source` (as `open_checkpoint` takes it) into the new directory `out_dir` in the format `target`.

    `target` is one of FORMATS. `dtype` is the type of what is not quantized, by default that of the
    source. Memory holds one stored matrix at a time. Returns what was written, for display. Raises CheckpointError
    when the format cannot hold the source, and SitsError when `out_dir` holds something; nothing is left behind.
    """
    if target not in FORMATS:
        known = ", ".join(FORMATS)
        raise CheckpointError(f"format '{target}' is unknown{did_you_mean(target, FORMATS)}; known: {known}")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(source)
    if not checkpoint.formats and target != dense.NAME:
        raise CheckpointError(
            f"{source} is not quantized; quantize it first with 'sits-trt build', or use --to {dense.NAME}"
        )
    with new_directory(out_dir) as partial:
        if target == SITS:
            tensors = converted(checkpoint, dtype, progress)
            write_quantized(partial, checkpoint, tensors, checkpoint.formats, dtype)
        else:
            _write(checkpoint, QUANTIZED.get(target), partial, dtype, progress)
        # A damaged one is a result that nothing can use.
        load_tokenizer(partial)
    return {
        "format": target,
        "directory": str(out_dir),
        "quantized_layers": len(checkpoint.formats) if target != dense.NAME else 0,
        "weights_bytes": sum(path.stat().st_size for path in out_dir.glob("*.safetensors")),
    }


def _write(checkpoint: Checkpoint, target: Format | None, out_dir: Path, dtype: str | None, progress: Progress) -> None:
    """Write the format `target`, or the plain one for None."""
    recovered = _recovered(checkpoint)
    tensors = checkpoint if target else dense.DenseTensors(checkpoint, checkpoint.formats)
    names = [name for name in tensors if name not in recovered]
    parts = stored_parts(names, checkpoint.spec, family_of(checkpoint.hf_config))
    plan = _plan(checkpoint, parts)
    if target:
        target.check(plan)
    else:
        for name, form in checkpoint.formats.items():
            require_plain_activations(dense.NAME, name, form)
    dtype = dtype or str(checkpoint["model.norm.weight"].dtype).removeprefix("torch.")
    checkpoint.save_tokenizer(out_dir)
    writer = ShardWriter(out_dir)
    for done, (stored, canonical) in enumerate(parts.items()):
        progress(done, len(parts), stored)
        layer, _, kind = stored.rpartition(".")
        if target and kind == "qweight":
            for name, tensor in target.tensors(_layer(checkpoint, layer, canonical, plan)):
                writer.add(name, tensor)
        elif layer not in plan.formats or kind not in _OF_A_LAYER:
            writer.add(stored, in_dtype(stored, _joined(tensors, canonical, checkpoint.spec), dtype))
    write_config(out_dir, checkpoint, dtype, {KEY: target.quantization_config(plan)} if target else {})
    if target is modelopt:
        modelopt.write_side_file(out_dir, plan)
    writer.finish()
    progress(len(parts), len(parts), "weights")


def _recovered(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the ScaleRecover vectors. Raises CheckpointError for one that is not all ones."""
    names = {name for name in checkpoint if name.endswith(".scale_recover")}
    for name in sorted(names):
        if not bool((checkpoint[name] == 1).all()):
            raise CheckpointError(
                "rescales the residual stream, which no other format can hold; "
                "build again with quantization.scale_recover=false",
                name,
            )
    return names


def _plan(checkpoint: Checkpoint, parts: Mapping[str, tuple[str, ...]]) -> Plan:
    linears = linear_shapes(checkpoint.spec)
    formats, shapes, kept, scaled = {}, {}, [], set()
    for stored, canonical in parts.items():
        layer, _, kind = stored.rpartition(".")
        owners = [name.rpartition(".")[0] for name in canonical]
        if kind == "input_scale":
            scaled.add(layer)
        elif kind == "weight" and owners[0] in linears:
            kept.append(layer)
        elif kind == "qweight":
            forms = {checkpoint.formats[owner] for owner in owners}
            if len(forms) > 1:
                raise CheckpointError(
                    f"holds {', '.join(owners)} in one matrix, which have different formats; quantize them alike",
                    stored,
                )
            formats[layer] = forms.pop()
            shapes[layer] = (sum(linears[owner][0][0] for owner in owners), linears[owners[0]][0][1])
    if "lm_head" not in (*formats, *kept):
        kept.append("lm_head")
    return Plan(formats, shapes, kept, frozenset(scaled))


def _layer(checkpoint: Checkpoint, name: str, qweights: tuple[str, ...], plan: Plan) -> QuantizedLayer:
    owners = [part.rpartition(".")[0] for part in qweights]

    def rows(kind: str) -> Tensor:
        return _joined(checkpoint, tuple(f"{owner}.{kind}" for owner in owners), checkpoint.spec)

    form = plan.formats[name]
    return QuantizedLayer(
        name,
        form,
        rows("qweight"),
        rows("scales"),
        None if form.symmetric else rows("zeros"),
        checkpoint[f"{owners[0]}.input_scale"] if name in plan.scaled else None,
    )


def _joined(tensors: Mapping[str, Tensor], names: tuple[str, ...], spec: ModelSpec) -> Tensor:
    """Return canonical tensors one above the other, their rows as the family's files have them."""
    import torch

    found = [to_stored(name, tensors[name], spec) for name in names]
    return found[0] if len(found) == 1 else torch.cat(found)
