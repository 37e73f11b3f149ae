"""The search stage: everything that needs calibration text, layer by layer, resumable.

Its result holds each decoder layer as the quantized checkpoint will hold it, codes included: with compensation
the codes of a layer follow from the text, and the next layer's inputs from the codes, so a search that kept only
scales would have to be run again to apply them. What is left to `apply_scales` needs no text and no order: to put
the layers together with the rest of the checkpoint in its format, and to measure the whole.

    layer-00000.safetensors ...   canonical tensors of one layer; metadata: its errors
    bit_budget.json               with a bit budget: the formats that it was spent on (`quant.bit_budget`)
    search.json                   what was used and found: blocks, tokens, seconds, errors by layer
    streams.safetensors           only while the search runs: where the next layer starts
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sits_trt.checkpoint import Checkpoint, load_tokenizer
from sits_trt.checkpoint.quantized import refuse_quantized
from sits_trt.checkpoint.texts import read_blocks
from sits_trt.models.threads import leave_a_core
from sits_trt.progress import Progress
from sits_trt.quant.bit_budget import decide_formats
from sits_trt.quant.layer_search import LayerResult, LayerSearch
from sits_trt.quant.memory import return_freed_memory
from sits_trt.quant.streams import BlockRunner, LayerTensors, Streams
from sits_trt.recipe.schema import QuantizationSection

SEARCH_NAME = "search.json"
_STREAMS_NAME = "streams.safetensors"


def search_scales(
    checkpoint: Checkpoint,
    section: QuantizationSection,
    out_dir: Path,
    progress: Progress,
    smooth_keys: bool = False,
) -> dict[str, Any]:
    """Decide scales, zero points, folds, codes and residual scales of every layer and write them to `out_dir`.

    `smooth_keys` makes keys fit a KV cache of integer codes; the float model stays the same.

    Memory holds what `LayerSearch` says, and two residual streams of the calibration text. An
    `out_dir` left by a killed run of the same recipe is gone on with at the first undecided layer. Returns the
    details for the manifest. Raises QuantizationError (plan, layer) or CheckpointError (text,
    a checkpoint that is quantized already).
    """
    refuse_quantized(checkpoint)
    leave_a_core()
    return_freed_memory()
    calibration = section.calibration
    blocks = read_blocks(
        calibration.source,
        load_tokenizer(checkpoint.directory),
        calibration.blocks,
        min(calibration.block_tokens, checkpoint.spec.max_positions),
        "calibration",
    )
    formats = decide_formats(checkpoint, section, blocks, out_dir, progress)
    out_dir.mkdir(parents=True, exist_ok=True)
    for left in out_dir.glob(".tmp*"):  # what safetensors was writing when a run was killed
        left.unlink()
    streams = _resume(out_dir) or Streams.start(
        checkpoint["model.embed_tokens.weight"], blocks, checkpoint.spec.embedding_scale
    )
    runner = BlockRunner(checkpoint.spec, max(streams.lengths))
    total = checkpoint.spec.num_layers
    while streams.layer < total:
        progress(streams.layer, total, f"layer {streams.layer}: search on {sum(streams.lengths)} tokens")
        index = streams.layer
        result = LayerSearch(
            checkpoint.spec, LayerTensors(checkpoint, index), formats, section, streams, runner, smooth_keys
        ).run()  # fmt: skip
        _save_layer(out_dir, index, result)
        if streams.layer < total:
            streams.save(out_dir / _STREAMS_NAME)
    layers = [_layer_costs(out_dir, index) for index in range(total)]
    details = {
        "calibration_blocks": len(blocks),
        "calibration_tokens": sum(map(len, blocks)),
        "seconds": round(sum(layer["seconds"] for layer in layers), 1),
        "layers": layers,
    }
    (out_dir / SEARCH_NAME).write_text(json.dumps(details, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (out_dir / _STREAMS_NAME).unlink(missing_ok=True)
    progress(total, total, "scales")
    return {key: value for key, value in details.items() if key != "layers"}


def read_layers(scales_dir: Path, num_layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all layers of a finished search, layer by layer."""
    for index in range(num_layers):
        with safe_open(_layer_path(scales_dir, index), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def read_costs(scales_dir: Path) -> dict[str, Any]:
    """Return what a finished search found out: `search.json`."""
    costs: dict[str, Any] = json.loads((scales_dir / SEARCH_NAME).read_text(encoding="utf-8"))
    return costs


def _layer_path(directory: Path, index: int) -> Path:
    return directory / f"layer-{index:05}.safetensors"


def _save_layer(directory: Path, index: int, result: LayerResult) -> None:
    path = _layer_path(directory, index)
    partial = path.with_suffix(".partial")
    costs = {"errors": result.errors, "drift": result.drift, "seconds": round(result.seconds, 3)}
    save_file(
        {name: result.tensors[name].contiguous() for name in sorted(result.tensors)},
        partial,
        {"costs": json.dumps(costs)},
    )
    partial.replace(path)


def _layer_costs(directory: Path, index: int) -> dict[str, Any]:
    with safe_open(_layer_path(directory, index), "pt") as file:
        costs: dict[str, Any] = json.loads(file.metadata()["costs"])
        return costs


def _resume(directory: Path) -> Streams | None:
    """Return where a killed run stopped: its streams before the first layer that has no file."""
    path = directory / _STREAMS_NAME
    if not path.is_file():
        return None
    return Streams.load(path)
