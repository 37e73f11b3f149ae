"""Decides, step by step, which sequences move and how far. Plain Python; the step is its only door to the device.

Policy:
- A sequence is admitted when a batch place is free and the pool can hold its prompt and its longest answer whatever
  the others do (no eviction: what has started finishes). By priority, then by arrival.
- A request that does not fit yet may be overtaken by smaller ones behind it, but by at most one batch of them: then
  nobody behind it is admitted until it is. So short traffic flows on and a large request starts in bounded time.
  Behind a whole batch of requests that do not fit nobody is looked at: the cost of a step is bounded too.
- Every sequence that has its prompt in the pool advances by one token in every step, before any prompt gets a share:
  a long prompt cannot stall answers in progress. The rest of the step's tokens goes to prompts (`sharing`).
- Full tiles are shared between sequences that begin alike, and a tile that another sequence has filled since is
  taken over in mid-prefill too. When prompts contend for a step, only one of those that need the same next tile
  computes it: a burst of requests with one system prompt computes it once.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from sits_trt.contract import EngineLimits
from sits_trt.runtime.request import FinishReason, TokenEvent
from sits_trt.runtime.sequence import Sequence
from sits_trt.runtime.sharing import Claim, share_budget
from sits_trt.runtime.stats import Meters
from sits_trt.runtime.step import Advance, Step, StepResult
from sits_trt.runtime.tiles import TileAllocator
from sits_trt.spec import TileSpec


class Scheduler:
    """Owns the sequences and their tiles. One thread calls it: `schedule`, then `apply` or `discard`, and again.

    `add` takes requests that fit `max_seq_tokens`. `abort` may be called at any time, also between `schedule` and
    `apply`. `clock` returns nanoseconds.
    """

    def __init__(
        self,
        tile: TileSpec,
        limits: EngineLimits,
        num_tiles: int,
        meters: Meters | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if limits.max_batch_size > limits.max_tokens_per_step:
            raise ValueError("a step must have room for one token of every sequence in the batch")
        self.limits = limits
        self.tiles = TileAllocator(tile, num_tiles)
        self.meters = meters or Meters()
        self._tile_tokens = tile.tile_tokens
        self._clock = clock
        self._waiting: list[Sequence] = []
        self._running: dict[int, Sequence] = {}
        self._step: Step | None = None
        self._next_number = 0
        self._admission_may_succeed = False
        self._has_deadlines = False

    @property
    def max_seq_tokens(self) -> int:
        """Prompt plus max_tokens of the largest request that can ever be served."""
        return min(self.limits.max_seq_tokens, self.tiles.num_tiles * self._tile_tokens)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its place."""
        insort(self._waiting, sequence, key=attrgetter("rank"))
        self._has_deadlines = self._has_deadlines or bool(sequence.deadline_ns)
        self._admission_may_succeed = True

    def abort(
        self, key: int, reason: FinishReason = FinishReason.CANCELLED, error: str = ""
    ) -> TokenEvent | None:  # fmt: skip
        """End a sequence now and free its tiles; return its last event, or None when there is no such sequence."""
        sequence = self._running.get(key) or next((one for one in self._waiting if one.key == key), None)
        return None if sequence is None else self._finish(sequence, reason, error)

    def expire(self) -> list[TokenEvent]:
        """End every sequence that has waited for its first step longer than it may; return their last events."""
        if not self._has_deadlines:
            return []
        now = self._clock()
        late = [
            sequence
            for sequence in (*self._waiting, *self._running.values())
            if sequence.deadline_ns and not sequence.first_scheduled_ns and now > sequence.deadline_ns
        ]
        self.meters.timed_out += len(late)
        return [
            self._finish(
                sequence,
                FinishReason.ERROR,
                f"the request waited longer than its queue timeout of "
                f"{(sequence.deadline_ns - sequence.arrival_ns) // 1_000_000} ms; send it again later",
            )
            for sequence in late
        ]

    def schedule(self) -> Step:
        """Admit what can be admitted and return the next step; it is empty only when there is nothing to do."""
        assert self._step is None, "the step before was neither applied nor discarded"
        if self._admission_may_succeed:
            self._admit()
            self._admission_may_succeed = False
        now = self._clock()
        prefills: list[Sequence] = []
        advances: list[Advance] = []
        for sequence in self._running.values():
            if sequence.num_pending > 1:
                self._take_over_tiles(sequence)
            if sequence.num_pending == 1:
                advances.append(self._advance(sequence, 1, now))
            else:
                prefills.append(sequence)
        for sequence, share in self._share(prefills, self.limits.max_tokens_per_step - len(advances)):
            advances.append(self._advance(sequence, share, now))
        self._step = Step(self._next_number, tuple(advances))
        self._next_number += 1
        return self._step

    def apply(self, result: StepResult) -> list[TokenEvent]:
        """Take over what the pending step gave; return the events, in the order of its advances."""
        step = self._take_step(result.number)
        now = self._clock()
        self.meters.steps += 1
        events = []
        for advance in step.advances:
            sequence = self._running.get(advance.key)
            if sequence is None:
                continue
            if advance.key in result.errors:
                events.append(self._finish(sequence, FinishReason.ERROR, result.errors[advance.key]))
                continue
            self._computed(sequence, len(advance.token_ids))
            if advance.plan is not None:
                logprob = (result.logprobs[advance.key],) if advance.plan.params.logprobs else ()
                events.append(self._drawn(sequence, result.tokens[advance.key], logprob, now))
        return events

    def discard(self, number: int) -> None:
        """Forget the pending step as if it had not been scheduled: its tokens will be computed again."""
        self._take_step(number)

    def check(self) -> None:
        """Recount all state; an AssertionError names the first thing that does not add up."""
        self.tiles.check()
        leases = {id(sequence.lease) for sequence in self._running.values()}
        assert len(leases) == len(self._running) == self.tiles.num_leases, "leases and running sequences differ"
        assert len(self._running) <= self.limits.max_batch_size, "more sequences run than the engine takes"
        assert all(sequence.lease is None for sequence in self._waiting), "a waiting sequence holds tiles"
        for sequence in self._running.values():
            assert sequence.lease is not None
            assert sequence.num_pending >= 1, "a running sequence has nothing to compute"
            room = sequence.lease.num_tiles * self._tile_tokens
            assert sequence.num_computed <= room, "computed tokens without a tile"
            assert sequence.num_published == sequence.num_computed // self._tile_tokens, "full tiles are not published"

    def _admit(self) -> None:
        blocked: list[Sequence] = []
        for sequence in tuple(self._waiting):
            if len(self._running) == self.limits.max_batch_size:
                break
            if self._start(sequence):
                for other in blocked:
                    other.times_overtaken += 1
            else:
                blocked.append(sequence)
            most = self.limits.max_batch_size
            if len(blocked) == most or any(other.times_overtaken >= most for other in blocked):
                break

    def _start(self, sequence: Sequence) -> bool:
        shared = self.tiles.find(sequence.next_names(self._tile_tokens))
        lease = self.tiles.lease(sequence.max_pool_tokens, shared)
        if lease is None:
            return False
        self._waiting.remove(sequence)
        self._running[sequence.key] = sequence
        sequence.lease = lease
        self._cached(sequence, len(shared))
        return True

    def _take_over_tiles(self, sequence: Sequence) -> None:
        """Give a prefill the tiles that come next for it and that others have filled since it was admitted."""
        names = sequence.next_names(self._tile_tokens)
        if names:
            assert sequence.lease is not None
            shared = self.tiles.find(names)
            for tile in shared:
                self.tiles.share(sequence.lease, tile)
            self._cached(sequence, len(shared))

    def _cached(self, sequence: Sequence, num_tiles: int) -> None:
        """Count tiles as in the pool that others have computed and published."""
        tokens = num_tiles * self._tile_tokens
        sequence.num_published += num_tiles
        sequence.num_computed += tokens
        sequence.num_cached += tokens
        self.meters.cached_tokens += tokens

    def _share(self, prefills: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """Return the prefills that move in this step, and by how many tokens."""
        claims = [
            Claim(
                sequence.rank,
                sequence.num_pending,
                sequence.num_computed % self._tile_tokens,
                sequence.tile_names[sequence.num_published :],
                bool(sequence.next_names(self._tile_tokens)),
            )
            for sequence in prefills
        ]
        shares = share_budget(budget, claims, self._tile_tokens)
        return [(sequence, share) for sequence, share in zip(prefills, shares, strict=True) if share]

    def _advance(self, sequence: Sequence, count: int, now: int) -> Advance:
        lease, start = sequence.lease, sequence.num_computed
        assert lease is not None
        end = start + count
        self.tiles.extend(lease, end)
        if not sequence.first_scheduled_ns:
            sequence.first_scheduled_ns = now
            self.meters.queue_ms.observe((now - sequence.arrival_ns) / 1e6)
        tokens = sequence.tokens
        if end < len(tokens):
            return Advance(sequence.key, tokens[start:end], start, lease.tiles, None, sequence.num_output)
        plan = sequence.plan
        recent = tuple(tokens[-plan.recent_tokens :]) if plan.recent_tokens else ()
        counted = sequence.counts.snapshot() if sequence.counts else None
        return Advance(
            sequence.key, tokens[start:end], start, lease.tiles, plan, sequence.num_output, recent, counted
        )  # fmt: skip

    def _take_step(self, number: int) -> Step:
        step, self._step = self._step, None
        assert step is not None, "no step is pending"
        assert step.number == number, f"step {step.number} is pending, not {number}"
        return step

    def _computed(self, sequence: Sequence, count: int) -> None:
        """Count tokens as in the pool, and publish the tiles that they fill."""
        if sequence.num_computed < sequence.num_prompt:
            self.meters.prefilled_tokens += count
        sequence.num_computed += count
        full = sequence.num_computed // self._tile_tokens
        if full > sequence.num_published:
            assert sequence.lease is not None
            sequence.name_tiles(self._tile_tokens)
            for index in range(sequence.num_published, full):
                self.tiles.publish(int(sequence.lease.table[index]), sequence.tile_names[index])
            sequence.num_published = full

    def _drawn(self, sequence: Sequence, token: int, logprob: tuple[float, ...], now: int) -> TokenEvent:
        sequence.tokens.append(token)
        if sequence.counts:
            sequence.counts.add(token)
        if sequence.first_token_ns:
            self.meters.itl_ms.observe((now - sequence.last_token_ns) / 1e6)
        else:
            sequence.first_token_ns = now
            self.meters.ttft_ms.observe((now - sequence.arrival_ns) / 1e6)
        sequence.last_token_ns = now
        self.meters.generated_tokens += 1
        text, reason = sequence.answer.push(token)
        if reason:
            self._retire(sequence, reason)
        return sequence.event((token,), text, reason, "", logprob)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str) -> TokenEvent:
        if reason is FinishReason.ERROR and sequence.lease is not None:
            # What a failed request left in its tiles is not trusted: nobody shall share it.
            self.tiles.unpublish(sequence.lease)
        self._retire(sequence, reason)
        return sequence.event(reason=reason, error=error)

    def _retire(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.lease is None:
            self._waiting.remove(sequence)
        else:
            del self._running[sequence.key]
            self.tiles.release(sequence.lease)
            sequence.lease = None
        self._admission_may_succeed = True
        self.meters.finished[reason] += 1
        self.meters.request_ms.observe((self._clock() - sequence.arrival_ns) / 1e6)
