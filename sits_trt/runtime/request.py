"""What a caller asks for and what it gets back: plain data that crosses the executor's door."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sits_trt.errors import RequestError

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing logits by less loses their order in 32 bits."""

MAX_SEED = 2**64 - 1


class FinishReason(StrEnum):
    """Why a request ended. `stop` is a stop id, an end-of-sequence id or a stop string."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are chosen.

    max_tokens: longest answer, at least 1. prompt plus max_tokens must fit the engine's max_seq_tokens.
    min_tokens: end-of-sequence and stop ids cannot be drawn, and stop strings are not looked for, before this many.
    temperature: 0 or less than 1e-5 is greedy; then seed, top_k and top_p have no effect.
    top_k: the number of most likely tokens to draw from; 0, negative or at least the vocabulary is off.
    top_p: smallest set of most likely tokens with this probability, after top_k; 1 is off, 0 the likeliest only.
    seed: 0 to 2**64-1. The same seed gives the same tokens, alone or in traffic. None draws a new seed from the
      operating system for each request.
    repetition_penalty: logits of tokens in prompt or answer are divided by it where positive, multiplied where
      negative (Keskar et al. 2019); 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens of the answer, once, or once per
      occurrence; 0 is off.
    stop_token_ids: end the answer; the id is the last of its token ids, its text is left out.
    stop: strings that end the answer. Neither they nor anything behind them is in the text.
    bad_words: sequences of token ids that are never completed.
    ignore_eos: the model's own end-of-sequence ids do not end the answer.
    logprobs: report the natural logarithm of each token's probability under the model's own distribution,
      before temperature, penalties and bans.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError when a value has no meaning for a model with `vocab_size` tokens."""
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; ask for at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens ({self.max_tokens})")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; it must be a number from 0 upwards")
        if not 0 <= self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be from 0 to 1")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must be from 0 to 2**64-1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(f"repetition_penalty is {self.repetition_penalty}; it must be a number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise RequestError(f"{name} is {getattr(self, name)}; it must be a finite number")
        if any(not word for word in self.stop):
            raise RequestError("a stop string is empty; leave it out")
        if any(not word for word in self.bad_words):
            raise RequestError("a bad word has no tokens; leave it out")
        _check_ids("stop token id", self.stop_token_ids, vocab_size)
        for word in self.bad_words:
            _check_ids("token id of a bad word", word, vocab_size)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0


def _check_ids(what: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{what} {token} is not in the vocabulary of {vocab_size} tokens")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to answer it.

    `request_id` is the caller's own name for it and is only handed back: equal ids do not collide.
    Of waiting requests a larger `priority` starts first, then the one that came first.
    `queue_timeout_ms` is the longest wait for a first step; 0 takes the executor's own.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    queue_timeout_ms: int = 0

    def validate(self, vocab_size: int, max_seq_tokens: int) -> None:
        """Raise RequestError when the request can never be served.

        Prompt and max_tokens together may be up to `max_seq_tokens`. A request for more is refused, not cut:
        an answer that ends for want of room is never mistaken for one of the wanted length.
        """
        self.sampling.validate(vocab_size)
        prompt, wanted = len(self.prompt_ids), self.sampling.max_tokens
        if not prompt:
            raise RequestError("the prompt has no tokens; send at least one")
        if prompt >= max_seq_tokens:
            raise RequestError(
                f"the prompt has {prompt} tokens, but this engine holds {max_seq_tokens} tokens of prompt and answer "
                f"together; send at most {max_seq_tokens - 1}"
            )
        if prompt + wanted > max_seq_tokens:
            raise RequestError(
                f"the prompt's {prompt} tokens and max_tokens {wanted} are {prompt + wanted} together, but this engine "
                f"holds {max_seq_tokens}; ask for at most {max_seq_tokens - prompt} tokens or shorten the prompt"
            )
        if min(self.prompt_ids) < 0 or max(self.prompt_ids) >= vocab_size:
            _check_ids("prompt token id", self.prompt_ids, vocab_size)
        if self.queue_timeout_ms < 0:
            raise RequestError(f"queue_timeout_ms is {self.queue_timeout_ms}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class Timings:
    """Moments of one request in nanoseconds of time.monotonic_ns; 0 where it has not come yet."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What became of one request in one step.

    key: number of the submit, unique in its executor. token_ids: the new tokens, a stop id included.
    text: the new text, whole characters only: it may lag behind the tokens, and the texts of all events joined are
      the decoded answer without a stop token or stop string. Empty when the executor has no tokenizer.
    finish_reason: None until the last event of the request. error: one sentence when the reason is `error`.
    logprobs: one per token id where asked for. prompt_tokens, output_tokens: totals so far.
    cached_tokens: prompt tokens that the prefix cache saved from being computed.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str = ""
    logprobs: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    key: int = 0


def join_events(events: Iterable[TokenEvent]) -> TokenEvent:
    """Return the one event that says the same as all events of a request: what a caller that does not stream gets."""
    listed = list(events)
    return replace(
        listed[-1],
        token_ids=tuple(token for event in listed for token in event.token_ids),
        text="".join(event.text for event in listed),
        logprobs=tuple(value for event in listed for value in event.logprobs),
    )
