"""Our quantized checkpoint on disk: a Hugging Face directory with packed linears and `sits_quant.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from sits_trt.checkpoint.safetensors_files import read_json
from sits_trt.checkpoint.shard_writer import ShardWriter
from sits_trt.errors import CheckpointError
from sits_trt.spec import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from sits_trt.checkpoint.checkpoint import Checkpoint

QUANT_NAME = "sits_quant.json"
SCHEMA_VERSION = 2
"""2 added the kind of codes and the rounding of activations; files of version 1 hold INT4 only and are read."""

_ANY_FORMAT = WeightFormat()
_VERSION_1 = {"bits", "group_size", "symmetric"}


def write_quantized(
    out_dir: Path,
    source_checkpoint: Checkpoint,
    tensors: Iterable[tuple[str, Tensor]],
    formats: Mapping[str, WeightFormat],
    dtype: str | None = None,
) -> None:
    """Write a quantized checkpoint from canonical (name, tensor) pairs, as they come, into `out_dir`.

    A linear layer in `formats` is given as `<name>.qweight`, `<name>.scales` [out, groups], `<name>.zeros` uint8
    [out, groups] unless symmetric, and optionally `<name>.input_scale` [in]; codes are uint8 [out, in/2]
    (`layouts.pack_sits`) for 4 bits, uint8 [out, in] for 8, the bytes of the numbers for 8-bit floats.
    `model.layers.<i>.scale_recover` [hidden] may be added. All else as in the source.
    Config and tokenizer come from `source_checkpoint`; `dtype` is that of the floating tensors, where it is another
    than the source's. Raises CheckpointError, leaving no readable checkpoint
    behind, when a tensor is missing, superfluous or of the wrong shape.
    """
    from sits_trt.checkpoint.expected import check_tensors
    from sits_trt.checkpoint.materialize import refuse_same_directory, write_config

    refuse_same_directory(source_checkpoint, out_dir)
    (out_dir / QUANT_NAME).unlink(missing_ok=True)
    writer = ShardWriter(out_dir)
    shapes = {}
    for name, tensor in tensors:
        if name in shapes:
            raise CheckpointError("given twice", name)
        shapes[name] = tuple(tensor.shape)
        writer.add(name, tensor)
    check_tensors(shapes, source_checkpoint.spec, formats, "the quantized tensors")
    source_checkpoint.save_tokenizer(out_dir)
    write_config(out_dir, source_checkpoint, dtype)
    content = {"schema_version": SCHEMA_VERSION, "formats": {name: asdict(form) for name, form in formats.items()}}
    (out_dir / QUANT_NAME).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    writer.finish()


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError when the checkpoint that is to be quantized is quantized already."""
    if checkpoint.formats:
        kinds = sorted({f"{form.bits} bits, groups of {form.group_size}" for form in checkpoint.formats.values()})
        raise CheckpointError(
            f"{checkpoint.place} is already quantized ({'; '.join(kinds)}): set quantization.scheme=none to build it "
            "as it is, or give the original checkpoint"
        )


def read_formats(directory: Path) -> dict[str, WeightFormat]:
    """Return the formats of the quantized layers.

    Raises CheckpointError when the file is of a version that is not read here, or describes what no weight can have.
    """
    path = directory / QUANT_NAME
    data = read_json(path)
    version = data.get("schema_version")
    if version not in (1, SCHEMA_VERSION) or not isinstance(data.get("formats"), dict):
        raise CheckpointError(
            f"{path} has schema version {version}, this program reads 1 to {SCHEMA_VERSION}; "
            "quantize again, or use the program that wrote it"
        )
    known = _VERSION_1 if version == 1 else {item.name for item in fields(WeightFormat)}
    formats = {}
    for name, described in data["formats"].items():
        if not isinstance(described, dict) or set(described) != known:
            raise CheckpointError(f"{path} describes '{name}' with other fields than {', '.join(sorted(known))}")
        kinds = {field: type(getattr(_ANY_FORMAT, field)) for field in described}
        if wrong := [field for field, value in described.items() if type(value) is not kinds[field]]:
            raise CheckpointError(f"{path} gives '{name}' {wrong[0]} = {described[wrong[0]]!r}; quantize again")
        form = formats[name] = WeightFormat(**described)
        if problem := form.problem():
            raise CheckpointError(f"{path} gives '{name}' {problem}; quantize again")
    return formats
