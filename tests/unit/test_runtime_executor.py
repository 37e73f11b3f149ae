"""The executor's thread, with a runner that needs no model."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from sits_trt.contract import EngineLimits
from sits_trt.errors import EngineDead, RequestError
from sits_trt.runtime.executor import Executor, Handle
from sits_trt.runtime.request import FinishReason, Request, TokenEvent
from sits_trt.runtime.runners.base import RowsFailed
from sits_trt.runtime.runners.null import NullRunner, null_answer
from sits_trt.runtime.step import StepInputs
from tests.support.runtime import TILE, VOCAB, Inbox, limits, prompt, request

EOS = null_answer(prompt(9), 5, VOCAB)[4]
"""The fifth token of one prompt's answer, taken as the end of sequence."""


class Gate(NullRunner):
    """A null runner that waits before each step while it is closed, and that can be made to fail."""

    def __init__(self, num_tiles: int, step_ms: float = 0.0) -> None:
        super().__init__(TILE, num_tiles, VOCAB, step_ms)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.fail: Callable[[StepInputs], None] = lambda inputs: None

    def run(self, inputs: StepInputs) -> torch.Tensor:
        self.entered.set()
        assert self.open.wait(20)
        self.fail(inputs)
        return super().run(inputs)


@contextmanager
def serving(
    bounds: EngineLimits | None = None, step_ms: float = 0.0, **settings: object
) -> Iterator[tuple[Executor, Gate]]:
    bounds = bounds or limits()
    runner = Gate(bounds.num_tiles, step_ms)
    executor = Executor(runner, TILE, bounds, **settings)  # type: ignore[arg-type]
    executor.start()
    try:
        yield executor, runner
    finally:
        runner.open.set()
        executor.shutdown()


def ask(executor: Executor, wanted: Request) -> Inbox:
    inbox = Inbox()
    executor.submit(wanted, inbox)
    return inbox


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def finals(inbox: Inbox) -> list[FinishReason]:
    return [event.finish_reason for event in inbox.events if event.finish_reason]


def test_tokens_come_from_the_draw_that_it_is_given() -> None:
    with serving(draw=lambda logits, settings: logits.argmin(-1)) as (executor, _):
        # Every logit but one is 0.
        assert set(ask(executor, request(prompt(9), 5)).result().token_ids) <= {0, 1}


def test_sixty_four_requests_of_all_lengths_get_their_own_tokens() -> None:
    rng = random.Random(3)
    with serving(limits(batch=16, step_tokens=128, tiles=128)) as (executor, _):
        asked = []
        for n in range(64):
            ids, count = prompt(rng.randrange(1, 150), n), rng.randrange(1, 60)
            asked.append((ids, count, ask(executor, request(ids, count))))
        for ids, count, inbox in asked:
            event = inbox.result()
            assert list(event.token_ids) == null_answer(ids, count, VOCAB)
            assert (event.prompt_tokens, event.output_tokens) == (len(ids), count)
            assert finals(inbox) == [FinishReason.LENGTH]
            assert inbox.events[-1].finish_reason, "nothing follows the last event"
        stats = executor.stats()
    assert (stats.running, stats.waiting, stats.free_tiles, stats.stopped) == (0, 0, 128, 64)
    assert stats.generated_tokens == sum(count for _, count, _ in asked)
    assert stats.prefilled_tokens + stats.cached_tokens == sum(len(ids) for ids, _, _ in asked)
    assert stats.ttft_ms.count == stats.request_ms.count == 64
    assert stats.itl_ms.count == stats.generated_tokens - 64


def test_b38_every_way_to_end_has_exactly_one_marker() -> None:
    with serving(step_ms=1, eos_token_ids=(EOS,)) as (executor, runner):
        cancelled = Inbox()
        # Ignoring the end of sequence, so that only the cancel ends it.
        handle = executor.submit(request(prompt(4), 200, ignore_eos=True), cancelled)

        def forced(inputs: StepInputs) -> None:
            rows = [row for row, start in enumerate(inputs.query_starts[:-1]) if inputs.input_ids[start] == 77]
            if rows:
                raise RowsFailed(dict.fromkeys(rows, "forced"))

        runner.fail = forced
        failed = ask(executor, request((77, *prompt(5)), 9))
        stopped = ask(executor, request(prompt(9), 50))
        length = ask(executor, request(prompt(9), 3))
        single = ask(executor, request(prompt(9), 1))
        assert cancelled.first.wait(10)
        handle.cancel()
        handle.cancel()
        expected = {
            FinishReason.CANCELLED: cancelled,
            FinishReason.ERROR: failed,
            FinishReason.STOP: stopped,
            FinishReason.LENGTH: length,
        }
        for reason, inbox in expected.items():
            assert inbox.result().finish_reason is reason
        assert len(single.result().token_ids) == 1
        assert stopped.result().token_ids[-1] == EOS
        assert failed.result().error == "forced"
        until(lambda: executor.stats().running == 0)
        for inbox in (*expected.values(), single):
            assert len(finals(inbox)) == 1
            assert inbox.events[-1].finish_reason


