"""The apply stage: the searched layers and the rest of the checkpoint as one quantized checkpoint, and its report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from sits_trt.artifacts import QUANTIZATION_REPORT, write_json
from sits_trt.checkpoint import Checkpoint, load_tokenizer, open_checkpoint, write_quantized
from sits_trt.checkpoint.expected import linear_shapes
from sits_trt.checkpoint.materialize import all_finite
from sits_trt.checkpoint.texts import PYDOC, read_blocks
from sits_trt.errors import QuantizationError, SitsError
from sits_trt.models.scoring import check_blocks
from sits_trt.models.threads import leave_a_core
from sits_trt.progress import Progress
from sits_trt.quant.bit_budget import read_budget, read_formats
from sits_trt.quant.evaluate import compare_checkpoints
from sits_trt.quant.memory import return_freed_memory
from sits_trt.quant.search import read_costs, read_layers
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import ModelSpec, WeightFormat

_REPORT_BLOCKS = 8
"""Blocks of evaluation text in the report: as many as sweep.accuracy has by default, so that a bound of the recipe and
'sits-trt eval' speak of the same text. On SmolLM2, whose blocks of 512 tokens differ by a fifth in their KL divergence,
the mean of 8 has a standard error of 6 %; half of that would take four times as long."""


def apply_scales(
    checkpoint: Checkpoint, scales_dir: Path, section: QuantizationSection, out_dir: Path, progress: Progress
) -> dict[str, Any]:
    """Write the quantized checkpoint and report.json to `out_dir`; return the details for the manifest.

    `scales_dir` is the finished search (`search_scales`) of the same checkpoint and section. The report has the
    error of each layer, bits per weight, and perplexity, KL and agreement against the float model on some blocks
    of the evaluation part of the calibration source. It is written last: an `out_dir` that has it, left by a run of
    the same recipe, is whole unless it has been damaged since. Raises QuantizationError where a score is not finite.
    """
    path = out_dir / QUANTIZATION_REPORT
    if not _is_whole(out_dir):
        path.unlink(missing_ok=True)
        _write(checkpoint, scales_dir, section, out_dir, progress)
    report = json.loads(path.read_text(encoding="utf-8"))
    return {key: report[key] for key in ("bits_per_weight", "evaluation")}


def _is_whole(out_dir: Path) -> bool:
    """Return whether `out_dir` holds a report that can be read, and a quantized checkpoint."""
    try:
        report = json.loads((out_dir / QUANTIZATION_REPORT).read_text(encoding="utf-8"))
        return {"bits_per_weight", "evaluation", "search"} <= set(report) and bool(open_checkpoint(out_dir).formats)
    except (SitsError, FileNotFoundError, ValueError, TypeError, RecursionError):
        return False


def _write(
    checkpoint: Checkpoint, scales_dir: Path, section: QuantizationSection, out_dir: Path, progress: Progress
) -> None:
    leave_a_core()
    return_freed_memory()
    formats = read_formats(checkpoint.spec, section, scales_dir)
    blocks, calibrated = _evaluation_blocks(checkpoint, section)
    progress(0, checkpoint.spec.num_layers, "write the quantized checkpoint")
    write_quantized(out_dir, checkpoint, quantized_tensors(checkpoint, scales_dir), formats)
    report = storage_costs(checkpoint.spec, formats) | {"search": read_costs(scales_dir)}
    if section.bits_per_weight is not None:
        report["bit_budget"] = read_budget(scales_dir)
    began = time.monotonic()
    agreement = compare_checkpoints(checkpoint, open_checkpoint(out_dir), blocks, progress)
    if not (math.isfinite(agreement.perplexity) and math.isfinite(agreement.kl)):
        raise QuantizationError(
            f"the quantized model's perplexity is {agreement.perplexity} and its KL divergence {agreement.kl}, the "
            f"float model's perplexity {agreement.reference_perplexity}; one of the two is damaged"
        )
    report["evaluation"] = agreement.to_dict() | {
        "seconds": round(time.monotonic() - began, 1),
        "calibrated_tokens": calibrated,
    }
    write_json(out_dir / QUANTIZATION_REPORT, report)


def quantized_tensors(checkpoint: Checkpoint, scales_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield what `write_quantized` takes: the layers of a finished search, and the rest of the checkpoint."""
    for name in checkpoint:
        if not name.startswith("model.layers."):
            tensor = checkpoint[name]
            if not all_finite(tensor):
                raise QuantizationError(f"tensor {name} holds values that are not finite; the checkpoint is damaged")
            yield name, tensor
    yield from read_layers(scales_dir, checkpoint.spec.num_layers)


def storage_costs(spec: ModelSpec, formats: dict[str, WeightFormat]) -> dict[str, Any]:
    """Return sizes: `bits_per_weight` over the decoder layers' linears, and how many weights are quantized."""
    shapes = {name: shape for name, (shape, _) in linear_shapes(spec).items() if name != "lm_head"}
    weights = {name: rows * columns for name, (rows, columns) in shapes.items()}
    bits = sum(
        size * (formats[name].bits_per_weight(shapes[name][1]) if name in formats else 16)
        for name, size in weights.items()
    )
    return {
        "bits_per_weight": bits / sum(weights.values()),
        "quantized_weights": sum(weights[name] for name in formats),
        "linear_weights": sum(weights.values()),
    }


def _evaluation_blocks(checkpoint: Checkpoint, section: QuantizationSection) -> tuple[list[list[int]], int]:
    """Return the blocks to measure on, and how many of their tokens the search has seen: a short file is used twice."""
    calibration = section.calibration
    tokens = min(calibration.block_tokens, checkpoint.spec.max_positions)
    tokenizer = load_tokenizer(checkpoint.directory)
    blocks = read_blocks(calibration.source, tokenizer, _REPORT_BLOCKS, tokens, "evaluation")
    check_blocks(blocks)
    if calibration.source == PYDOC:
        return blocks, 0
    searched = read_blocks(calibration.source, tokenizer, calibration.blocks, tokens, "calibration")
    both = read_blocks(calibration.source, tokenizer, calibration.blocks + _REPORT_BLOCKS, tokens, "calibration")
    return blocks, max(0, sum(map(len, searched)) + sum(map(len, blocks)) - sum(map(len, both)))
