"""Timing for the kernel benchmarks: CUDA graphs over rotating buffers, medians, and rows of a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

COLD_BYTES = 400_000_000
"""Buffers rotate over at least this much, several times the L2 of any GPU here."""

WARM_S = 0.05
"""Seconds of launches before a measurement: an idle GPU needs a moment until its clocks are up."""


@dataclass
class Row:
    """One measurement: what and with which settings, its time, and its figures by name."""

    what: str
    settings: str
    time_us: float
    figures: dict[str, float | str] = field(default_factory=dict)


def rotation(buffer_bytes: float) -> int:
    """Return the number of buffer sets that keeps every launch cold."""
    return max(3, int(COLD_BYTES / buffer_bytes))


def graph_us(launch: Callable[[int], object], sets: int, replays: int = 7) -> float:
    """Return the median time of one launch in microseconds; `launch(i)` uses buffer set i of `sets`.

    All sets are launched one after the other inside one CUDA graph, which is replayed.
    """
    return graphs_us([(launch, sets)], replays)[0]


def graphs_us(launches: Sequence[tuple[Callable[[int], object], int]], replays: int = 7) -> list[float]:
    """Return `graph_us` of several launches, each with its number of sets, replayed in turns.

    So the GPU, whose clocks fall as it gets warm, is in the same state for all of them.
    """
    graphs = [_captured(launch, sets) for launch, sets in launches]
    begun = time.monotonic()
    while time.monotonic() - begun < WARM_S:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays):
        for graph, found, (_, sets) in zip(graphs, times, launches, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1000 / sets)
    return [statistics.median(found) for found in times]


def _captured(launch: Callable[[int], object], sets: int) -> torch.cuda.CUDAGraph:
    launch(0)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(sets):
                launch(index)
    return graph


def copy_bytes_per_us() -> float:
    """Return the device copy bandwidth, bytes read plus bytes written in a microsecond.

    Outside a graph: inside one, the copy becomes a node for the copy engines, which are slower.
    """
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return 2 * source.numel() / statistics.median(times[2:])


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table; the figures' names are columns."""
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    lines = [f"| what | settings | us | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for row in rows:
        cells = [row.figures.get(name, "") for name in names]
        shown = [cell if isinstance(cell, str) else f"{cell:.2f}" for cell in cells]
        lines.append(f"| {row.what} | {row.settings} | {row.time_us:.1f} | {' | '.join(shown)} |")
    return "\n".join(lines)