@pytest.mark.parametrize("names", [["1"] * 8, ["", ""] * 4, ["1", "01", "1 ", "one"] * 2])
def test_b41_equal_request_ids_do_not_collide(names: Sequence[str]) -> None:
    with serving() as (executor, _):
        inboxes = [ask(executor, request(prompt(20, n), 9, name)) for n, name in enumerate(names)]
        for n, (name, inbox) in enumerate(zip(names, inboxes, strict=True)):
            event = inbox.result()
            assert event.request_id == name
            assert list(event.token_ids) == null_answer(prompt(20, n), 9, VOCAB)
            assert len(finals(inbox)) == 1


@pytest.mark.parametrize("length", [63, 64, 65, 5000])
def test_b30_a_prompt_that_is_too_long_is_refused_at_the_door(length: int) -> None:
    with serving(limits(seq_tokens=64)) as (executor, _):
        if length < 64:
            assert len(ask(executor, request(prompt(length), 1)).result().token_ids) == 1
        else:
            with pytest.raises(RequestError, match=rf"{length} tokens.* 64 tokens"):
                executor.submit(request(prompt(length), 1), Inbox())
            assert executor.stats().rejected == 1
        assert list(ask(executor, request(prompt(3), 4)).result().token_ids) == null_answer(prompt(3), 4, VOCAB)


def test_b31_bad_sampling_is_refused_and_the_others_live() -> None:
    with serving() as (executor, _):
        for sampling in ({"top_p": 1.5}, {"temperature": float("nan")}, {"stop": ("x",)}):
            with pytest.raises(RequestError):
                executor.submit(request(prompt(3), 4, **sampling), Inbox())
        with pytest.raises(RequestError, match="max_tokens is 0"):
            executor.submit(request(prompt(3), 0), Inbox())
        assert executor.stats().rejected == 4
        assert len(ask(executor, request(prompt(3), 4, top_k=100000)).result().token_ids) == 4


def test_cancelled_requests_free_their_tiles_and_leave_the_others_alone() -> None:
    with serving(limits(batch=8, tiles=64), step_ms=1) as (executor, _):
        survivor = ask(executor, request(prompt(30), 80))
        handles: list[Handle] = []
        inboxes = []
        for n in range(20):
            inboxes.append(Inbox())
            handles.append(executor.submit(request(prompt(25, n), 100), inboxes[-1]))
        for inbox in inboxes[:7]:
            assert inbox.first.wait(10)
        for handle in handles:
            handle.cancel()
        assert {inbox.result().finish_reason for inbox in inboxes} == {FinishReason.CANCELLED}
        # The survivor alone holds tiles now.
        assert executor.stats().free_tiles >= 64 - TILE.tiles_for(110)
        assert list(survivor.result().token_ids) == null_answer(prompt(30), 80, VOCAB)
        until(lambda: executor.stats().running == 0)
        stats = executor.stats()
        assert (stats.free_tiles, stats.waiting, stats.cancelled) == (64, 0, 20)
        executor._scheduler.check()


def test_a_later_short_request_ends_before_an_earlier_long_one() -> None:
    with serving(limits(step_tokens=16, seq_tokens=1024, tiles=128), step_ms=1) as (executor, runner):
        runner.open.clear()
        order: list[str] = []
        inboxes = {name: Inbox() for name in ("long", "short")}

        def note(event: TokenEvent) -> None:
            inboxes[event.request_id](event)
            if event.finish_reason:
                order.append(event.request_id)

        executor.submit(request(prompt(900), 10, "long"), note)
        assert runner.entered.wait(10)
        executor.submit(request(prompt(10), 10, "short"), note)
        runner.open.set()
        for name, ids in (("long", prompt(900)), ("short", prompt(10))):
            assert list(inboxes[name].result().token_ids) == null_answer(ids, 10, VOCAB)
    assert order == ["short", "long"]


