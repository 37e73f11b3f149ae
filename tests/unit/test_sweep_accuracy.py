"""Accuracy of a build: equal to the scores of its decoders, measured once, kept until something changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sits_trt.artifacts import BuildDirectory
from sits_trt.checkpoint import load_tokenizer, open_checkpoint
from sits_trt.checkpoint.texts import read_blocks
from sits_trt.errors import SitsError
from sits_trt.models import Decoder, build_decoder
from sits_trt.models.scoring import compare, exact_match
from sits_trt.recipe.schema import AccuracySection
from sits_trt.sweep import accuracy as room
from sits_trt.sweep.accuracy import GREEDY_PROMPT_TOKENS, measure_accuracy
from sits_trt.sweep.builds import describe_builds
from tests.support.builds import stub_build

SECTION = AccuracySection(blocks=2, block_tokens=70, prompts=3, exact_match_tokens=5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations as small as these only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def silent(done: int, total: int, what: str) -> None:
    pass


def decoder(directory: Path) -> Decoder:
    checkpoint = open_checkpoint(directory)
    return build_decoder(checkpoint.spec, checkpoint, checkpoint.formats, torch.float32, 256)


def test_accuracy_of_a_quantized_build_is_that_of_its_two_decoders(tmp_path: Path) -> None:
    build = stub_build(tmp_path, "int4", quantized=True)
    (info,) = describe_builds([build])
    seen: list[tuple[int, int]] = []
    found = measure_accuracy(info, SECTION, lambda done, total, what: seen.append((done, total)))

    layout = BuildDirectory(build)
    reference, candidate = decoder(layout.checkpoint), decoder(layout.quantized)
    tokenizer = load_tokenizer(layout.checkpoint)
    scores = compare(reference, candidate, read_blocks("pydoc", tokenizer, 2, 70, "evaluation"))
    prompts = read_blocks("pydoc", tokenizer, 3, GREEDY_PROMPT_TOKENS, "evaluation")
    answers = exact_match(reference, candidate, prompts, 5)
    # The decoder under test has its INT4 layers dequantized: other roundings of the same sums.
    assert found.perplexity == pytest.approx(scores.perplexity, rel=1e-4)
    assert found.reference_perplexity == pytest.approx(scores.reference_perplexity, rel=1e-4)
    assert found.kl_divergence == pytest.approx(scores.kl, rel=1e-3)
    assert found.top1_agreement == pytest.approx(scores.top1, abs=2 / scores.positions)
    assert found.top5_agreement == pytest.approx(scores.top5, abs=2 / scores.positions)
    assert found.tokens == scores.positions == 140
    assert (found.prompts, found.answer_tokens) == (3, 5)
    assert found.exact_prompts == round(answers.exact_match * 3)
    assert found.exact_tokens == pytest.approx(answers.matched_prefix * 5)
    assert seen == sorted(seen)
    assert seen[-1] == (100, 100)


def test_accuracy_of_an_fp16_build_is_its_perplexity(tmp_path: Path) -> None:
    (info,) = describe_builds([stub_build(tmp_path, "fp16")])
    found = measure_accuracy(info, SECTION, silent)
    model = decoder(tmp_path / "fp16" / "checkpoint")
    blocks = read_blocks("pydoc", load_tokenizer(tmp_path / "fp16" / "checkpoint"), 2, 70, "evaluation")
    assert found.perplexity == pytest.approx(compare(model, model, blocks).perplexity, rel=1e-6)
    assert found.kl_divergence is None
    assert found.exact_prompts is None
    assert found.perplexity_increase == 0


@pytest.mark.parametrize("quantized", [False, True])
def test_the_error_of_a_quantized_kv_cache_counts(tmp_path: Path, quantized: bool) -> None:
    build = stub_build(tmp_path, "fp8", quantized=quantized, kv_dtype="fp8")
    (info,) = describe_builds([build])
    found = measure_accuracy(info, SECTION, silent)
    layout = BuildDirectory(build)
    reference, candidate = decoder(layout.checkpoint), decoder(layout.quantized if quantized else layout.checkpoint)
    tokenizer = load_tokenizer(layout.checkpoint)
    blocks = read_blocks("pydoc", tokenizer, 2, 70, "evaluation")
    scores = compare(reference, candidate, blocks, kv_dtype="float8_e4m3")
    prompts = read_blocks("pydoc", tokenizer, 3, GREEDY_PROMPT_TOKENS, "evaluation")
    answers = exact_match(reference, candidate, prompts, 5, kv_dtype="float8_e4m3")
    part_of_the_cache = abs(scores.kl - compare(reference, candidate, blocks).kl)
    assert found.kl_divergence == pytest.approx(scores.kl, abs=0.2 * part_of_the_cache)
    assert found.reference_perplexity == pytest.approx(scores.reference_perplexity, rel=1e-4)
    assert found.exact_tokens == pytest.approx(answers.matched_prefix * 5)


def test_accuracy_is_measured_again_only_when_model_or_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (info,) = describe_builds([stub_build(tmp_path, "int4", quantized=True)])
    first = measure_accuracy(info, SECTION, silent)
    measured: list[Path] = []
    real = room._measure

    def spy(reference: Path, weights: Path, section: AccuracySection, progress: room.Progress, kv_dtype: str):
        measured.append(weights)
        return real(reference, weights, section, progress, kv_dtype)

    monkeypatch.setattr(room, "_measure", spy)
    assert measure_accuracy(info, SECTION, silent) == first
    assert not measured
    measure_accuracy(info, SECTION.model_copy(update={"blocks": 1}), silent)
    assert len(measured) == 1
    assert measure_accuracy(info, SECTION, silent) == first, "another measurement does not push out the first"
    assert len(measured) == 1
    (other,) = describe_builds([stub_build(tmp_path, "int4", quantized=True, seed=1)])
    assert measure_accuracy(other, SECTION, silent) != first
    assert len(measured) == 2


def test_accuracy_of_a_missing_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    build = stub_build(tmp_path, "int4", quantized=True)
    (info,) = describe_builds([build])
    (build / "quantized" / "manifest.json").unlink()
    with pytest.raises(SitsError, match="build it first"):
        measure_accuracy(info, SECTION, silent)
    assert not (build / "accuracy").exists()


def test_weights_made_from_another_checkpoint_are_not_compared_with_this_one(tmp_path: Path) -> None:
    build = stub_build(tmp_path, "int4", quantized=True)
    other = stub_build(tmp_path, "other", seed=1)
    shutil.rmtree(build / "checkpoint")
    shutil.copytree(other / "checkpoint", build / "checkpoint")
    (info,) = describe_builds([build])
    with pytest.raises(SitsError, match="run it again"):
        measure_accuracy(info, SECTION, silent)
