"""Counts and times of an executor, in a form that a metrics endpoint can take as it is."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from sits_trt.runtime.request import FinishReason

LATENCY_BOUNDS_MS = (
    1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """`counts[i]` values were at most `bounds[i]` and more than the bound before; the last count is of larger ones."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Values counted in buckets. One thread observes; any thread may take a snapshot."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_MS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum)


@dataclass(slots=True)
class Meters:
    """What the executor's thread writes down as it goes."""

    steps: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    timed_out: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    queue_ms: Histogram = field(default_factory=Histogram)
    ttft_ms: Histogram = field(default_factory=Histogram)
    itl_ms: Histogram = field(default_factory=Histogram)
    request_ms: Histogram = field(default_factory=Histogram)
    step_ms: Histogram = field(default_factory=Histogram)
    runner_ms: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """An executor at one moment. Counts are totals since its start.

    running, waiting: requests in flight, and requests that have not been admitted yet.
    num_tiles, pool_bytes: size of the KV pool, scales of a quantized one included.
    free_tiles: tiles that no running request holds; kept_tiles: those of them that the prefix cache still remembers.
    prefilled_tokens: prompt tokens computed; cached_tokens: prompt tokens that did not need to be.
    cancelled, failed, stopped: requests by how they ended (`stopped` is stop or length). timed_out: those of the
    failed ones that waited too long. rejected: submits that were refused at the door.
    queue_ms: arrival to first step. ttft_ms: arrival to first token. itl_ms: token to token of one request.
    request_ms: arrival to end. step_ms: one turn of the loop with a step in it; runner_ms: the runner's part.
    error: why the executor serves nobody any more, empty while it does.
    """

    running: int
    waiting: int
    num_tiles: int
    pool_bytes: int
    free_tiles: int
    kept_tiles: int
    steps: int
    prefilled_tokens: int
    generated_tokens: int
    cached_tokens: int
    stopped: int
    cancelled: int
    failed: int
    timed_out: int
    rejected: int
    queue_ms: HistogramSnapshot
    ttft_ms: HistogramSnapshot
    itl_ms: HistogramSnapshot
    request_ms: HistogramSnapshot
    step_ms: HistogramSnapshot
    runner_ms: HistogramSnapshot
    error: str
