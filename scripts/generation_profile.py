"""The kernels of one step by the time that they take on the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as traced

from sits_trt.runtime.runners.base import Runner
from sits_trt.runtime.sampler import sample
from sits_trt.runtime.step import Step, StepInputs

STEPS = 3
SHOWN = 14
NAME_WIDTH = 90


def profile(title: str, runner: Runner, step: Step, inputs: StepInputs) -> str:
    """Run a step with its sampling STEPS times under torch's profiler; return its kernels as a Markdown table."""
    sample(step, runner.run(inputs))
    with traced(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            sample(step, runner.run(inputs))
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA
    ]
    return f"{title}\n\n{table(spans)}\n"


def table(spans: Iterable[tuple[str, float, float]]) -> str:
    """Return (name, start, end) in microseconds, of STEPS steps, as a table of the names that take longest."""
    spans = sorted(spans, key=lambda span: span[1])
    times: dict[str, list[float]] = defaultdict(list)
    busy, until = 0.0, float("-inf")
    for name, start, end in spans:
        times[name].append(end - start)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    total = sum(map(sum, times.values()))
    rows = sorted(times.items(), key=lambda item: -sum(item[1]))
    lines = ["| kernel | calls a step | us a call | us a step | share |", "|---|---|---|---|---|"]
    for name, found in rows[:SHOWN]:
        calls, spent = len(found) / STEPS, sum(found)
        shown = f"{calls:.1f} | {spent / len(found):.2f} | {spent / STEPS:.1f} | {spent / total:.1%}"
        lines.append(f"| {name[:NAME_WIDTH]} | {shown} |")
    rest = sum(sum(found) for _, found in rows[SHOWN:])
    lines.append(f"| {max(0, len(rows) - SHOWN)} others | | | {rest / STEPS:.1f} | {rest / total:.1%} |")
    idle = (until - spans[0][1] - busy) / STEPS if spans else 0.0
    lines.append(f"\n{total / STEPS:.0f} us of kernels a step, GPU idle for {idle:.0f} us a step")
    return "\n".join(lines)