def test_the_queue_takes_what_the_next_step_admits_and_its_own_size() -> None:
    with serving(limits(batch=2), max_queue_size=3) as (executor, runner):
        runner.open.clear()
        running = [ask(executor, request(prompt(4, n), 2)) for n in range(2)]
        assert runner.entered.wait(10)
        # The second one is in the step that is held up, or has the place that is open in the next.
        waiting = [ask(executor, request(prompt(4, n), 2)) for n in range(3)]
        with pytest.raises(RequestError, match=r"queue is full.*max_queue_size is 3"):
            ask(executor, request(prompt(4), 2))
        assert executor.stats().rejected == 1
        runner.open.set()
        for inbox in running + waiting:
            assert inbox.result().finish_reason is FinishReason.LENGTH
        assert ask(executor, request(prompt(4), 2)).result().finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("own", [True, False])
def test_waiting_longer_than_the_queue_timeout_is_an_error(own: bool) -> None:
    with serving(limits(batch=1), step_ms=5, queue_timeout_ms=0 if own else 20) as (executor, _):
        running = ask(executor, request(prompt(4), 30))
        assert running.first.wait(10)
        late = ask(executor, Request("", prompt(4), request(prompt(4)).sampling, queue_timeout_ms=20 if own else 0))
        event = late.result()
        assert (event.finish_reason, event.token_ids) == (FinishReason.ERROR, ())
        assert "queue timeout of 20 ms" in event.error
        assert len(running.result().token_ids) == 30
        assert executor.stats().timed_out == 1


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3)])
def test_a_receiver_that_fails_loses_its_own_request_only(error: BaseException) -> None:
    with serving() as (executor, _):
        seen: list[TokenEvent] = []

        def broken(event: TokenEvent) -> None:
            seen.append(event)
            if len(seen) == 2 or event.finish_reason:
                raise error

        executor.submit(request(prompt(5), 50), broken)
        other = ask(executor, request(prompt(6), 50))
        assert list(other.result().token_ids) == null_answer(prompt(6), 50, VOCAB)
        until(lambda: executor.stats().running == 0)
        assert len(seen) == 3
        assert seen[-1].finish_reason is FinishReason.ERROR
        assert executor.stats().free_tiles == 64


def test_a_receiver_may_submit_cancel_and_shut_down() -> None:
    with serving() as (executor, _):
        inbox, child = Inbox(), Inbox()
        handles: list[Handle] = []

        def busy(event: TokenEvent) -> None:
            inbox(event)
            if event.output_tokens == 2 and not event.finish_reason:
                executor.submit(request(prompt(7), 3), child)
                handles[0].cancel()

        handles.append(executor.submit(request(prompt(5), 200), busy))
        assert inbox.result().finish_reason is FinishReason.CANCELLED
        assert list(child.result().token_ids) == null_answer(prompt(7), 3, VOCAB)
        last = Inbox()

        def closing(event: TokenEvent) -> None:
            last(event)
            executor.shutdown()

        executor.submit(request(prompt(5), 200), closing)
        assert last.result().finish_reason is FinishReason.CANCELLED


def test_a_runner_that_fails_for_some_rows_ends_those_only() -> None:
    with serving() as (executor, runner):

        def poisoned(inputs: StepInputs) -> None:
            bad = [row for row, at in enumerate(inputs.query_starts[1:] - 1) if inputs.input_ids[at] == 50]
            if bad:
                raise RowsFailed(dict.fromkeys(bad, "token 50 is not to my taste"))

        runner.fail = poisoned
        prompts = [tuple(51 if token == 50 else token for token in prompt(20, n)) for n in range(12)]
        inboxes = [ask(executor, request(ids, 40)) for ids in prompts]
        ended = [inbox.result() for inbox in inboxes]
        for ids, event in zip(prompts, ended, strict=True):
            answer = null_answer(ids, 40, VOCAB)
            if event.finish_reason is FinishReason.ERROR:
                assert event.error == "token 50 is not to my taste"
                answer = answer[: answer.index(50) + 1]
            assert list(event.token_ids) == answer
        assert 0 < sum(event.finish_reason is FinishReason.ERROR for event in ended) < 12
        assert executor.stats().error == ""
        executor._scheduler.check()


