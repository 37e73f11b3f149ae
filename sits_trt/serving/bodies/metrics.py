"""The executor's counts and times as Triton custom metrics, on the server's own endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sits_trt.runtime.stats import ExecutorStats, HistogramSnapshot

COUNTERS: dict[str, tuple[str, Callable[[ExecutorStats], float]]] = {
    "sits_generated_tokens_total": ("tokens of answers", lambda s: s.generated_tokens),
    "sits_prefilled_tokens_total": ("prompt tokens computed", lambda s: s.prefilled_tokens),
    "sits_cached_tokens_total": ("prompt tokens taken from the prefix cache", lambda s: s.cached_tokens),
    "sits_steps_total": ("steps of the executor", lambda s: s.steps),
}
OUTCOMES: dict[str, Callable[[ExecutorStats], float]] = {
    "completed": lambda s: s.stopped,
    "cancelled": lambda s: s.cancelled,
    "failed": lambda s: s.failed - s.timed_out,
    "timed_out": lambda s: s.timed_out,
    "rejected": lambda s: s.rejected,
}
GAUGES: dict[str, tuple[str, Callable[[ExecutorStats], float]]] = {
    "sits_requests_running": ("requests in flight", lambda s: s.running),
    "sits_requests_waiting": ("requests that wait for their first step", lambda s: s.waiting),
    "sits_tiles_total": ("tiles of the KV pool", lambda s: s.num_tiles),
    "sits_kv_pool_bytes": ("bytes of the KV pool, scales included", lambda s: s.pool_bytes),
    "sits_tiles_used": ("tiles that requests in flight hold", lambda s: s.num_tiles - s.free_tiles),
    "sits_tiles_free": ("tiles that no request in flight holds", lambda s: s.free_tiles),
    "sits_tiles_cached": ("free tiles that the prefix cache remembers", lambda s: s.kept_tiles),
    "sits_executor_up": ("1 while the executor serves, 0 once it has failed", lambda s: not s.error),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[ExecutorStats], HistogramSnapshot]]] = {
    "sits_queue_ms": ("arrival to first step", lambda s: s.queue_ms),
    "sits_ttft_ms": ("arrival to first token", lambda s: s.ttft_ms),
    "sits_itl_ms": ("token to token of one request", lambda s: s.itl_ms),
    "sits_request_ms": ("arrival to end", lambda s: s.request_ms),
    "sits_step_ms": ("one step", lambda s: s.step_ms),
    "sits_runner_ms": ("the runner's part of a step", lambda s: s.runner_ms),
}


@dataclass(frozen=True)
class Sample:
    """The value of one time series: `label` is a name and a value beside the model's own labels, or empty."""

    family: str
    description: str
    is_counter: bool
    label: tuple[tuple[str, str], ...]
    value: float


def samples(stats: ExecutorStats) -> Iterator[Sample]:
    """Yield every series at its value in `stats`, the same ones in the same order each time."""
    for name, (description, read) in COUNTERS.items():
        yield Sample(name, description, True, (), float(read(stats)))
    for outcome, read in OUTCOMES.items():
        label = (("outcome", outcome),)
        yield Sample("sits_requests_total", "requests by how they ended", True, label, float(read(stats)))
    for name, (description, read) in GAUGES.items():
        yield Sample(name, description, False, (), float(read(stats)))
    for name, (description, snapshot) in HISTOGRAMS.items():
        yield from _histogram(name, description, snapshot(stats))


def _histogram(name: str, description: str, snapshot: HistogramSnapshot) -> Iterator[Sample]:
    total = 0
    bounds = [f"{bound:g}" for bound in snapshot.bounds] + ["+Inf"]
    for bound, count in zip(bounds, snapshot.counts, strict=True):
        total += count
        yield Sample(f"{name}_bucket", f"{description}: count by upper bound", True, (("le", bound),), float(total))
    yield Sample(f"{name}_count", f"{description}: count", True, (), float(total))
    yield Sample(f"{name}_sum", f"{description}: sum", True, (), snapshot.sum)


class Metrics:
    """Publishes executor statistics. `family(name, description, is_counter)` makes a Triton metric family.

    Histograms are sets of counters with the names and `le` labels that Prometheus gives its own: Triton's histogram
    takes one value a call, and a call crosses processes, which is too much for every token.

    Counters start at 0 from the statistics `since`.
    """

    def __init__(
        self, family: Callable[[str, str, bool], Any], labels: dict[str, str], since: ExecutorStats
    ) -> None:  # fmt: skip
        self._make_family = family
        self._labels = labels
        # A family that is no longer referenced disappears from the endpoint.
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, Any], Any] = {}
        self._published: dict[tuple[str, Any], float] = {
            (s.family, s.label): s.value if s.is_counter else 0.0 for s in samples(since)
        }

    def publish(self, stats: ExecutorStats) -> None:
        """Bring every series to what `stats` says; only those that changed cost a call."""
        for sample in samples(stats):
            key = (sample.family, sample.label)
            if key not in self._series:
                self._add(sample)
            change = sample.value - self._published[key]
            if change and sample.is_counter:
                self._series[key].increment(change)
            elif change:
                self._series[key].set(sample.value)
            self._published[key] = sample.value

    def _add(self, sample: Sample) -> None:
        if sample.family not in self._families:
            made = self._make_family(sample.family, sample.description, sample.is_counter)
            self._families[sample.family] = made
        key = (sample.family, sample.label)
        self._series[key] = self._families[sample.family].Metric(labels=self._labels | dict(sample.label))
