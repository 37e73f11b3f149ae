"""From logits to tokens, for all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sits_trt.runtime.sampling import SamplingPlan
from sits_trt.runtime.step import Advance, Step, StepResult
from sits_trt.runtime.uniforms import uniforms

LOOK_AT_TOKENS = (64, 1024)
"""Likeliest tokens looked at for top-k and top-p before all are: almost always enough, and 40 times as fast."""

Draw = Callable[[Tensor, NDArray[np.float64]], Tensor]
"""Draws int64 [rows], -1 where the largest logit is not finite, from float32 logits [rows, vocab] and settings
[rows, 4]: temperature (0 takes the largest logit), top_k (0 is off), top_p (1 is off), and the point in [0, 1) at
which the distribution is inverted."""

NOT_FINITE = "the model gave no finite logits for this request"


def sample(step: Step, logits: Tensor, draw: Draw | None = None) -> StepResult:
    """Draw the next token of every advance that has a plan.

    logits: floating [draws, vocab], rows in the order of `step.draws`; not written to. A row is treated the same
    whatever the other rows are. A row whose largest logit is not a finite number becomes an error of its request.
    draw: what draws once penalties and bans are applied; None is torch.
    """
    draws = step.draws
    plans = [one.plan for one in draws if one.plan is not None]
    assert logits.shape[0] == len(draws), f"{logits.shape[0]} rows of logits for {len(draws)} draws"
    if not draws:
        return StepResult(step.number, {})
    shaped = logits.float()
    if not all(plan.plain for plan in plans):
        shaped = shaped.clone() if shaped is logits else shaped
        _penalize(shaped, draws, plans)
        _ban(shaped, draws, plans)
    numbers = [one.draw for one in draws]
    chosen = _choose(shaped, plans, numbers) if draw is None else draw(shaped, draw_settings(plans, numbers))
    tokens = chosen.tolist()
    errors = {one.key: NOT_FINITE for one, token in zip(draws, tokens, strict=True) if token < 0}
    return StepResult(
        step.number,
        {one.key: token for one, token in zip(draws, tokens, strict=True) if token >= 0},
        _logprobs(logits, draws, plans, tokens),
        errors,
    )


def draw_settings(plans: Sequence[SamplingPlan], draws: Sequence[int]) -> NDArray[np.float64]:
    """Return the settings that a `Draw` takes for tokens number `draws` of sequences with these plans."""
    points = uniforms([plan.seed for plan in plans], draws)
    rows = [
        (0.0, 0.0, 1.0, 0.0) if plan.greedy else (plan.params.temperature, plan.top_k, plan.params.top_p, point)
        for plan, point in zip(plans, points.tolist(), strict=True)
    ]
    return np.array(rows, dtype=np.float64)


def _choose(shaped: Tensor, plans: Sequence[SamplingPlan], draws: Sequence[int]) -> Tensor:
    """Return int64 [rows]: the token of each row of `shaped` [rows, vocab], -1 where the largest is not finite."""
    chosen = _likeliest(shaped)
    chosen = chosen.masked_fill(~shaped.gather(1, chosen[:, None])[:, 0].isfinite(), -1)
    rows = [row for row, plan in enumerate(plans) if not plan.greedy]
    if rows:
        index = torch.tensor(rows, device=shaped.device)
        drawn = _draw(shaped[index], [plans[row] for row in rows], [draws[row] for row in rows])
        chosen[index] = torch.where(chosen[index] < 0, chosen[index], drawn)
    return chosen


def _likeliest(shaped: Tensor) -> Tensor:
    """Return int64 [rows]: the first largest value of each row, the first NaN where there is one."""
    if shaped.device.type == "cpu":
        # One eighth of the time of torch's own on a CPU.
        return torch.from_numpy(shaped.detach().numpy().argmax(-1))
    return shaped.argmax(-1)


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
    counted = [(row, draw.counted) for row, draw in enumerate(draws) if draw.counted is not None]
    if not counted:
        return

    def tensor(parts: list[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(shaped.device)

    def per_row(name: str) -> Tensor:
        return torch.tensor([getattr(plan.params, name) for plan in plans], device=shaped.device)

    rows = tensor([np.full(len(tokens), row) for row, (tokens, _) in counted])
    tokens, counts = (tensor([one[part] for _, one in counted]) for part in (0, 1))
    values, repetition = shaped[rows, tokens], per_row("repetition_penalty")[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_row("presence_penalty")[rows] * (counts > 0) + per_row("frequency_penalty")[rows] * counts
    shaped[rows, tokens] = values


def _ban(shaped: Tensor, draws: Sequence[Advance], plans: Sequence[SamplingPlan]) -> None:
    """Make it impossible in `shaped` [draws, vocab], in place, to end too early or to complete a bad word."""
    rows: list[int] = []
    tokens: list[int] = []
    for row, (draw, plan) in enumerate(zip(draws, plans, strict=True)):
        banned = list(plan.end_ids) if draw.draw < plan.params.min_tokens else []
        for word in plan.params.bad_words:
            if draw.recent[len(draw.recent) - len(word) + 1 :] == word[:-1]:
                banned.append(word[-1])
        rows += [row] * len(banned)
        tokens += banned
    if rows:
        shaped[torch.tensor(rows, device=shaped.device), torch.tensor(tokens, device=shaped.device)] = float("-inf")


def _draw(shaped: Tensor, plans: Sequence[SamplingPlan], draws: Sequence[int]) -> Tensor:
    """Return int64 [rows]: one token for each row of `shaped` [rows, vocab], by inversion of its distribution.

    One random number a row decides. Tokens are summed in the order of their ids, and what top-k and top-p leave is
    a matter of a token's probability alone, so tokens of equal probability need no order that another batch, or
    another device, could change.
    """
    device = shaped.device
    temperature = torch.tensor([plan.params.temperature for plan in plans], dtype=torch.float32, device=device)
    probs = (shaped / temperature[:, None]).softmax(-1)
    points = torch.from_numpy(uniforms([plan.seed for plan in plans], draws)).to(device)
    drawn = torch.empty(len(plans), dtype=torch.int64, device=device)
    whole: list[int] = []
    cut: list[int] = []
    for row, plan in enumerate(plans):
        (cut if plan.top_k or plan.params.top_p < 1 else whole).append(row)
    if whole:
        rows = torch.tensor(whole, device=device)
        drawn[rows] = _invert(probs[rows], points[rows])
    if cut:
        rows = torch.tensor(cut, device=device)
        drawn[rows] = _draw_cut(probs[rows], [plans[row] for row in cut], points[rows])
    return drawn


def _invert(weights: Tensor, points: Tensor) -> Tensor:
    """Return int64 [rows]: where the running sum of `weights` [rows, width] passes its `points` part, in [0, 1)."""
    sums = weights.double().cumsum(-1)
    places = torch.searchsorted(sums, (points * sums[:, -1])[:, None], right=True)[:, 0]
    # Only a row of NaN lies outside; its request fails, and the others must not.
    return places.clamp(max=weights.shape[-1] - 1)


def _draw_cut(probs: Tensor, plans: Sequence[SamplingPlan], points: Tensor) -> Tensor:
    """Draw from the tokens that top-k and then top-p leave of `probs` [rows, vocab]: int64 [rows].

    Looks at the likeliest few tokens of each row first and at more where they do not decide.
    """
    vocab = probs.shape[-1]
    top_k = torch.tensor([plan.top_k or vocab for plan in plans], device=probs.device)
    top_p = torch.tensor([plan.params.top_p for plan in plans], dtype=torch.float64, device=probs.device)
    drawn = torch.empty_like(top_k)
    rest = torch.arange(len(plans), device=probs.device)
    for width in (*(width for width in LOOK_AT_TOKENS if width < vocab), vocab):
        values, ids = probs[rest].topk(width)
        threshold, decided = _last_kept(values, top_k[rest], top_p[rest], vocab)
        kept = torch.where(values >= threshold[:, None], values, torch.zeros_like(values))
        ids, order = ids.sort(dim=-1)
        token = ids.gather(1, _invert(kept.gather(1, order), points[rest])[:, None])[:, 0]
        drawn[rest[decided]] = token[decided]
        rest = rest[~decided]
        if not len(rest):
            break
    return drawn


def _last_kept(values: Tensor, top_k: Tensor, top_p: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the probability of the last token kept, [rows], and whether all tokens as likely are in `values`.

    values: [rows, width], the largest probabilities, falling. top_k: int64 [rows], `vocab` where off. top_p:
    float64 [rows]. Top-p counts from the mass that top-k leaves, which is 1 where top-k is off.
    """
    width = values.shape[-1]
    sums = values.double().cumsum(-1)
    last_k = (top_k - 1).clamp(max=width - 1)
    mass = torch.where(top_k == vocab, torch.ones_like(top_p), sums.gather(1, last_k[:, None])[:, 0])
    last_p = torch.searchsorted(sums, (top_p * mass)[:, None])[:, 0].clamp(max=width - 1)
    last = torch.where(top_p < 1, torch.minimum(last_p, last_k), last_k)
    threshold = values.gather(1, last[:, None])[:, 0]
    if width == vocab:
        return threshold, torch.ones_like(threshold, dtype=torch.bool)
    # A top-k beyond the width leaves its mass unknown; an equal value at the edge may have more of its kind outside.
    return threshold, (values[:, -1] < threshold) & ((top_k <= width) | (top_k == vocab))
