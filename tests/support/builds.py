"""Build directories of a tiny model, with the stages that a test needs, without running the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sits_trt.artifacts import BuildDirectory, Manifest, fingerprint, writing
from sits_trt.checkpoint import open_checkpoint, write_quantized
from sits_trt.contract import EngineDetails, EngineLimits
from sits_trt.recipe.schema import Recipe
from sits_trt.spec import TileSpec
from tests.support.quantized import quantize_tensors
from tests.support.tiny import write_checkpoint


def stub_build(
    root: Path, name: str, quantized: bool = False, seed: int = 0, max_seq_tokens: int = 256, kv_dtype: str = "float16"
) -> Path:
    """Write a build whose checkpoints are real and whose engine and repository are manifests only."""
    layout = BuildDirectory(root / name)
    recipe = _recipe(name, "w4a16" if quantized else "none", kv_dtype)
    with writing(layout.checkpoint, Manifest("checkpoint", fingerprint(seed))) as (out, _):
        write_checkpoint(out, seed=seed, dtype=torch.float16)
    checkpoint = open_checkpoint(layout.checkpoint)
    if quantized:
        tensors, formats = quantize_tensors(checkpoint, seed=seed)
        inputs = {"checkpoint": fingerprint(seed)}
        with writing(layout.quantized, Manifest("quantized", fingerprint([seed, "quantized"]), inputs)) as (out, _):
            write_quantized(out, checkpoint, tensors.items(), formats)
    limits = EngineLimits(8, 64, max_seq_tokens, 8 * 4)
    weights = "../quantized" if quantized else "../checkpoint"
    tile = TileSpec.of(checkpoint.spec, kv_dtype=recipe.kv_cache.pool_dtype)
    details = EngineDetails("eager", checkpoint.spec, tile, limits, weights)
    for directory, kind, made in (
        (layout.engine, "engine", details.to_dict()),
        (layout.repository, "repository", {}),
    ):
        with writing(directory, Manifest(kind, fingerprint([name, seed, kind]), details=made)):
            pass
    layout.recipe_file.write_text(recipe.model_dump_json(), encoding="utf-8")
    return layout.root


def _recipe(name: str, scheme: str, kv_dtype: str) -> Recipe:
    data: dict[str, Any] = {
        "name": name,
        "model": {"source": "tiny"},
        "target": {"sku": "cpu"},
        "engine": {"backend": "eager"},
        "quantization": {"scheme": scheme, "group_size": 32},
        "kv_cache": {"dtype": kv_dtype},
    }
    return Recipe.model_validate(data)
