"""From timestamps to the figures of a level: TTFT, ITL, TPOT, end-to-end, tokens per second, goodput.

Definitions, per request that the server completed with at least one generated token:

- TTFT: from the start to the first event that carries a generated token. Events without one (role
  or usage messages, empty markers) do not stop the clock.
- ITL: n tokens give n - 1 intervals. The k tokens of one event share the time since the previous
  token-carrying event evenly; those that come with the first token add intervals of 0. So the
  intervals of a request sum to last minus first token, and their mean is its TPOT.
- Gap: the time between two token-carrying events, not shared out: the stall that a reader sees.
- TPOT: (last token - first token) / (n - 1); none for answers of one token.
- End-to-end: from the start to the end of the stream.

A figure that does not exist is None, never 0. Requests that failed, and those that ended without any
token, are counted apart and enter no percentile, no token rate and no goodput.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import Any

from sits_trt.sweep.trace import RequestTrace

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class Summary:
    """Distribution of one figure over `count` samples."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class RequestFigures:
    """The figures of one completed request, in milliseconds; see the module's text for each."""

    ttft_ms: float
    itl_ms: tuple[float, ...]
    gap_ms: tuple[float, ...]
    tpot_ms: float | None
    e2e_ms: float
    tokens: int


@dataclass(frozen=True)
class LevelMetrics:
    """The figures of one level of load.

    `completed` + `empty` + `failed` is the number of requests sent. `window_s` runs from the first
    start to the last end of any of them; rates are completed work divided by it. `goodput_per_s`
    counts the completed requests that kept the bounds of the service level objective.
    """

    completed: int
    empty: int
    failed: int
    errors: dict[str, int]
    window_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    ttft_ms: Summary | None
    itl_ms: Summary | None
    gap_ms: Summary | None
    tpot_ms: Summary | None
    e2e_ms: Summary | None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LevelMetrics:
        summaries = {
            name: Summary(**data[name]) if data[name] else None
            for name in ("ttft_ms", "itl_ms", "gap_ms", "tpot_ms", "e2e_ms")
        }
        return cls(**{**data, **summaries})


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending samples by linear interpolation between the closest ranks.

    This is type 7 of Hyndman and Fan (1996), the default of numpy, R and spreadsheets.
    """
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summarize(samples: Iterable[float]) -> Summary | None:
    """Return the distribution of `samples`, None when there are none."""
    ordered = sorted(samples)
    if not ordered:
        return None
    p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
    return Summary(len(ordered), fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


def request_figures(trace: RequestTrace) -> RequestFigures | None:
    """Return the figures of a request; None when it failed or brought no token."""
    carrying = [event for event in trace.events if event.tokens]
    if trace.error or not carrying:
        return None
    first, last = carrying[0], carrying[-1]
    gaps = [(later.at_ns - earlier.at_ns) / NS_PER_MS for earlier, later in pairwise(carrying)]
    intervals = [0.0] * (first.tokens - 1)
    for gap, event in zip(gaps, carrying[1:], strict=True):
        intervals.extend([gap / event.tokens] * event.tokens)
    tokens = trace.tokens
    return RequestFigures(
        ttft_ms=(first.at_ns - trace.started_ns) / NS_PER_MS,
        itl_ms=tuple(intervals),
        gap_ms=tuple(gaps),
        tpot_ms=(last.at_ns - first.at_ns) / NS_PER_MS / (tokens - 1) if tokens > 1 else None,
        e2e_ms=(trace.ended_ns - trace.started_ns) / NS_PER_MS,
        tokens=tokens,
    )


def level_metrics(traces: Sequence[RequestTrace], slo_ttft_ms: float, slo_tpot_ms: float) -> LevelMetrics:
    """Return the figures of all requests of one level. `traces` must hold at least one request."""
    failed = [trace for trace in traces if trace.error]
    figures = [found for trace in traces if (found := request_figures(trace))]
    window_s = (max(t.ended_ns for t in traces) - min(t.started_ns for t in traces)) / NS_PER_S
    good = sum(f.ttft_ms <= slo_ttft_ms and (f.tpot_ms is None or f.tpot_ms <= slo_tpot_ms) for f in figures)
    tokens = sum(f.tokens for f in figures)
    return LevelMetrics(
        completed=len(figures),
        empty=len(traces) - len(failed) - len(figures),
        failed=len(failed),
        errors=dict(Counter(trace.error for trace in failed).most_common()),
        window_s=window_s,
        output_tokens=tokens,
        output_tokens_per_s=tokens / window_s,
        requests_per_s=len(figures) / window_s,
        goodput_per_s=good / window_s,
        ttft_ms=summarize(f.ttft_ms for f in figures),
        itl_ms=summarize(interval for f in figures for interval in f.itl_ms),
        gap_ms=summarize(gap for f in figures for gap in f.gap_ms),
        tpot_ms=summarize(f.tpot_ms for f in figures if f.tpot_ms is not None),
        e2e_ms=summarize(f.e2e_ms for f in figures),
    )
