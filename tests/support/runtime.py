"""Drives a scheduler and a null runner by hand, and collects what an executor sends."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

from sits_trt.contract import EngineLimits
from sits_trt.runtime.batch import build_inputs
from sits_trt.runtime.request import FinishReason, Request, SamplingParams, TokenEvent, join_events
from sits_trt.runtime.runners.null import NullRunner
from sits_trt.runtime.sampler import sample
from sits_trt.runtime.scheduler import Scheduler
from sits_trt.runtime.sequence import Sequence
from sits_trt.runtime.step import Step
from sits_trt.spec import TileSpec

VOCAB = 97
TILE = TileSpec(num_layers=2, num_kv_heads=2, head_dim=16, tile_tokens=16)


def limits(batch: int = 4, step_tokens: int = 64, seq_tokens: int = 256, tiles: int = 64) -> EngineLimits:
    return EngineLimits(batch, step_tokens, seq_tokens, tiles)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return `length` random token ids."""
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(VOCAB) for _ in range(length))


def request(
    ids: tuple[int, ...], max_tokens: int = 8, name: str = "", priority: int = 0, **sampling: object
) -> Request:
    return Request(name, ids, SamplingParams(max_tokens, **sampling), priority)  # type: ignore[arg-type]


@dataclass
class Workbench:
    """A scheduler whose steps a null runner computes, with a clock that stands still unless it is moved."""

    limits: EngineLimits = field(default_factory=limits)
    now_ns: int = 1_000_000
    events: dict[int, list[TokenEvent]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(TILE, self.limits, self.limits.num_tiles, clock=lambda: self.now_ns)
        self.runner = NullRunner(TILE, self.limits.num_tiles, VOCAB)
        self._next_key = 0

    def add(self, wanted: Request, timeout_ms: int = 0) -> int:
        key, self._next_key = self._next_key, self._next_key + 1
        wanted.validate(VOCAB, self.scheduler.max_seq_tokens)
        self.scheduler.add(
            Sequence(key, wanted, VOCAB, (), None, TILE.tile_tokens, self.now_ns, timeout_ms * 1_000_000)
        )
        self.events[key] = []
        return key

    def abort(self, key: int) -> None:
        event = self.scheduler.abort(key)
        if event:
            self.events[key].append(event)

    def step(self) -> Step:
        """Run one step, recount everything, and return the step."""
        step = self.scheduler.schedule()
        if step.advances:
            assert step.num_tokens <= self.limits.max_tokens_per_step
            events = self.scheduler.apply(sample(step, self.runner.run(build_inputs(step))))
            for event in events:
                self.events[event.key].append(event)
            self.steps.append(step)
        else:
            self.scheduler.discard(step.number)
        self.scheduler.check()
        return step

    def finish(self) -> None:
        """Run steps until nothing is left to do."""
        while self.scheduler.busy:
            assert self.step().advances, "the scheduler is busy and schedules nothing"

    def tokens(self, key: int) -> list[int]:
        return list(join_events(self.events[key]).token_ids) if self.events[key] else []

    def reason(self, key: int) -> FinishReason | None:
        finals = [event.finish_reason for event in self.events[key] if event.finish_reason]
        assert len(finals) <= 1
        assert not finals or self.events[key][-1].finish_reason, "an event follows the last one"
        return finals[0] if finals else None


class Inbox:
    """The events of one request, as its caller sees them."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.first = threading.Event()
        self.ended = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.first.set()
        if event.finish_reason:
            self.ended.set()

    def result(self, timeout_s: float = 30) -> TokenEvent:
        """Wait for the end and return all events joined to one."""
        assert self.ended.wait(timeout_s), "no last event came"
        return join_events(self.events)
