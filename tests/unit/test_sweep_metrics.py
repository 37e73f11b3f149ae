"""Metrics of the sweep: made-up event streams on a made-up clock, against figures worked out by hand or by numpy."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_trt.sweep.metrics import LevelMetrics, level_metrics, percentile, request_figures, summarize
from sits_trt.sweep.trace import RequestTrace, StreamEvent

MS = 1_000_000


def stream(*events: tuple[float, int], started_ms: float = 0, ended_ms: float | None = None, error: str = ""):
    last = events[-1][0] if events else started_ms
    return RequestTrace(
        started_ns=int(started_ms * MS),
        sent_ns=int(started_ms * MS),
        ended_ns=int((last if ended_ms is None else ended_ms) * MS),
        events=[StreamEvent(int(at_ms * MS), tokens) for at_ms, tokens in events],
        error=error,
    )


def test_b48_the_clock_stops_at_the_first_token_and_tokens_are_counted_not_chunks() -> None:
    figures = request_figures(stream((10, 0), (100, 1), (150, 2), (200, 1), (205, 0), ended_ms=206))
    assert figures is not None
    assert figures.ttft_ms == 100
    assert figures.tokens == 4
    assert figures.itl_ms == (25, 25, 50)
    assert figures.gap_ms == (50, 50)
    assert figures.tpot_ms == pytest.approx(100 / 3)
    assert figures.e2e_ms == 206


def test_b48_an_answer_without_text_has_no_first_token_time_rather_than_zero() -> None:
    empty = stream((10, 0), (40, 0))
    assert request_figures(empty) is None
    level = level_metrics([empty], 2000, 200)
    assert (level.completed, level.empty, level.failed) == (0, 1, 0)
    assert level.ttft_ms is None
    assert level.itl_ms is None
    assert level.e2e_ms is None
    assert level.output_tokens_per_s == 0


def test_b48_failures_are_counted_and_kept_out_of_percentiles() -> None:
    good = stream((100, 1), (200, 1))
    failed = stream((5, 1), ended_ms=5000, error="queue is full")
    silent = stream((1, 0), ended_ms=1)
    level = level_metrics([good, failed, silent], 2000, 200)
    assert (level.completed, level.empty, level.failed) == (1, 1, 1)
    assert level.errors == {"queue is full": 1}
    assert level.ttft_ms is not None
    assert (level.ttft_ms.count, level.ttft_ms.p50, level.ttft_ms.max) == (1, 100, 100)
    assert level.output_tokens == 2
    # The window is what the clock on the wall says: the failed request held the server for five seconds.
    assert level.window_s == 5
    assert level.output_tokens_per_s == pytest.approx(2 / 5)


def test_one_token_has_no_interval() -> None:
    figures = request_figures(stream((30, 1), ended_ms=31))
    assert figures is not None
    assert figures.itl_ms == ()
    assert figures.tpot_ms is None
    assert level_metrics([stream((30, 1))], 2000, 200).tpot_ms is None


def test_tokens_that_come_with_the_first_one_add_no_waiting() -> None:
    figures = request_figures(stream((30, 3), (60, 1)))
    assert figures is not None
    assert figures.itl_ms == (0, 0, 30)
    assert figures.tpot_ms == 10


events = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 5)), min_size=1, max_size=30)


@given(events, st.integers(0, 1000))
def test_intervals_of_a_request_sum_to_first_until_last_token(gaps: list[tuple[int, int]], start: int) -> None:
    at, made = start, []
    for gap, tokens in gaps:
        at += gap
        made.append((at, tokens))
    figures = request_figures(stream(*made, started_ms=start))
    if not any(tokens for _, tokens in made):
        assert figures is None
        return
    assert figures is not None
    carrying = [time for time, tokens in made if tokens]
    assert len(figures.itl_ms) == figures.tokens - 1 == sum(tokens for _, tokens in made) - 1
    assert sum(figures.itl_ms) == pytest.approx(carrying[-1] - carrying[0])
    assert sum(figures.gap_ms) == pytest.approx(carrying[-1] - carrying[0])
    if figures.tpot_ms is not None:
        assert figures.tpot_ms == pytest.approx(statistics.fmean(figures.itl_ms))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentile_is_numpys_linear_one(samples: list[float], percent: float) -> None:
    ours = percentile(sorted(samples), percent)
    assert ours == pytest.approx(float(np.percentile(samples, percent, method="linear")), rel=1e-9, abs=1e-9)


def test_summary_of_nothing_is_missing() -> None:
    assert summarize([]) is None


def test_goodput_counts_requests_that_keep_both_bounds() -> None:
    quick = stream((100, 1), (150, 1), ended_ms=150)
    late_start = stream((900, 1), (950, 1), ended_ms=950)
    slow_text = stream((100, 1), (700, 1), ended_ms=700)
    single = stream((100, 1), ended_ms=1000)
    failed = stream((50, 1), ended_ms=1000, error="cancelled")
    level = level_metrics([quick, late_start, slow_text, single, failed], slo_ttft_ms=500, slo_tpot_ms=200)
    assert level.window_s == 1
    assert level.goodput_per_s == 2
    assert level.requests_per_s == 4


def test_level_survives_json() -> None:
    for level in (level_metrics([stream((3, 1), (9, 2))], 1, 1), level_metrics([stream((3, 0))], 1, 1)):
        assert LevelMetrics.from_dict(json.loads(json.dumps(asdict(level)))) == level
