"""Which charts the report has: accuracy against latency at each level, and throughput against latency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sits_trt.sweep.compare import pareto_front
from sits_trt.sweep.metrics import LevelMetrics, Summary
from sits_trt.sweep.plot import Axis, Chart, Point, nice_axis
from sits_trt.sweep.result import BuildResult, SweepResult
from sits_trt.sweep.tables import significant
from sits_trt.sweep.workload import Load


@dataclass(frozen=True)
class Latency:
    """One way to say how slow a build is."""

    key: str
    label: str
    of: Callable[[LevelMetrics], float | None]


def _figure(name: str, percentile: str) -> Callable[[LevelMetrics], float | None]:
    def of(metrics: LevelMetrics) -> float | None:
        summary: Summary | None = getattr(metrics, name)
        return None if summary is None else float(getattr(summary, percentile))

    return of


LATENCIES = (
    Latency("e2e", "End-to-end p95", _figure("e2e_ms", "p95")),
    Latency("ttft", "TTFT p95", _figure("ttft_ms", "p95")),
    Latency("tpot", "TPOT p50", _figure("tpot_ms", "p50")),
)


def pareto_charts(result: SweepResult, latency: Latency) -> list[Chart]:
    """Return a chart for each level where some build has an accuracy and this latency; all share the accuracy axis."""
    measured = [(load, _measured(result, load, latency)) for load in result.loads()]
    measured = [(load, points) for load, points in measured if points]
    if not measured:
        return []
    increases = [accuracy for _, points in measured for _, _, _, accuracy in points]
    y_axis = nice_axis("perplexity over fp16", increases, include_zero=True, suffix=" %", scale=100)
    return [_pareto_chart(load, latency, points, y_axis) for load, points in measured]


Measured = tuple[int, BuildResult, float, float]
"""Number from 1, build, latency in ms, relative perplexity increase."""


def _measured(result: SweepResult, load: Load, latency: Latency) -> list[Measured]:
    found = []
    for number, build in enumerate(result.builds, 1):
        metrics = build.level(load.key)
        value = latency.of(metrics) if metrics else None
        if value is not None and build.accuracy is not None and not build.info.source_quantized:
            found.append((number, build, value, build.accuracy.perplexity_increase))
    return found


def _pareto_chart(load: Load, latency: Latency, measured: list[Measured], y_axis: Axis) -> Chart:
    coordinates = [(value, increase) for _, _, value, increase in measured]
    front = pareto_front(coordinates)
    points = [
        Point(
            value,
            increase,
            number,
            (
                f"{number} · {build.info.name}",
                f"{latency.label} {significant(value)} ms",
                f"perplexity {increase:+.1%} over fp16",
            ),
            solid=index in front,
        )
        for index, (number, build, value, increase) in enumerate(measured)
    ]
    best = ", ".join(measured[i][1].info.name for i in front)
    return Chart(
        title=load.label,
        description=f"{latency.label} against perplexity over fp16 at {load.label}. On the Pareto front: {best}.",
        x_axis=nice_axis(f"{latency.label}, ms", [x for x, _ in coordinates], include_zero=False),
        y_axis=y_axis,
        points=points,
        front=[coordinates[i] for i in front],
        level_y=(0.0, "fp16"),
    )


def throughput_chart(result: SweepResult) -> Chart | None:
    """Return tokens per second against end-to-end latency, a line a build along its levels; None without any level."""
    lines = [line for number, build in enumerate(result.builds, 1) if (line := _line(number, build, result))]
    if not lines:
        return None
    points = [point for line in lines for point in line]
    return Chart(
        title="All loads",
        description="Output tokens per second against the median end-to-end latency; each line is a build.",
        x_axis=nice_axis("End-to-end p50, ms", [p.x for p in points], include_zero=True),
        y_axis=nice_axis("output tokens per second", [p.y for p in points], include_zero=True),
        points=points,
        lines=lines,
        width=720,
        height=320,
    )


def _line(number: int, build: BuildResult, result: SweepResult) -> list[Point]:
    line = []
    for load in result.loads():
        metrics = build.level(load.key)
        if metrics and metrics.e2e_ms:
            tip = (
                f"{number} · {build.info.name}, {load.label}",
                f"{significant(metrics.output_tokens_per_s)} tokens/s",
                f"end-to-end p50 {significant(metrics.e2e_ms.p50)} ms",
            )
            line.append(Point(metrics.e2e_ms.p50, metrics.output_tokens_per_s, number, tip, numbered=False))
    if line:
        last = line[-1]
        line[-1] = Point(last.x, last.y, number, last.tip)
    return line
