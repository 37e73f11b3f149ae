"""Any source as a plain Hugging Face directory in 16 bits: the first stage of a build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sits_trt.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sits_trt.checkpoint.shard_writer import ShardWriter
from sits_trt.checkpoint.tokenizer import load_tokenizer
from sits_trt.errors import CheckpointError

_DTYPES = ("float16", "bfloat16", "float32")


Progress = Callable[[int, int, str], None]


def materialize(
    source: Path | str, out_dir: Path, dtype: str, progress: Progress = lambda done, total, what: None
) -> None:
    """Write `source` (as `open_checkpoint` takes it) into `out_dir` with floating tensors as `dtype`.

    The result is a plain Hugging Face directory that transformers loads: config.json, generation_config.json,
    model*.safetensors, tokenizer files and chat template. `dtype` is 'float16', 'bfloat16' or 'float32'.
    Raises CheckpointError for a bad source, a tokenizer that cannot be read, a weight that
    float16 cannot hold, and where `out_dir` is the source.
    """
    import torch

    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype '{dtype}' is not one of {', '.join(_DTYPES)}")
    checkpoint = open_checkpoint(source)
    if checkpoint.formats:
        raise CheckpointError(f"{source} is already quantized; give the original checkpoint")
    refuse_same_directory(checkpoint, out_dir)
    target: torch.dtype = getattr(torch, dtype)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.save_tokenizer(out_dir)
    # A damaged one ends the first stage, not the server at the end of the line.
    load_tokenizer(out_dir)
    writer = ShardWriter(out_dir)
    names = checkpoint.stored_names
    for done, name in enumerate(names):
        progress(done, len(names), name)
        tensor = checkpoint.read_stored(name)
        converted = tensor.to(target)
        if not torch.isfinite(converted).all():
            what = "holds values that are not finite" if not torch.isfinite(tensor).all() else f"overflows {dtype}"
            raise CheckpointError(f"{what}; use model.dtype=bfloat16 if the source is sound", name)
        writer.add(name, converted)
    write_config(out_dir, checkpoint, dtype)
    writer.finish()
    progress(len(names), len(names), "checkpoint")


def refuse_same_directory(checkpoint: Checkpoint, out_dir: Path) -> None:
    """Raise CheckpointError when writing into `out_dir` would overwrite the checkpoint that is read."""
    if checkpoint.directory.resolve() == out_dir.resolve():
        raise CheckpointError(f"{out_dir} holds the checkpoint that is read; write into another directory")


def write_config(out_dir: Path, checkpoint: Checkpoint, dtype: str | None = None) -> None:
    """Write config.json and generation_config.json of `checkpoint`; `dtype` replaces the stored one where given."""
    config = checkpoint.hf_config
    if dtype is not None:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    _write_json(out_dir / "config.json", config)
    generation = checkpoint.generation_config or {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
    }
    _write_json(out_dir / "generation_config.json", generation)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
