"""How far a decoder is from a reference: perplexity, KL divergence, agreeing best tokens, equal greedy answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from sits_trt.errors import CheckpointError
from sits_trt.models.decoder import Decoder
from sits_trt.ops import allocate_pool
from sits_trt.progress import Progress, silent
from sits_trt.spec import TileSpec

_ROWS = 64
"""Positions whose whole-vocabulary distributions are compared at a time."""


@dataclass(frozen=True)
class Agreement:
    """A candidate beside its reference on the same text.

    `perplexity` and `reference_perplexity` are exp of the mean negative log-likelihood (natural) of every
    token but the first of each block. `kl` is the mean over positions of KL(reference || candidate) in nats.
    `top1` is the share of positions with the same best token, `top5` the mean share of the reference's five
    best tokens that are among the candidate's five. `positions` counts the positions.
    """

    perplexity: float
    reference_perplexity: float
    kl: float
    top1: float
    top5: float
    positions: int

    def to_dict(self) -> dict[str, float | int]:
        return asdict(self)


@dataclass(frozen=True)
class ExactMatch:
    """Greedy answers beside the reference's: `exact_match` is the share of prompts whose `tokens` tokens are all
    the same, `matched_prefix` the mean share of tokens before the first difference."""

    exact_match: float
    matched_prefix: float
    prompts: int
    tokens: int

    def to_dict(self) -> dict[str, float | int]:
        return asdict(self)


@torch.inference_mode()
def block_logits(decoder: Decoder, ids: Sequence[int], kv_dtype: str = "") -> Tensor:
    """Return float32 [len(ids), vocab]: the next-token logits after every token of one block, from an empty cache.

    `kv_dtype` is the type of the KV pool as in TileSpec, by default that of the decoder's own arithmetic. All tokens
    attend to one another through the pool, so its rounding is in the logits as it is in an answer.
    """
    tiles = _tile(decoder, kv_dtype)
    count = tiles.tiles_for(len(ids))
    positions = torch.arange(len(ids), dtype=torch.int32)
    pool, scales = allocate_pool(tiles, count)
    logits: Tensor = decoder(
        torch.tensor(ids, dtype=torch.int32),
        pool,
        torch.arange(count, dtype=torch.int32)[None],
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, len(ids)], dtype=torch.int32),
        positions,
        scales,
    )
    return logits


def _tile(decoder: Decoder, kv_dtype: str) -> TileSpec:
    own = str(decoder.embedding.dtype).removeprefix("torch.")
    return TileSpec.of(decoder.spec, kv_dtype=kv_dtype or own)


@dataclass
class AgreementSums:
    """Sums over positions from which an Agreement follows."""

    negative_log_likelihood: float = 0.0
    reference_negative_log_likelihood: float = 0.0
    predicted: int = 0
    kl: float = 0.0
    same_best: int = 0
    shared_of_five: int = 0
    positions: int = 0

    def add(self, reference: Tensor, candidate: Tensor, following: Tensor) -> None:
        """Add logits [rows, vocab] of both; `following` holds the token after each row, as far as there is one."""
        ours, theirs = candidate.log_softmax(-1), reference.log_softmax(-1)
        known = following[:, None]
        self.negative_log_likelihood -= ours[: len(known)].gather(1, known).double().sum().item()
        self.reference_negative_log_likelihood -= theirs[: len(known)].gather(1, known).double().sum().item()
        self.predicted += len(known)
        self.kl += (theirs.exp() * (theirs - ours)).sum(-1).double().sum().item()
        best, reference_best = (logits.topk(min(5, logits.shape[-1]), -1).indices for logits in (ours, theirs))
        self.same_best += int((best[:, 0] == reference_best[:, 0]).sum())
        self.shared_of_five += int((best[:, :, None] == reference_best[:, None, :]).sum())
        self.positions += len(ours)

    def add_block(self, reference: Tensor, candidate: Tensor, block: Sequence[int]) -> None:
        """Add the logits [tokens, vocab] of both models on one block of token ids."""
        following = torch.tensor(block[1:], dtype=torch.int64)
        for start in range(0, len(block), _ROWS):
            rows = slice(start, start + _ROWS)
            self.add(reference[rows], candidate[rows], following[rows])

    def agreement(self, vocab_size: int) -> Agreement:
        return Agreement(
            perplexity=math.exp(self.negative_log_likelihood / self.predicted),
            reference_perplexity=math.exp(self.reference_negative_log_likelihood / self.predicted),
            kl=self.kl / self.positions,
            top1=self.same_best / self.positions,
            top5=self.shared_of_five / (min(5, vocab_size) * self.positions),
            positions=self.positions,
        )


def check_blocks(blocks: Sequence[Sequence[int]]) -> None:
    """Raise CheckpointError when no block has the two tokens that a perplexity needs."""
    if all(len(block) < 2 for block in blocks):
        raise CheckpointError("the text to measure on has no two tokens in a row; give a longer text or block_tokens")


def compare(
    reference: Decoder,
    candidate: Decoder,
    blocks: Sequence[Sequence[int]],
    progress: Progress = silent,
    kv_dtype: str = "",
) -> Agreement:
    """Run both decoders over blocks of token ids and return how far the candidate is from the reference.

    `kv_dtype` is the type of the candidate's KV pool, as in `block_logits`. Memory stays near the two decoders and
    the logits of one block each. A decoder compared with itself, for its perplexity, runs once. Raises
    CheckpointError when no block has two tokens.
    """
    check_blocks(blocks)
    sums = AgreementSums()
    for done, block in enumerate(blocks):
        progress(done, len(blocks), "compare with the reference")
        theirs = block_logits(reference, block)
        same = candidate is reference and not kv_dtype
        sums.add_block(theirs, theirs if same else block_logits(candidate, block, kv_dtype), block)
    progress(len(blocks), len(blocks), "compare with the reference")
    return sums.agreement(candidate.spec.vocab_size)


@torch.inference_mode()
def greedy_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    progress: Progress = silent,
    kv_dtype: str = "",
) -> list[list[int]]:
    """Return the `tokens` most likely next tokens, one after another, of every prompt; end tokens do not end it.

    `kv_dtype` as in `block_logits`.
    """
    tiles = _tile(decoder, kv_dtype)
    per_prompt = tiles.tiles_for(max(len(prompt) for prompt in prompts) + tokens)
    count = len(prompts)
    pool, scales = allocate_pool(tiles, count * per_prompt)
    table = torch.arange(count * per_prompt, dtype=torch.int32).reshape(count, per_prompt)
    context = torch.zeros(count, dtype=torch.int32)
    new = [list(prompt) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    for done in range(tokens):
        progress(done, tokens, "greedy answers")
        lengths = torch.tensor([len(ids) for ids in new], dtype=torch.int32)
        ends = lengths.cumsum(0, dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), ends))
        ids = torch.tensor([token for sequence in new for token in sequence], dtype=torch.int32)
        best = decoder(ids, pool, table, context, starts, ends - 1, scales).argmax(-1).tolist()
        context = context + lengths
        new = [[token] for token in best]
        for answer, token in zip(answers, best, strict=True):
            answer.append(token)
    progress(tokens, tokens, "greedy answers")
    return answers


def exact_match(
    reference: Decoder,
    candidate: Decoder,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    progress: Progress = silent,
    kv_dtype: str = "",
) -> ExactMatch:
    """Compare the greedy answers of both decoders, `tokens` tokens for each prompt.

    `kv_dtype` is the type of the candidate's KV pool, as in `block_logits`.
    """
    theirs = greedy_tokens(reference, prompts, tokens, lambda done, total, what: progress(done, 2 * total, what))
    ours = greedy_tokens(
        candidate, prompts, tokens, lambda done, total, what: progress(total + done, 2 * total, what), kv_dtype
    )
    return match_answers(theirs, ours)


def match_answers(theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> ExactMatch:
    """Compare answers of `greedy_tokens` prompt by prompt."""
    prefixes = [_common_prefix(a, b) for a, b in zip(theirs, ours, strict=True)]
    tokens = len(theirs[0])
    return ExactMatch(
        exact_match=sum(length == tokens for length in prefixes) / len(prefixes),
        matched_prefix=sum(prefixes) / (len(prefixes) * tokens),
        prompts=len(prefixes),
        tokens=tokens,
    )


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
