"""Accuracy of a build against its fp16 model, kept beside the build for each text and model that were measured."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

from sits_trt import __version__
from sits_trt.artifacts import (
    BuildDirectory,
    Manifest,
    fingerprint,
    is_current,
    read_manifest,
    require_input,
    tool_versions,
    writing,
)
from sits_trt.checkpoint import load_tokenizer, open_checkpoint, source_digest
from sits_trt.checkpoint.texts import read_blocks, text_digest
from sits_trt.errors import CheckpointError, RecipeError, SitsError
from sits_trt.models import Decoder, build_oracle
from sits_trt.models.scoring import compare, exact_match
from sits_trt.models.threads import leave_a_core
from sits_trt.progress import Progress
from sits_trt.recipe.schema import AccuracySection, KvCacheSection
from sits_trt.spec import CODED_KV_DTYPES
from sits_trt.sweep.builds import weights_directory
from sits_trt.sweep.result import Accuracy, BuildInfo

KIND = "accuracy"
FILE_NAME = "accuracy.json"
GREEDY_PROMPT_TOKENS = 64
"""Length of the prompts whose greedy answers are compared: pieces of the evaluation text."""

_STEP_TOKENS = 16
"""For the time left: a step of all greedy answers takes about as long as so many tokens of a block."""


def measure_accuracy(info: BuildInfo, section: AccuracySection, progress: Progress) -> Accuracy:
    """Return the accuracy of a build, from its own folder when it was measured before with the same inputs.

    Both models are evaluated in float32 by the reference decoder on the CPU, INT4 layers dequantized once. A quantized
    KV cache takes part; one of float16 is left out, as it rounds no more than the activations of any fp16 engine do.
    `progress` counts to 100 over all of it. Raises SitsError where a checkpoint or text cannot be read.
    """
    layout = BuildDirectory(Path(info.directory))
    manifest = _manifest(layout, info, section)
    directory = layout.accuracy / manifest.fingerprint
    known = _read(directory / FILE_NAME) if is_current(directory, KIND, manifest.fingerprint) else None
    if known is None:
        began = time.monotonic()
        found = _measure(layout.checkpoint, weights_directory(info), section, progress, _coded_kv(info))
        found = replace(found, seconds=round(time.monotonic() - began, 1))
        with writing(directory, manifest) as (partial, _):
            (partial / FILE_NAME).write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    progress(100, 100, "accuracy")
    return known or found


def _read(path: Path) -> Accuracy | None:
    """Return what was measured before, None where that cannot be read any more."""
    try:
        return Accuracy(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return None


def _coded_kv(info: BuildInfo) -> str:
    """Return the type of a quantized KV pool as TileSpec calls it, '' where the pool is not quantized."""
    pool_dtype = KvCacheSection.model_validate({"dtype": info.kv_dtype}).pool_dtype
    return pool_dtype if pool_dtype in CODED_KV_DTYPES else ""


def _manifest(layout: BuildDirectory, info: BuildInfo, section: AccuracySection) -> Manifest:
    inputs = {"checkpoint": read_manifest(layout.checkpoint, "checkpoint").fingerprint}
    if info.quantized:
        quantized = read_manifest(layout.quantized, "quantized")
        if quantized.inputs.get("checkpoint") != inputs["checkpoint"]:
            raise SitsError(
                f"{layout.quantized} was not made from {layout.checkpoint}: the last 'sits-trt build' did not end; run "
                "it again"
            )
        inputs["quantized"] = quantized.fingerprint
    if layout.engine.is_dir():
        require_input(layout.engine, read_manifest(layout.engine, "engine"), weights_directory(info))
    # Of the files too: a manifest does not change when somebody changes what lies beside it.
    for directory in {layout.checkpoint, weights_directory(info)}:
        inputs[f"{directory.name} files"] = source_digest(directory, cache=layout.root / "source-digests.json")
    inputs["text"] = text_digest(section.text)
    tools = {"sits-trt": __version__} | tool_versions("torch")
    settings = section.model_dump(mode="json") | {"kv_dtype": _coded_kv(info)}
    figures = [field.name for field in fields(Accuracy)]
    identity = {"kind": KIND, "settings": settings, "inputs": inputs, "tools": tools, "figures": figures}
    return Manifest(KIND, fingerprint(identity), inputs, tools)


def _measure(
    reference_dir: Path, weights_dir: Path, section: AccuracySection, progress: Progress, kv_dtype: str
) -> Accuracy:
    tokenizer = load_tokenizer(reference_dir)
    blocks = read_blocks(section.text, tokenizer, section.blocks, section.block_tokens, "evaluation")
    if len(blocks[0]) < section.block_tokens:
        raise CheckpointError(
            f"text source '{section.text}' holds {len(blocks[0])} tokens and a block is of {section.block_tokens}; "
            "give a longer text or a smaller block_tokens"
        )
    prompts = read_blocks(section.text, tokenizer, section.prompts, GREEDY_PROMPT_TOKENS, "evaluation")
    positions = _positions(reference_dir, section)
    if open_checkpoint(reference_dir).spec != open_checkpoint(weights_dir).spec:
        raise SitsError(f"{weights_dir} and {reference_dir} are two different models; build again")
    progress(0, 100, "loading models")
    reference = _load(reference_dir, positions)
    if weights_dir == reference_dir and not kv_dtype:
        alone = compare(reference, reference, blocks, _part(progress, 0, 100, "perplexity"))
        return Accuracy(alone.perplexity, alone.positions)
    candidate = reference if weights_dir == reference_dir else _load(weights_dir, positions)
    scored, answered = sum(map(len, blocks)), sum(map(len, prompts)) + _STEP_TOKENS * section.exact_match_tokens
    middle = 100 * scored // (scored + answered)
    found = compare(reference, candidate, blocks, _part(progress, 0, middle, "perplexity and KL divergence"), kv_dtype)
    greedy = _part(progress, middle, 100, "greedy answers")
    answers = exact_match(reference, candidate, prompts, section.exact_match_tokens, greedy, kv_dtype)
    return Accuracy(
        perplexity=found.perplexity,
        tokens=found.positions,
        reference_perplexity=found.reference_perplexity,
        kl_divergence=found.kl,
        top1_agreement=found.top1,
        top5_agreement=found.top5,
        prompts=answers.prompts,
        answer_tokens=answers.tokens,
        exact_prompts=round(answers.exact_match * answers.prompts),
        exact_tokens=answers.matched_prefix * answers.tokens,
    )


def _positions(checkpoint: Path, section: AccuracySection) -> int:
    """Return how many positions a measurement needs; RecipeError where the model has fewer."""
    most = open_checkpoint(checkpoint).spec.max_positions
    answer = GREEDY_PROMPT_TOKENS + section.exact_match_tokens
    for key, needed in (("block_tokens", section.block_tokens), ("exact_match_tokens", answer)):
        if needed > most:
            raise RecipeError(f"needs {needed} positions, the model has {most}; lower it", f"sweep.accuracy.{key}")
    return max(section.block_tokens, answer)


def _load(directory: Path, positions: int) -> Decoder:
    leave_a_core()
    return build_oracle(open_checkpoint(directory), positions)


def _part(progress: Progress, start: int, end: int, what: str) -> Progress:
    """Return a callback that shows a step of its own as the stretch from `start` to `end`."""

    def update(done: int, total: int, _: str) -> None:
        progress(start + (end - start) * done // total, 100, what)

    return update
