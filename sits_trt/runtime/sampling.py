"""Sampling parameters resolved for one request: what the sampler reads."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sits_trt.runtime.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How one request's tokens are drawn, with every "off" spelled one way.

    end_ids: ids that end the answer; they are banned before min_tokens. seed: the request's, or fresh entropy.
    top_k: 0 is off. penalized: any penalty is on. recent_tokens: how many tokens back bad words reach. plain: greedy
    and nothing else, so that the largest logit is the answer.
    """

    params: SamplingParams
    end_ids: frozenset[int]
    seed: int
    greedy: bool
    top_k: int
    penalized: bool
    recent_tokens: int
    plain: bool


def plan_sampling(request: Request, vocab_size: int, eos_ids: tuple[int, ...]) -> SamplingPlan:
    """Resolve a validated request. A request without a seed gets 64 bits from the operating system."""
    params = request.sampling
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    penalized = penalties != (1.0, 0.0, 0.0)
    shaped = penalized or bool(params.bad_words) or params.min_tokens > 0
    return SamplingPlan(
        params=params,
        end_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids),
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        greedy=params.greedy,
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        penalized=penalized,
        recent_tokens=max((len(word) - 1 for word in params.bad_words), default=0),
        plain=params.greedy and not shaped and not params.logprobs,
    )
