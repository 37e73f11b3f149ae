"""Any source as a plain Hugging Face directory in 16 bits: the first stage of a build."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sits_trt.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sits_trt.checkpoint.quantized import write_quantized
from sits_trt.checkpoint.shard_writer import ShardWriter
from sits_trt.checkpoint.tokenizer import load_tokenizer
from sits_trt.errors import CheckpointError
from sits_trt.progress import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float16", "bfloat16", "float32")
_CHECKED_VALUES = 1 << 22


def materialize(source: Path | str, out_dir: Path, dtype: str, progress: Progress = silent) -> None:
    """Write `source` (as `open_checkpoint` takes it) into `out_dir` with floating tensors as `dtype`.

    The result is a plain Hugging Face directory that transformers loads: config.json, generation_config.json,
    model*.safetensors, tokenizer files and chat template. A source that is already quantized, by whichever program,
    keeps its codes, scales and zero points, and becomes a quantized checkpoint of ours.
    `dtype` is 'float16', 'bfloat16' or 'float32'. Raises CheckpointError for a bad source, a tokenizer that cannot
    be read, a weight that `dtype` cannot hold, and where `out_dir` is the source.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(source)
    refuse_same_directory(checkpoint, out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.save_tokenizer(out_dir)
    # A damaged one ends the first stage, not the server at the end of the line.
    load_tokenizer(out_dir)
    if checkpoint.formats:
        write_quantized(
            out_dir, checkpoint, converted(checkpoint, dtype, progress), checkpoint.formats, dtype
        )  # fmt: skip
        return
    writer = ShardWriter(out_dir)
    names = checkpoint.stored_names
    for done, name in enumerate(names):
        progress(done, len(names), name)
        writer.add(name, in_dtype(name, checkpoint.read_stored(name), dtype))
    write_config(out_dir, checkpoint, dtype)
    writer.finish()
    progress(len(names), len(names), "checkpoint")


def converted(checkpoint: Checkpoint, dtype: str | None, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """Yield the canonical tensors of a quantized checkpoint, those that are not quantized as `dtype`."""
    for done, name in enumerate(checkpoint):
        progress(done, len(checkpoint), name)
        layer, _, kind = name.rpartition(".")
        of_codes = layer in checkpoint.formats and kind in ("qweight", "scales", "zeros")
        yield name, checkpoint[name] if of_codes else in_dtype(name, checkpoint[name], dtype)
    progress(len(checkpoint), len(checkpoint), "checkpoint")


def in_dtype(name: str, tensor: Tensor, dtype: str | None) -> Tensor:
    """Return a tensor of numbers as `dtype`, or as it is for None.

    Raises CheckpointError when it holds codes, or numbers that are not finite or that `dtype` cannot hold.
    """
    import torch

    if not tensor.is_floating_point() or tensor.itemsize == 1:
        raise CheckpointError(f"has type {str(tensor.dtype).removeprefix('torch.')}, numbers are needed", name)
    target: torch.dtype = tensor.dtype if dtype is None else getattr(torch, dtype)
    result = tensor.to(target)
    if not all_finite(result):
        what = "holds values that are not finite" if not all_finite(tensor) else f"overflows {dtype}"
        raise CheckpointError(f"{what}; use bfloat16 (in a recipe model.dtype) if the source is sound", name)
    return result


def all_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, without temporaries of the tensor's size."""
    return all(bool(part.isfinite().all()) for part in tensor.flatten().split(_CHECKED_VALUES))


def refuse_same_directory(checkpoint: Checkpoint, out_dir: Path) -> None:
    """Raise CheckpointError when writing into `out_dir` would overwrite the checkpoint that is read."""
    if checkpoint.directory.resolve() == out_dir.resolve():
        raise CheckpointError(f"{out_dir} holds the checkpoint that is read; write into another directory")


def write_config(
    out_dir: Path, checkpoint: Checkpoint, dtype: str | None = None, extra: Mapping[str, Any] | None = None
) -> None:
    """Write config.json, with the `extra` keys, and generation_config.json of `checkpoint`.

    `dtype` replaces the stored one where given.
    """
    config = checkpoint.hf_config
    if dtype is not None:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    _write_json(out_dir / "config.json", {**config, **(extra or {})})
    generation = checkpoint.generation_config or {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
    }
    _write_json(out_dir / "generation_config.json", generation)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
