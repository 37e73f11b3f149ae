"""The thread that serves: requests come in from any thread, steps run, events go out."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from sits_trt.contract import EngineLimits
from sits_trt.errors import EngineDead, RequestError
from sits_trt.runtime.batch import build_inputs
from sits_trt.runtime.detokenizer import Decoding, Detokenizer
from sits_trt.runtime.request import FinishReason, Request, TokenEvent
from sits_trt.runtime.runners.base import RowsFailed, Runner
from sits_trt.runtime.sampler import Draw, sample
from sits_trt.runtime.scheduler import Scheduler
from sits_trt.runtime.sequence import Sequence
from sits_trt.runtime.stats import ExecutorStats, Meters
from sits_trt.spec import TileSpec

logger = logging.getLogger(__name__)

OnEvent = Callable[[TokenEvent], None]

IDLE_CHECK_S = 0.05
"""Quiet time after which the idle loop recounts the tiles."""


class Handle:
    """One submitted request, for its caller."""

    def __init__(self, executor: Executor, key: int, request_id: str) -> None:
        self.key = key
        self.request_id = request_id
        self._executor = executor

    def cancel(self) -> None:
        """End the request soon; its last event says `cancelled`. Does nothing once it has ended. From any thread."""
        self._executor._cancel(self.key)


@dataclass(slots=True)
class _Client:
    sequence: Sequence
    on_event: OnEvent


class Executor:
    """Serves requests with one runner until `shutdown`, or until the runner fails for all of them.

    `submit` and `Handle.cancel` may be called from any thread, from within a callback too. Every submitted request
    gets any number of events and then exactly one with a finish_reason. Events are delivered by the executor's
    thread: a callback that blocks holds up everybody, one that raises ends its own request only.

    max_queue_size: requests that may wait beside those that the next step can admit; 0 is no bound.
    queue_timeout_ms: longest wait for a first step where the request names none; 0 is no bound.
    tokenizer: makes the events' texts; without one they are empty and stop strings are refused.
    description: which runner this is and why, for people.
    draw: draws tokens from the runner's logits; None is torch.
    """

    def __init__(
        self,
        runner: Runner,
        tile: TileSpec,
        limits: EngineLimits,
        *,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Decoding | None = None,
        byte_token_ids: frozenset[int] = frozenset(),
        max_queue_size: int = 0,
        queue_timeout_ms: int = 0,
        description: str = "",
        draw: Draw | None = None,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.description = description
        self._runner = runner
        self._draw = draw
        self._tile_tokens = tile.tile_tokens
        self._eos_token_ids = eos_token_ids
        self._byte_token_ids = byte_token_ids
        self._max_queue_size = max_queue_size
        self._queue_timeout_ms = queue_timeout_ms
        self._meters = Meters()
        self._scheduler = Scheduler(tile, limits, runner.num_tiles, self._meters)
        self._keys = itertools.count(1)
        self._thread: threading.Thread | None = None
        # Everything below is shared between threads and touched under this lock only.
        self._changed = threading.Condition()
        self._clients: dict[int, _Client] = {}
        self._arrivals: list[Sequence] = []
        self._cancels: list[int] = []
        self._num_waiting = 0
        self._open_places = limits.max_batch_size
        self._num_rejected = 0
        self._stopping = False
        self._ended = ""

    # --- the callers' side -------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_seq_tokens(self) -> int:
        """Prompt plus max_tokens of the largest request that this executor serves."""
        return self._scheduler.max_seq_tokens

    def submit(self, request: Request, on_event: OnEvent) -> Handle:
        """Queue a request; its events go to `on_event`.

        Raises RequestError when the request can never be served or the queue is full, EngineDead when the executor
        serves nobody any more. Nothing is queued then.
        """
        try:
            sequence = self._sequence(request)
            with self._changed:
                if self._ended:
                    raise EngineDead(self._ended)
                if self._max_queue_size and self._num_waiting >= self._max_queue_size + self._open_places:
                    raise RequestError(
                        f"the queue is full: {self._num_waiting} requests wait and serving.max_queue_size is "
                        f"{self._max_queue_size}; send it again later"
                    )
                self._clients[sequence.key] = _Client(sequence, on_event)
                self._arrivals.append(sequence)
                self._num_waiting += 1
                self._changed.notify()
        except RequestError:
            with self._changed:
                self._num_rejected += 1
            raise
        return Handle(self, sequence.key, request.request_id)

    def stream(self, request: Request) -> Iterator[TokenEvent]:
        """Submit a request and yield its events up to the last. Closing the iterator early cancels the request."""
        events: SimpleQueue[TokenEvent] = SimpleQueue()
        handle = self.submit(request, events.put)
        try:
            while True:
                event = events.get()
                yield event
                if event.finish_reason:
                    return
        finally:
            handle.cancel()

    def stats(self) -> ExecutorStats:
        """Return counts and times of now. From any thread."""
        meters, tiles = self._meters, self._scheduler.tiles
        with self._changed:
            waiting, rejected, error = self._num_waiting, self._num_rejected, self._ended
        finished = meters.finished
        return ExecutorStats(
            running=0 if error else self._scheduler.num_running,
            waiting=waiting,
            num_tiles=tiles.num_tiles,
            pool_bytes=tiles.num_tiles * tiles.tile.tile_bytes,
            free_tiles=tiles.free_tiles,
            kept_tiles=tiles.kept_tiles,
            steps=meters.steps,
            prefilled_tokens=meters.prefilled_tokens,
            generated_tokens=meters.generated_tokens,
            cached_tokens=meters.cached_tokens,
            stopped=finished[FinishReason.STOP] + finished[FinishReason.LENGTH],
            cancelled=finished[FinishReason.CANCELLED],
            failed=finished[FinishReason.ERROR],
            timed_out=meters.timed_out,
            rejected=rejected,
            queue_ms=meters.queue_ms.snapshot(),
            ttft_ms=meters.ttft_ms.snapshot(),
            itl_ms=meters.itl_ms.snapshot(),
            request_ms=meters.request_ms.snapshot(),
            step_ms=meters.step_ms.snapshot(),
            runner_ms=meters.runner_ms.snapshot(),
            error=error,
        )

    def start(self) -> None:
        """Start serving. What was submitted before is served too."""
        assert self._thread is None, "an executor starts once"
        self._thread = threading.Thread(target=self._serve, name="sits-executor", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """Stop after the step that is running. Every request that has not ended gets its last event, `cancelled`.

        Returns when that is done, except in a callback: then it is done soon after the callback returns.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is None:
            self._end(FinishReason.CANCELLED, "the executor is shut down")
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.shutdown()

    def _sequence(self, request: Request) -> Sequence:
        request.validate(self.vocab_size, self.max_seq_tokens)
        if request.sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this executor has none; use stop_token_ids")
        timeout_ms = request.queue_timeout_ms or self._queue_timeout_ms
        return Sequence(
            next(self._keys),
            request,
            self.vocab_size,
            self._eos_token_ids,
            Detokenizer(self.tokenizer, self._byte_token_ids) if self.tokenizer else None,
            self._tile_tokens,
            time.monotonic_ns(),
            timeout_ms * 1_000_000,
        )

    def _cancel(self, key: int) -> None:
        with self._changed:
            if key in self._clients:
                self._cancels.append(key)
                self._changed.notify()

    # --- the executor's thread ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._take_in():
                self._turn()
        # Whatever went wrong, every caller must hear of it; the log keeps the traceback.
        except BaseException as error:
            logger.exception("the executor stops")
            self._end(FinishReason.ERROR, f"the engine failed and serves nobody any more: {error}")
        else:
            self._end(FinishReason.CANCELLED, "the executor is shut down")
        finally:
            self._runner.close()

    def _take_in(self) -> bool:
        """Move arrivals and cancels to the scheduler, waiting for some when idle; False when it is time to stop."""
        with self._changed:
            if not self._wait_for_work(IDLE_CHECK_S):
                # Nothing came for a while: recount. The wait after it has no end.
                self._scheduler.check()
                self._wait_for_work(None)
            if self._stopping:
                return False
            arrivals, self._arrivals = self._arrivals, []
            cancels, self._cancels = self._cancels, []
        for sequence in arrivals:
            self._scheduler.add(sequence)
        for key in cancels:
            self._deliver(self._scheduler.abort(key))
        for event in self._scheduler.expire():
            self._deliver(event)
        return True

    def _wait_for_work(self, timeout_s: float | None) -> bool:
        return self._changed.wait_for(
            lambda: bool(self._stopping or self._arrivals or self._cancels or self._scheduler.busy), timeout_s
        )

    def _turn(self) -> None:
        """Run one step and deliver what comes of it."""
        began = time.monotonic_ns()
        step = self._scheduler.schedule()
        with self._changed:
            waiting = self._scheduler.num_waiting
            self._num_waiting = waiting + len(self._arrivals)
            self._open_places = 0 if waiting else self.limits.max_batch_size - self._scheduler.num_running
        if not step.advances:
            assert not self._scheduler.busy, "requests wait and nothing can be scheduled"
            self._scheduler.discard(step.number)
            return
        inputs = build_inputs(step)
        handed_over = time.monotonic_ns()
        try:
            logits = self._runner.run(inputs)
        except RowsFailed as failure:
            self._scheduler.discard(step.number)
            for row, error in failure.rows.items():
                self._deliver(self._scheduler.abort(step.advances[row].key, FinishReason.ERROR, error))
            return
        result = sample(step, logits, self._draw)
        self._meters.runner_ms.observe((time.monotonic_ns() - handed_over) / 1e6)
        for event in self._scheduler.apply(result):
            self._deliver(event)
        self._meters.step_ms.observe((time.monotonic_ns() - began) / 1e6)

    def _deliver(self, event: TokenEvent | None) -> None:
        """Hand an event to its caller. A caller that fails loses its own request and nothing else."""
        if event is None:
            return
        with self._changed:
            client = self._clients.get(event.key)
            if event.finish_reason:
                self._clients.pop(event.key, None)
        if client is None:
            return
        try:
            client.on_event(event)
        # The callback is foreign code: its error, a sys.exit included, is logged and must not reach the others.
        except BaseException:
            logger.exception("the receiver of request '%s' failed", event.request_id)
            if not event.finish_reason:
                self._deliver(
                    self._scheduler.abort(event.key, FinishReason.ERROR, "the receiver of its events failed")
                )  # fmt: skip

    def _end(self, reason: FinishReason, why: str) -> None:
        """Serve nobody any more: refuse new requests and send every open one its last event."""
        with self._changed:
            self._ended = self._ended or why
            open_clients = list(self._clients.values())
            self._arrivals.clear()
            self._num_waiting = 0
        for client in open_clients:
            # After a failure the scheduler's state is not trusted; in order, it frees the tiles and counts.
            trusted = reason is FinishReason.CANCELLED
            event = self._scheduler.abort(client.sequence.key, reason, why) if trusted else None
            if event is None:
                event = client.sequence.event(reason=reason, error=why)
                self._meters.finished[reason] += 1
            self._deliver(event)
