"""Scores of a decoder against a reference, beside plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from sits_trt.errors import CheckpointError
from sits_trt.models import Decoder, build_decoder
from sits_trt.models.kv_scoring import score_kv_dtypes
from sits_trt.models.scoring import AgreementSums, block_logits, compare, exact_match, greedy_tokens
from tests.support.decode import whole_logits
from tests.support.tiny import tiny_spec, tiny_tensors


def decoder(seed: int = 0, noise: float = 0.0) -> Decoder:
    spec = tiny_spec()
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tiny_tensors(spec, seed).items()
    }
    return build_decoder(spec, tensors, dtype=torch.float32)


def random_blocks(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]


def test_block_logits_are_the_decoders_logits() -> None:
    model, (block,) = decoder(), random_blocks(131)
    # Tiles of another size only change the order of sums.
    torch.testing.assert_close(block_logits(model, block), whole_logits(model, block), rtol=1e-4, atol=1e-4)


def test_scores_equal_plain_formulas() -> None:
    reference, candidate = decoder(), decoder(noise=0.02)
    blocks = random_blocks(1, 70, 129)
    found = compare(reference, candidate, blocks)
    nll, reference_nll, kl, top1, top5 = [], [], [], [], []
    for block in blocks:
        p = torch.softmax(whole_logits(reference, block).double(), -1)
        q = torch.softmax(whole_logits(candidate, block).double(), -1)
        for position in range(len(block)):
            if position + 1 < len(block):
                nll.append(-q[position, block[position + 1]].log().item())
                reference_nll.append(-p[position, block[position + 1]].log().item())
            kl.append((p[position] * (p[position] / q[position]).log()).sum().item())
            ours, theirs = (d[position].argsort(descending=True)[:5].tolist() for d in (q, p))
            top1.append(ours[0] == theirs[0])
            top5.append(len(set(ours) & set(theirs)) / 5)
    assert math.isclose(found.perplexity, math.exp(sum(nll) / len(nll)), rel_tol=1e-4)
    assert math.isclose(found.reference_perplexity, math.exp(sum(reference_nll) / len(nll)), rel_tol=1e-4)
    assert math.isclose(found.kl, sum(kl) / len(kl), rel_tol=1e-3)
    # A near tie may fall the other way in float32: at most one position of the 200.
    assert abs(found.top1 - sum(top1) / len(top1)) <= 1 / 200
    assert abs(found.top5 - sum(top5) / len(top5)) <= 1 / 200
    assert found.positions == 200
    assert 0 < found.top1 < 1, "the noise must neither drown nor spare the candidate for this test to mean anything"


def test_a_model_agrees_with_itself() -> None:
    model = decoder()
    found = compare(model, model, random_blocks(40))
    assert (found.kl, found.top1, found.top5) == (0.0, 1.0, 1.0)
    assert found.perplexity == found.reference_perplexity
    same = exact_match(model, model, random_blocks(3, 9), 12)
    assert (same.exact_match, same.matched_prefix, same.prompts, same.tokens) == (1.0, 1.0, 2, 12)


def test_greedy_tokens_equal_token_by_token_recomputation() -> None:
    model, prompts = decoder(), random_blocks(3, 67, 1)
    for prompt, answer in zip(prompts, greedy_tokens(model, prompts, 8), strict=True):
        ids = list(prompt)
        for token in answer:
            assert token == whole_logits(model, ids)[-1].argmax().item()
            ids.append(token)


def test_exact_match_counts_whole_answers_and_prefixes() -> None:
    reference, candidate, prompts = decoder(), decoder(noise=0.05), random_blocks(5, 6, 7, 8)
    found = exact_match(reference, candidate, prompts, 16)
    pairs = zip(greedy_tokens(reference, prompts, 16), greedy_tokens(candidate, prompts, 16), strict=True)
    whole, prefix = 0, 0
    for theirs, ours in pairs:
        whole += theirs == ours
        prefix += next((i for i in range(16) if theirs[i] != ours[i]), 16)
    assert found.exact_match == whole / 4
    assert found.matched_prefix == prefix / 64
    assert found.matched_prefix < 1


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "float8_e4m3", "int4"])
def test_the_type_of_the_pool_is_part_of_the_scores(kv_dtype: str) -> None:
    model, blocks = decoder(), random_blocks(70, 30)
    found = compare(model, model, blocks, kv_dtype=kv_dtype)
    sums = AgreementSums()
    for block in blocks:
        ours = whole_logits(model, block, kv_dtype)
        sums.add_block(whole_logits(model, block), ours, block)
    expected = sums.agreement(97)
    assert found.kl > 0
    # Tiles of another size change the order of sums, and so a code now and then.
    assert found.kl == pytest.approx(expected.kl, rel=0.05)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-3)
    assert found.reference_perplexity == pytest.approx(compare(model, model, blocks).perplexity, rel=1e-6)


def test_several_types_at_once_have_the_scores_of_each() -> None:
    reference, candidate = decoder(), decoder(noise=0.02)
    blocks, prompts = random_blocks(40, 20), random_blocks(5, 9)
    progress: list[float] = []
    found = score_kv_dtypes(
        reference,
        candidate,
        ("int8", "int4"),
        blocks,
        prompts,
        8,
        lambda done, all_, what: progress.append(done / all_),
    )
    assert [scores.kv_dtype for scores in found] == ["int8", "int4"]
    for scores in found:
        assert scores.agreement == compare(reference, candidate, blocks, kv_dtype=scores.kv_dtype)
        assert scores.match == exact_match(reference, candidate, prompts, 8, kv_dtype=scores.kv_dtype)
    assert found[0].agreement != found[1].agreement
    assert progress == sorted(progress)
    assert progress[-1] == 1


def test_greedy_answers_come_out_of_the_coded_pool() -> None:
    model, prompts = decoder(), random_blocks(5, 67)
    for prompt, answer in zip(prompts, greedy_tokens(model, prompts, 6, kv_dtype="int4"), strict=True):
        ids = list(prompt)
        for token in answer:
            assert token == whole_logits(model, ids, "int4")[-1].argmax().item()
            ids.append(token)
    coarse = exact_match(model, model, random_blocks(*[9] * 6), 24, kv_dtype="int4")
    assert coarse.matched_prefix < 1


def test_b17_a_text_of_single_tokens_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="no two tokens"):
        compare(decoder(), decoder(), [[5], [6]])
