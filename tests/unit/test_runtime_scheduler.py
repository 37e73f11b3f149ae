import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sits_trt.runtime.request import FinishReason
from sits_trt.runtime.runners.null import null_answer
from sits_trt.runtime.step import StepResult
from tests.support.runtime import VOCAB, Workbench, limits, prompt, request


def test_one_request_runs_from_prompt_to_length() -> None:
    bench = Workbench(limits(step_tokens=16))
    ids = prompt(40)
    key = bench.add(request(ids, 5))
    bench.finish()
    assert bench.tokens(key) == null_answer(ids, 5, VOCAB)
    assert bench.reason(key) is FinishReason.LENGTH
    # Three chunks of the prompt, then one token a step; the last token is drawn and not computed.
    assert [step.num_tokens for step in bench.steps] == [16, 16, 8, 1, 1, 1, 1]
    last = bench.events[key][-1]
    assert (last.prompt_tokens, last.output_tokens, last.cached_tokens) == (40, 5, 0)


def test_answers_in_progress_move_in_every_step_of_a_long_prefill() -> None:
    bench = Workbench(limits(step_tokens=20))
    quick = [bench.add(request(prompt(4, seed), 30)) for seed in range(2)]
    bench.step()
    long = bench.add(request(prompt(200), 1))
    while not bench.tokens(long):
        before = [len(bench.tokens(key)) for key in quick]
        bench.step()
        assert [len(bench.tokens(key)) for key in quick] == [count + 1 for count in before]
    assert bench.steps[2].num_tokens == 20


def test_a_later_short_request_overtakes_an_earlier_long_one() -> None:
    bench = Workbench(limits(step_tokens=32))
    long = bench.add(request(prompt(200), 4))
    bench.step()
    short = bench.add(request(prompt(10), 4))
    bench.step()
    assert len(bench.tokens(short)) == 1, "its first token comes in the very next step"
    while bench.reason(short) is None:
        bench.step()
    assert not bench.tokens(long)
    bench.finish()
    assert bench.tokens(long) == null_answer(prompt(200), 4, VOCAB)


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    bench = Workbench(limits(batch=4, step_tokens=32))
    long = bench.add(request(prompt(220), 1))
    steps = 0
    while not bench.tokens(long):
        if bench.scheduler.num_running + bench.scheduler.num_waiting < 4:
            bench.add(request(prompt(20, steps), 1))
        bench.step()
        steps += 1
    # Alone it takes 7 steps of 32 tokens; it keeps at least half of each.
    assert steps <= 14


def test_priority_then_arrival_decide_who_starts() -> None:
    bench = Workbench(limits(batch=1))
    keys = [bench.add(request(prompt(4, n), 1, priority=priority)) for n, priority in enumerate((0, 5, 0, 5))]
    bench.finish()
    started = [step.advances[0].key for step in bench.steps]
    assert started == [keys[1], keys[3], keys[0], keys[2]]


def test_nothing_starts_that_could_not_finish() -> None:
    bench = Workbench(limits(tiles=4, step_tokens=64))
    first = bench.add(request(prompt(20), 29))  # 48 tokens in the pool: 3 tiles
    second = bench.add(request(prompt(20, 1), 13))  # 32 tokens: 2 tiles, one is left
    third = bench.add(request(prompt(10, 2), 7))  # 16 tokens: 1 tile, and may pass the second
    bench.step()
    assert {advance.key for advance in bench.steps[-1].advances} == {first, third}
    while bench.reason(first) is None:
        assert bench.scheduler.num_waiting == 1 or bench.tokens(second)
        bench.step()
    bench.finish()
    for key, ids, count in ((first, prompt(20), 29), (second, prompt(20, 1), 13), (third, prompt(10, 2), 7)):
        assert bench.tokens(key) == null_answer(ids, count, VOCAB)


def test_a_large_request_is_overtaken_by_one_batch_at_most() -> None:
    bench = Workbench(limits(batch=3, tiles=6, step_tokens=64))
    running = bench.add(request(prompt(33), 16))  # 3 tiles of 6
    bench.step()
    large = bench.add(request(prompt(80), 2))  # all 6 tiles: waits for the running one
    passed = 0
    for n in range(40):
        bench.add(request(prompt(5, n), 1))
    while not bench.tokens(large):
        passed += sum(1 for advance in bench.step().advances if advance.key not in (running, large))
    assert passed == 3
    bench.finish()
    assert bench.tokens(large) == null_answer(prompt(80), 2, VOCAB)


def test_behind_a_batch_of_requests_that_do_not_fit_nobody_is_looked_at() -> None:
    bench = Workbench(limits(batch=3, tiles=6, step_tokens=64))
    running = bench.add(request(prompt(33), 16))  # 3 tiles of 6
    bench.step()
    for n in range(3):
        bench.add(request(prompt(60, n), 2))  # 4 tiles each
    short = bench.add(request(prompt(5), 1))
    bench.step()
    assert [advance.key for advance in bench.steps[-1].advances] == [running]
    bench.finish()
    assert bench.reason(short) is FinishReason.LENGTH


