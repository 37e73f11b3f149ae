"""Made-up sweep results: any number of builds with figures that follow from their number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sits_trt.recipe.schema import SweepSection
from sits_trt.sweep.metrics import level_metrics
from sits_trt.sweep.result import Accuracy, BuildInfo, BuildResult, LevelResult, Status, SweepResult
from sits_trt.sweep.trace import RequestTrace, StreamEvent
from sits_trt.sweep.workload import Load

MACHINE = {"cpu": "Test CPU", "cores": 2, "memory_gb": 24.0, "gpus": [], "system": "Linux"}


def made_level(load: Load, token_ms: float, errors: tuple[str, ...] = (), requests: int = 12) -> LevelResult:
    """Return a level whose requests take `token_ms` a token and a few tokens' time until the first."""
    traces = []
    at_once = load.concurrency or 1
    for index in range(requests):
        start = index // at_once * 20 * token_ms
        first = start + 4 * token_ms * (1 + 0.05 * index)
        events = [StreamEvent(int((first + k * token_ms) * 1e6), 1) for k in range(16)]
        error = errors[index] if index < len(errors) else ""
        traces.append(RequestTrace(int(start * 1e6), int(start * 1e6), events[-1].at_ns, events, error))
    return LevelResult(
        load,
        level_metrics(traces, 2000, 200),
        client_cpu=0.12,
        late_ms=0.4,
        measured="2031-05-06T07:08:00+00:00",
        requests=[],
    )


def made_build(number: int, quantized: bool = True, **changes: Any) -> BuildResult:
    """Return a complete build with levels at 1, 4 and 16 streams; a higher number is faster and less exact."""
    name = f"int4-{number}" if quantized else "fp16"
    info = BuildInfo(
        name=name,
        directory=f"builds/{name}",
        model="smollm2-135m-instruct",
        target="a100-80gb",
        backend="tensorrt-rtx",
        weights="INT4 AWQ, groups of 64" if quantized else "fp16",
        quantized=quantized,
        weights_bytes=118_000_000 if quantized else 269_000_000,
        fingerprint=f"{number:032x}",
        checkpoint_fingerprint="c" * 32,
        recipe={"name": name, "quantization": {"scheme": "w4a16" if quantized else "none"}},
        served_by="eager runner on cpu: no NVIDIA GPU is here",
        server="2.51.0",
    )
    accuracy = Accuracy(20.0, 4096)
    if quantized:
        accuracy = Accuracy(
            20.0 * (1.01 + 0.011 * number),
            4096,
            20.0,
            0.01 * number,
            0.97 - 0.01 * number,
            4,
            128,
            1,
            77.5,
            0.955 - 0.01 * number,
        )
    pace_ms = 9.0 - 0.5 * number if quantized else 10.0
    levels = [made_level(Load(concurrency=c), pace_ms * (1 + 0.15 * c)) for c in (1, 4, 16)]
    return replace(BuildResult(info, Status.COMPLETE, "", accuracy, levels), **changes)


def made_result(builds: list[BuildResult], **settings: Any) -> SweepResult:
    return SweepResult(
        created="2031-05-06T07:08:09+00:00",
        machine=MACHINE,
        versions={"sits-trt": "0.1.0", "torch": "2.13.0"},
        settings=SweepSection(**settings).model_dump(mode="json"),
        builds=builds,
    )
