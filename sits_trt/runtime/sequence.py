"""One request in the scheduler: its tokens, how many of them are in the pool, and where."""

from __future__ import annotations

from sits_trt.runtime.answer import Answer
from sits_trt.runtime.detokenizer import Detokenizer
from sits_trt.runtime.history import TokenCounts
from sits_trt.runtime.prefix import ROOT, chain_names
from sits_trt.runtime.request import FinishReason, Request, Timings, TokenEvent
from sits_trt.runtime.sampling import plan_sampling
from sits_trt.runtime.tiles import Lease


class Sequence:
    """A request's mutable state. Only the scheduler writes to it.

    `tokens` is prompt and answer. The first `num_computed` of them are in the pool; the rest is pending:

        | cached | computed in earlier steps | pending |
        0        num_cached                  num_computed    len(tokens)

    A sequence that has drawn its newest token and nothing else to do has exactly one pending token. `counts` is there
    where penalties need it. `tile_names` names the full tiles of `tokens` as far as they are known; the first
    `num_published` of them are published.
    """

    def __init__(
        self,
        key: int,
        request: Request,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        detokenizer: Detokenizer | None,
        tile_tokens: int,
        arrival_ns: int,
        timeout_ns: int = 0,
    ) -> None:
        self.key = key
        self.request = request
        self.plan = plan_sampling(request, vocab_size, eos_ids)
        self.answer = Answer(request.sampling, self.plan.end_ids, detokenizer)
        self.tokens = list(request.prompt_ids)
        self.counts = TokenCounts(self.tokens, request.sampling.max_tokens) if self.plan.penalized else None
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_cached = 0
        self.lease: Lease | None = None
        self.tile_names = chain_names(self.tokens, tile_tokens)
        self.num_published = 0
        self.times_overtaken = 0
        self.arrival_ns = arrival_ns
        self.deadline_ns = arrival_ns + timeout_ns if timeout_ns else 0
        self.first_scheduled_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Sequences of smaller rank come first: by priority, then by arrival."""
        return (-self.request.priority, self.key)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_pool_tokens(self) -> int:
        """Tokens that the pool must hold at most: the last token of an answer is never computed."""
        return self.num_prompt + self.request.sampling.max_tokens - 1

    def next_names(self, tile_tokens: int) -> list[bytes]:
        """Return the names of the full prompt tiles that come next, empty in the middle of a tile.

        The tile with the last prompt token is never among them: that token's logits give the first of the answer.
        """
        done = self.num_computed // tile_tokens
        if self.num_computed % tile_tokens or (self.lease and self.lease.num_tiles > done):
            return []
        return self.tile_names[done : (self.num_prompt - 1) // tile_tokens]

    def name_tiles(self, tile_tokens: int) -> None:
        """Bring `tile_names` up to the tokens known now."""
        named = len(self.tile_names)
        if len(self.tokens) >= (named + 1) * tile_tokens:
            parent = self.tile_names[-1] if named else ROOT
            self.tile_names += chain_names(self.tokens[named * tile_tokens :], tile_tokens, parent)

    def event(
        self,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        reason: FinishReason | None = None,
        error: str = "",
        logprobs: tuple[float, ...] = (),
    ) -> TokenEvent:
        """Return an event of this request with its counts and timings of now."""
        return TokenEvent(
            self.request.request_id,
            token_ids,
            text,
            reason,
            error,
            logprobs,
            self.num_prompt,
            self.num_output,
            self.num_cached,
            Timings(self.arrival_ns, self.first_scheduled_ns, self.first_token_ns, self.last_token_ns),
            self.key,
        )