def test_a_runner_that_fails_ends_all_and_later_submits_are_refused_at_once() -> None:
    with serving(limits(batch=2)) as (executor, runner):
        runner.open.clear()
        inboxes = [ask(executor, request(prompt(5, n), 50)) for n in range(5)]

        def lost(inputs: StepInputs) -> None:
            raise RuntimeError("the device is lost")

        runner.fail = lost
        runner.open.set()
        for inbox in inboxes:
            event = inbox.result()
            assert event.finish_reason is FinishReason.ERROR
            assert "the device is lost" in event.error
            assert len(finals(inbox)) == 1
        until(lambda: bool(executor.stats().error))
        with pytest.raises(EngineDead, match="the device is lost"):
            executor.submit(request(prompt(5)), Inbox())
        stats = executor.stats()
        assert (stats.running, stats.waiting, stats.failed) == (0, 0, 5)


def test_a_broken_account_of_tiles_is_found_while_idle() -> None:
    with serving() as (executor, _):
        assert ask(executor, request(prompt(5), 3)).result().finish_reason is FinishReason.LENGTH
        executor._scheduler.tiles._free.pop()
        until(lambda: "tile" in executor.stats().error)


def test_shutdown_ends_every_request_and_can_be_repeated() -> None:
    with serving(limits(batch=2), step_ms=1) as (executor, _):
        inboxes = [ask(executor, request(prompt(5, n), 200)) for n in range(6)]
        assert inboxes[0].first.wait(10)
        executor.shutdown()
        for inbox in inboxes:
            assert finals(inbox) == [FinishReason.CANCELLED]
            assert "shut down" in inbox.events[-1].error
        executor.shutdown()
        with pytest.raises(EngineDead, match="shut down"):
            executor.submit(request(prompt(5)), Inbox())
        stats = executor.stats()
        assert (stats.running, stats.waiting, stats.free_tiles) == (0, 0, 64)


def test_shutdown_before_the_start_ends_what_was_submitted() -> None:
    executor = Executor(NullRunner(TILE, 64, VOCAB), TILE, limits())
    inbox = ask(executor, request(prompt(5), 3))
    executor.shutdown()
    assert finals(inbox) == [FinishReason.CANCELLED]


def test_a_stream_that_is_closed_early_is_cancelled() -> None:
    with serving(step_ms=1) as (executor, _):
        stream = executor.stream(request(prompt(5), 200))
        assert next(stream).token_ids == tuple(null_answer(prompt(5), 1, VOCAB))
        stream.close()
        until(lambda: executor.stats().cancelled == 1)
        tokens = [token for event in executor.stream(request(prompt(5), 7)) for token in event.token_ids]
        assert tokens == null_answer(prompt(5), 7, VOCAB)


def test_many_threads_submit_and_cancel_at_will() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with serving(limits(batch=6, step_tokens=40, tiles=40), max_queue_size=30) as (executor, _):
            asked: list[tuple[tuple[int, ...], int, Inbox]] = []

            def client(seed: int) -> None:
                rng = random.Random(seed)
                for n in range(15):
                    ids, count = prompt(rng.randrange(1, 80), n % 4), rng.randrange(1, 40)
                    inbox = Inbox()
                    try:
                        handle = executor.submit(request(ids, count), inbox)
                    except RequestError:
                        time.sleep(0.005)
                        continue
                    asked.append((ids, count, inbox))
                    if rng.random() < 0.4:
                        time.sleep(rng.random() * 0.004)
                        handle.cancel()

            threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for ids, count, inbox in asked:
                event = inbox.result()
                answer = null_answer(ids, count, VOCAB)
                assert len(finals(inbox)) == 1
                assert list(event.token_ids) == answer[: len(event.token_ids)]
                if event.finish_reason is FinishReason.LENGTH:
                    assert list(event.token_ids) == answer
                else:
                    assert event.finish_reason is FinishReason.CANCELLED
            until(lambda: executor.stats().running == 0)
            executor._scheduler.check()
            stats = executor.stats()
            assert stats.stopped + stats.cancelled == len(asked)
            assert stats.rejected == 8 * 15 - len(asked)
            assert stats.free_tiles == 40
    finally:
        sys.setswitchinterval(interval)