def test_common_beginnings_are_computed_once() -> None:
    bench = Workbench(limits())
    system = prompt(50, 7)
    first = bench.add(request(system + prompt(5, 1), 3))
    bench.finish()
    second = bench.add(request(system + prompt(9, 2), 3))
    bench.finish()
    assert bench.events[first][-1].cached_tokens == 0
    assert bench.events[second][-1].cached_tokens == 48
    assert bench.steps[3].num_tokens == 59 - 48
    assert bench.tokens(second) == null_answer(system + prompt(9, 2), 3, VOCAB)


def test_a_whole_prompt_in_the_cache_still_computes_its_last_tile() -> None:
    bench = Workbench(limits())
    for _ in range(2):
        key = bench.add(request(prompt(32), 2))
        bench.finish()
    assert bench.events[key][-1].cached_tokens == 16
    assert bench.tokens(key) == null_answer(prompt(32), 2, VOCAB)


def test_an_answer_is_cached_for_the_next_turn_of_a_talk() -> None:
    bench = Workbench(limits())
    key = bench.add(request(prompt(20), 30))
    bench.finish()
    talk = prompt(20) + tuple(bench.tokens(key))
    key = bench.add(request(talk + prompt(3, 1), 2))
    bench.finish()
    assert bench.events[key][-1].cached_tokens == 48


def test_a_burst_with_one_system_prompt_computes_it_once() -> None:
    bench = Workbench(limits(batch=8, step_tokens=64, tiles=128))
    system = prompt(160, 3)
    keys = [bench.add(request(system + prompt(8, n), 2)) for n in range(8)]
    bench.finish()
    assert bench.scheduler.meters.prefilled_tokens == 160 + 8 * 8
    assert bench.scheduler.meters.cached_tokens == 7 * 160
    for n, key in enumerate(keys):
        assert bench.tokens(key) == null_answer(system + prompt(8, n), 2, VOCAB)


def test_an_abort_frees_tiles_waiting_and_running() -> None:
    bench = Workbench(limits(batch=1, tiles=16))
    running, waiting = bench.add(request(prompt(40), 20)), bench.add(request(prompt(40, 1), 20))
    for _ in range(5):
        bench.step()
    for key in (waiting, running):
        bench.abort(key)
        bench.scheduler.check()
        assert bench.reason(key) is FinishReason.CANCELLED
    assert bench.scheduler.tiles.available_tiles == 16
    assert not bench.scheduler.busy
    assert bench.scheduler.abort(running) is None
    assert bench.scheduler.abort(99) is None


def test_an_abort_between_schedule_and_apply_loses_the_result_only_for_itself() -> None:
    bench = Workbench(limits())
    gone, stays = bench.add(request(prompt(4), 3)), bench.add(request(prompt(5), 3))
    step = bench.scheduler.schedule()
    bench.abort(gone)
    events = bench.scheduler.apply(StepResult(step.number, {gone: 1, stays: 2}))
    assert [event.key for event in events] == [stays]
    bench.scheduler.check()


def test_a_discarded_step_is_computed_again() -> None:
    bench = Workbench(limits(step_tokens=16))
    key = bench.add(request(prompt(30), 4))
    for _ in range(6):
        first = bench.scheduler.schedule()
        bench.scheduler.discard(first.number)
        bench.scheduler.check()
        again = bench.scheduler.schedule()
        assert [(a.key, list(a.token_ids), a.context_len) for a in again.advances] == [
            (a.key, list(a.token_ids), a.context_len) for a in first.advances
        ]
        bench.scheduler.discard(again.number)
        if bench.scheduler.busy:
            bench.step()
    assert bench.tokens(key) == null_answer(prompt(30), 4, VOCAB)


def test_an_error_of_one_sequence_ends_it_alone_and_its_tiles_are_not_shared() -> None:
    bench = Workbench(limits(step_tokens=48))
    bad = bench.add(request(prompt(60), 4))
    bench.step()
    good = bench.add(request(prompt(20, 1), 4))
    step = bench.scheduler.schedule()
    assert {advance.key for advance in step.draws} == {bad, good}
    events = bench.scheduler.apply(StepResult(step.number, {good: 5}, errors={bad: "no finite logits"}))
    assert {(event.key, event.error, event.finish_reason) for event in events} == {
        (bad, "no finite logits", FinishReason.ERROR),
        (good, "", None),
    }
    bench.scheduler.check()
    again = bench.add(request(prompt(60), 4))
    while not bench.events[again]:
        bench.step()
    assert bench.events[again][-1].cached_tokens == 0


