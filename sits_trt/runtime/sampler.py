"""From logits to tokens, for all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sits_trt.runtime.sampling import SamplingPlan
from sits_trt.runtime.step import Advance, Step, StepResult
from sits_trt.runtime.uniforms import uniforms

SORTED_TOKENS = 1024
"""Likeliest tokens looked at first for top-k and top-p: almost always enough, and much cheaper than a full sort."""

NOT_FINITE = "the model gave no finite logits for this request"


def sample(step: Step, logits: Tensor) -> StepResult:
    """Draw the next token of every advance that has a plan.

    logits: floating [draws, vocab], rows in the order of `step.draws`; not written to. A row is treated the same
    whatever the other rows are. A row whose largest logit is not a finite number becomes an error of its request.
    """
    draws = step.draws
    plans = [draw.plan for draw in draws if draw.plan is not None]
    assert logits.shape[0] == len(draws), f"{logits.shape[0]} rows of logits for {len(draws)} draws"
    if not draws:
        return StepResult(step.number, {})
    shaped = logits.float()
    if not all(plan.plain for plan in plans):
        shaped = shaped.clone() if shaped is logits else shaped
        _penalize(shaped, draws, plans)
        _ban(shaped, draws, plans)
    largest, likeliest = shaped.max(dim=-1)
    chosen = likeliest.masked_fill(~largest.isfinite(), -1)
    rows = [row for row, plan in enumerate(plans) if not plan.greedy]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        drawn = _draw(shaped[index], [plans[row] for row in rows], [draws[row].draw for row in rows])
        chosen[index] = torch.where(chosen[index] < 0, chosen[index], drawn)
    tokens = chosen.tolist()
    errors = {draw.key: NOT_FINITE for draw, token in zip(draws, tokens, strict=True) if token < 0}
    return StepResult(
        step.number,
        {draw.key: token for draw, token in zip(draws, tokens, strict=True) if token >= 0},
        _logprobs(logits, draws, plans, tokens),
        errors,
    )


def _logprobs(
    logits: Tensor, draws: Sequence[Advance], plans: Sequence[SamplingPlan], tokens: Sequence[int]
) -> dict[int, float]:
    rows = [row for row, plan in enumerate(plans) if plan.params.logprobs and tokens[row] >= 0]
    if not rows:
        return {}
    wanted = logits[torch.tensor(rows, device=logits.device)].float()
    picked = torch.tensor([tokens[row] for row in rows], device=logits.device)
    values = wanted.gather(1, picked[:, None])[:, 0] - wanted.logsumexp(-1)
    return {draws[row].key: value for row, value in zip(rows, values.tolist(), strict=True)}


def _penalize(shaped: Tensor, draws: Sequence[Advance], plans: Sequence[SamplingPlan]) -> None:
    """Apply repetition, presence and frequency penalties to `shaped` [draws, vocab] in place."""
    seen_rows, seen_tokens, said_rows, said_tokens, said_counts = [], [], [], [], []
    for row, (draw, plan) in enumerate(zip(draws, plans, strict=True)):
        if not plan.penalized:
            continue
        said, counts = np.unique(np.asarray(draw.output_ids, dtype=np.int64), return_counts=True)
        seen = np.union1d(plan.prompt_tokens, said)
        seen_rows.append(np.full(len(seen), row))
        seen_tokens.append(seen)
        said_rows.append(np.full(len(said), row))
        said_tokens.append(said)
        said_counts.append(counts)
    if not seen_rows:
        return

    def tensor(parts: list[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(shaped.device)

    def per_row(name: str) -> Tensor:
        return torch.tensor([getattr(plan.params, name) for plan in plans], device=shaped.device)

    rows, tokens = tensor(seen_rows), tensor(seen_tokens)
    values, repetition = shaped[rows, tokens], per_row("repetition_penalty")[rows]
    shaped[rows, tokens] = torch.where(values > 0, values / repetition, values * repetition)
    rows, tokens, times = tensor(said_rows), tensor(said_tokens), tensor(said_counts)
    shaped[rows, tokens] -= per_row("presence_penalty")[rows] + per_row("frequency_penalty")[rows] * times


def _ban(shaped: Tensor, draws: Sequence[Advance], plans: Sequence[SamplingPlan]) -> None:
    """Make it impossible in `shaped` [draws, vocab], in place, to end too early or to complete a bad word."""
    rows: list[int] = []
    tokens: list[int] = []
    for row, (draw, plan) in enumerate(zip(draws, plans, strict=True)):
        banned = list(plan.end_ids) if draw.draw < plan.params.min_tokens else []
        for word in plan.params.bad_words:
            before = len(word) - 1
            recent = draw.output_ids[max(0, len(draw.output_ids) - before) :]
            if len(recent) < before:
                recent = plan.prompt_ids[max(0, len(plan.prompt_ids) - before + len(recent)) :] + recent
            if recent == word[:-1]:
                banned.append(word[-1])
        rows += [row] * len(banned)
        tokens += banned
    if rows:
        shaped[torch.tensor(rows, device=shaped.device), torch.tensor(tokens, device=shaped.device)] = float("-inf")


def _draw(shaped: Tensor, plans: Sequence[SamplingPlan], draws: Sequence[int]) -> Tensor:
    """Return int64 [rows]: one token for each row of `shaped` [rows, vocab], by inversion of its distribution.

    One random number a row decides. Tokens are summed in the order of their ids, and truncation is by a threshold
    on the probability, so tokens of equal probability need no order that could depend on the batch.
    """
    device = shaped.device
    temperature = torch.tensor([plan.params.temperature for plan in plans], dtype=torch.float32, device=device)
    probs = (shaped / temperature[:, None]).softmax(-1)
    cut = [row for row, plan in enumerate(plans) if plan.top_k or plan.params.top_p < 1]
    if cut:
        index = torch.tensor(cut, device=device)
        threshold = _thresholds(probs[index], [plans[row] for row in cut])
        probs[index] = torch.where(probs[index] >= threshold[:, None], probs[index], 0.0)
    sums = probs.double().cumsum(-1)
    point = torch.from_numpy(uniforms([plan.seed for plan in plans], draws)).to(device) * sums[:, -1]
    return torch.searchsorted(sums, point[:, None], right=True)[:, 0].clamp_(max=shaped.shape[-1] - 1)


def _thresholds(probs: Tensor, plans: Sequence[SamplingPlan]) -> Tensor:
    """Return float32 [rows]: the smallest probability of `probs` [rows, vocab] that top-k and then top-p keep."""
    vocab = probs.shape[-1]
    top_k = torch.tensor([plan.top_k or vocab for plan in plans], device=probs.device)
    top_p = torch.tensor([plan.params.top_p for plan in plans], dtype=torch.float64, device=probs.device)
    mass = probs.double().sum(-1)
    threshold, found = _cut(probs.topk(min(vocab, SORTED_TOKENS)).values, mass, top_k, top_p, vocab)
    if not bool(found.all()):
        rest = (~found).nonzero()[:, 0]
        ordered = probs[rest].sort(dim=-1, descending=True).values
        threshold[rest] = _cut(ordered, mass[rest], top_k[rest], top_p[rest], vocab)[0]
    return threshold


def _cut(ordered: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Find the last token kept among the likeliest ones, `ordered` [rows, width] falling.

    mass: float64 [rows], the sum over the whole vocabulary. Returns its probability, and whether it lies within
    the width; where the width is the vocabulary it always does.
    """
    width = ordered.shape[-1]
    sums = ordered.double().cumsum(-1)
    last_k = top_k - 1
    kept = torch.where(top_k <= width, sums.gather(1, last_k.clamp(max=width - 1)[:, None])[:, 0], mass)
    last_p = torch.searchsorted(sums, (top_p * kept)[:, None])[:, 0]
    last = torch.where(top_p < 1, torch.minimum(last_p, last_k), last_k)
    # The mass that top-k keeps is known when k lies within the width or is the whole vocabulary.
    known = (top_k <= width) | (top_k == vocab)
    return ordered.gather(1, last.clamp(max=width - 1)[:, None])[:, 0], (last < width) & known
