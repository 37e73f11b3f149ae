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
SCHEMA_VERSION = 1


def write_quantized(
    out_dir: Path,
    source_checkpoint: Checkpoint,
    tensors: Iterable[tuple[str, Tensor]],
    formats: Mapping[str, WeightFormat],
) -> None:
    """Write a quantized checkpoint from canonical (name, tensor) pairs, as they come, into `out_dir`.

    A linear layer in `formats` is given as `<name>.qweight` uint8 [out, in/2] (`layouts.pack_sits`),
    `<name>.scales` [out, in/group], `<name>.zeros` uint8 [out, in/group] unless symmetric, and optionally
    `<name>.input_scale` [in]; `model.layers.<i>.scale_recover` [hidden] may be added. All else as in the source.
    Config and tokenizer come from `source_checkpoint`. Raises CheckpointError, leaving no readable checkpoint
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
    write_config(out_dir, source_checkpoint)
    content = {"schema_version": SCHEMA_VERSION, "formats": {name: asdict(form) for name, form in formats.items()}}
    (out_dir / QUANT_NAME).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    writer.finish()


def read_formats(directory: Path) -> dict[str, WeightFormat]:
    """Return the formats of the quantized layers. Raises CheckpointError when the file is of another version."""
    path = directory / QUANT_NAME
    data = read_json(path)
    if data.get("schema_version") != SCHEMA_VERSION or not isinstance(data.get("formats"), dict):
        raise CheckpointError(
            f"{path} has schema version {data.get('schema_version')}, this program reads {SCHEMA_VERSION}; "
            "quantize again"
        )
    known = {item.name for item in fields(WeightFormat)}
    formats = {}
    for name, form in data["formats"].items():
        if not isinstance(form, dict) or set(form) != known:
            raise CheckpointError(f"{path} describes '{name}' with other fields than {', '.join(sorted(known))}")
        formats[name] = WeightFormat(**form)
    return formats