def test_waiting_too_long_is_an_error_before_the_first_step_only() -> None:
    bench = Workbench(limits(batch=1))
    running = bench.add(request(prompt(4), 20), timeout_ms=10)
    bench.step()
    late, patient = bench.add(request(prompt(4), 1), timeout_ms=10), bench.add(request(prompt(4), 1))
    bench.now_ns += 10_000_000
    assert bench.scheduler.expire() == []
    bench.now_ns += 1
    (event,) = bench.scheduler.expire()
    assert (event.key, event.finish_reason) == (late, FinishReason.ERROR)
    assert "queue timeout of 10 ms" in event.error
    assert bench.scheduler.meters.timed_out == 1
    bench.finish()
    assert bench.reason(running) is bench.reason(patient) is FinishReason.LENGTH


def test_times_are_taken() -> None:
    bench = Workbench(limits(step_tokens=16))
    key = bench.add(request(prompt(30), 2))
    arrival = bench.now_ns
    for _ in range(3):
        bench.now_ns += 1_000_000
        bench.step()
    timings = bench.events[key][-1].timings
    assert timings.arrival_ns == arrival
    assert timings.first_scheduled_ns == arrival + 1_000_000
    assert timings.first_token_ns == arrival + 2_000_000
    assert timings.last_token_ns == arrival + 3_000_000
    meters = bench.scheduler.meters
    assert (meters.queue_ms.snapshot().sum, meters.ttft_ms.snapshot().sum) == (1.0, 2.0)
    assert (meters.itl_ms.snapshot().sum, meters.request_ms.snapshot().sum) == (1.0, 3.0)


def test_misuse_asserts() -> None:
    bench = Workbench(limits())
    bench.add(request(prompt(4), 2))
    step = bench.scheduler.schedule()
    with pytest.raises(AssertionError, match="neither applied nor discarded"):
        bench.scheduler.schedule()
    with pytest.raises(AssertionError, match="is pending"):
        bench.scheduler.apply(StepResult(step.number + 1, {}))
    with pytest.raises(ValueError, match="one token of every sequence"):
        Workbench(replace(limits(), max_batch_size=65))


@pytest.mark.parametrize(("tiles", "seq_tokens", "largest"), [(4, 256, 64), (64, 256, 256)])
def test_the_largest_request_is_bounded_by_engine_and_pool(tiles: int, seq_tokens: int, largest: int) -> None:
    bench = Workbench(limits(tiles=tiles, seq_tokens=seq_tokens))
    assert bench.scheduler.max_seq_tokens == largest
    key = bench.add(request(prompt(largest - 3), 3))
    bench.finish()
    assert bench.tokens(key) == null_answer(prompt(largest - 3), 3, VOCAB)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_random_schedules_never_lose_or_double_a_token(seed: int) -> None:
    """Adds, aborts, discards and steps in any order, prompts that begin alike, a pool that is often short."""
    rng = random.Random(seed)
    batch = rng.randrange(1, 6)
    bounds = limits(batch, rng.randrange(batch, 60), rng.randrange(20, 150), rng.randrange(2, 30))
    bench = Workbench(bounds)
    systems = [prompt(rng.randrange(1, 80), n) for n in range(2)]
    wanted = {}
    for _ in range(rng.randrange(5, 60)):
        action = rng.random()
        room = bench.scheduler.max_seq_tokens
        if action < 0.3:
            ids = (rng.choice(systems) + prompt(rng.randrange(1, 40), rng.randrange(3)))[-(room - 1) :]
            count = rng.randrange(1, room - len(ids) + 1)
            key = bench.add(request(ids, count, priority=rng.randrange(2)))
            wanted[key] = null_answer(ids, count, VOCAB)
        elif action < 0.38 and wanted:
            bench.abort(rng.choice(list(wanted)))
        elif action < 0.45:
            bench.scheduler.discard(bench.scheduler.schedule().number)
        else:
            bench.step()
        bench.scheduler.check()
    bench.finish()
    for key, tokens in wanted.items():
        if bench.reason(key) is FinishReason.CANCELLED:
            assert bench.tokens(key) == tokens[: len(bench.tokens(key))]
        else:
            assert bench.reason(key) is FinishReason.LENGTH
            assert bench.tokens(key) == tokens
    assert bench.scheduler.tiles.available_tiles == bounds.num_tiles


def test_penalties_and_bad_words_see_prompt_and_answer() -> None:
    bench = Workbench(limits(step_tokens=16))
    ids = prompt(20)
    key = bench.add(request(ids, 6, repetition_penalty=1.5, bad_words=((1, 2, 3), (4,))))
    while bench.scheduler.busy:
        said = bench.tokens(key)
        for advance in bench.step().draws:
            assert advance.recent == (*ids, *said)[-2:]
            assert advance.counted is not None
            assert set(advance.counted.tokens.tolist()) == {*ids, *said}
            assert dict(zip(*map(list, advance.counted), strict=True)) == {t: said.count(t) for t in {*ids, *said}}
