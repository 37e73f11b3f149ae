"""Sampling parameters resolved for one request: what the sampler reads."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sits_trt.runtime.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How one request's tokens are drawn, with every "off" spelled one way.

    top_k: 0 is off. seed: the request's, or fresh entropy. end_ids: ids that end the answer; they are banned before
    min_tokens. prompt_tokens: the different tokens of the prompt where the repetition penalty needs them, else empty.
    penalized: any penalty is on. needs_history: the tokens of the answer so far have a say. plain: greedy and nothing
    else, so that the largest logit is the answer.
    """

    params: SamplingParams
    prompt_ids: tuple[int, ...]
    prompt_tokens: NDArray[np.int64]
    end_ids: frozenset[int]
    seed: int
    greedy: bool
    top_k: int
    penalized: bool
    needs_history: bool
    plain: bool


def plan_sampling(request: Request, vocab_size: int, eos_ids: tuple[int, ...]) -> SamplingPlan:
    """Resolve a validated request. A request without a seed gets 64 bits from the operating system."""
    params = request.sampling
    repeats = params.repetition_penalty != 1.0
    penalized = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    needs_history = penalized or bool(params.bad_words)
    return SamplingPlan(
        params=params,
        prompt_ids=request.prompt_ids,
        prompt_tokens=np.unique(np.asarray(request.prompt_ids if repeats else (), dtype=np.int64)),
        end_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids),
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        greedy=params.greedy,
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        penalized=penalized,
        needs_history=needs_history,
        plain=params.greedy and not needs_history and not params.logprobs and params.min_tokens == 0,
    )
