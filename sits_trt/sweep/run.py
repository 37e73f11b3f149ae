"""The sweep: each build is served, driven at each level of load, and scored; what was measured survives a kill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sits_trt import __version__
from sits_trt.artifacts import Manifest, fingerprint, read_manifest, tool_versions, writing
from sits_trt.checkpoint import load_tokenizer
from sits_trt.errors import ServerError, SitsError
from sits_trt.progress import Progress
from sits_trt.recipe.schema import SweepSection
from sits_trt.sweep.accuracy import measure_accuracy
from sits_trt.sweep.builds import describe_builds, longest_sequence_tokens, unfinished_reason, weights_directory
from sits_trt.sweep.load import LevelTraces, Limits, run_level
from sits_trt.sweep.machine import describe_machine
from sits_trt.sweep.metrics import NS_PER_MS, level_metrics, request_figures
from sits_trt.sweep.parts import Part, Parts
from sits_trt.sweep.report import write_report
from sits_trt.sweep.result import Accuracy, BuildInfo, BuildResult, LevelResult, Status, SweepResult
from sits_trt.sweep.serve import Served, serve
from sits_trt.sweep.workload import Load, make_prompts

KIND = "sweep"
WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 2
"""Before each level a few short requests, not counted, touch the memory and code that the level needs."""

SETTLE_S = 1.0
"""After failures, the time in which a crashed server is seen to be gone, so that its level is not kept."""

TOOLS = ("tritonclient", "nvidia-pytriton", "numpy", "torch", "tensorrt", "tensorrt-rtx-cu13-libs")


def run_sweep(builds: Sequence[Path], section: SweepSection, out_dir: Path, progress: Progress) -> SweepResult:
    """Measure latency, throughput and accuracy of every build and write the report into `out_dir`.

    A build that cannot be served, and one whose own build is unfinished, is in the result with its reason; the
    others go on. What was measured on this machine with the same settings is kept: a sweep that was
    killed goes on where it stopped, and one with a further build measures only that. Delete `out_dir`
    to measure everything again.
    Raises SitsError for a directory that is no build and for an `out_dir` that holds something else.
    """
    infos = describe_builds(list(builds))
    _refuse_foreign(out_dir)
    sweep = _Sweep(infos, section, progress)
    with writing(out_dir, sweep.manifest()) as (partial, details):
        parts = Parts(partial / "parts")
        parts.take_over(out_dir / "parts")
        for index in range(len(infos)):
            sweep.measure(index, parts)
            sweep.show_done(index + 1)
            result = sweep.result()
            write_report(result, partial)
        parts.drop_unused()
        details["builds"] = {build.info.name: build.status.value for build in result.builds}
    return result


def _refuse_foreign(out_dir: Path) -> None:
    if out_dir.is_dir() and any(out_dir.iterdir()):
        try:
            read_manifest(out_dir, KIND)
        except SitsError:
            raise SitsError(f"{out_dir} holds something other than a sweep; give a new directory") from None


class _Sweep:
    """One sweep in progress. `results` begins with every build unfinished and is replaced build by build."""

    def __init__(self, infos: list[BuildInfo], section: SweepSection, progress: Progress) -> None:
        self.section, self.progress = section, progress
        self.machine = describe_machine()
        self.versions = {"sits-trt": __version__} | tool_versions(*TOOLS)
        self.results = [BuildResult(info, Status.UNFINISHED, "not measured yet") for info in infos]
        self.loads = self.result().loads()
        self.steps_of_a_build = (len(self.loads) + 1) * section.requests_per_level
        self.done = 0

    def manifest(self) -> Manifest:
        inputs = {build.info.name: build.info.fingerprint for build in self.results}
        return Manifest(KIND, fingerprint([inputs, self._conditions()]), inputs, self.versions)

    def result(self) -> SweepResult:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        settings = self.section.model_dump(mode="json")
        return SweepResult(created, self.machine, self.versions, settings, list(self.results))

    def measure(self, index: int, parts: Parts) -> None:
        """Measure one build as far as it goes. Only expected errors end it; a bug stops the sweep."""
        self.done = index * self.steps_of_a_build
        build = self.results[index]
        if reason := unfinished_reason(build.info):
            self.results[index] = replace(build, reason=reason)
            return
        try:
            for grown in self._levels(build, parts):
                self.results[index] = grown
            measured = self.results[index]
            score = self._reference_score(build.info) or measure_accuracy(
                build.info, self.section.accuracy, self._accuracy_progress(build.info.name)
            )
            self.results[index] = replace(measured, status=Status.COMPLETE, reason="", accuracy=score)
        except SitsError as error:
            self.results[index] = replace(self.results[index], status=Status.FAILED, reason=str(error))

    def show_done(self, builds: int) -> None:
        self.done = builds * self.steps_of_a_build
        self._advance(0, f"{builds} of {len(self.results)} builds")

    def _reference_score(self, info: BuildInfo) -> Accuracy | None:
        """Return an fp16 build's accuracy where a build quantized from the same checkpoint has just measured it."""
        for other in self.results:
            same_model = other.info.checkpoint_fingerprint == info.checkpoint_fingerprint
            if info.is_reference and same_model and other.accuracy and other.accuracy.reference_perplexity:
                return Accuracy(other.accuracy.reference_perplexity, other.accuracy.tokens)
        return None

    def _levels(self, build: BuildResult, parts: Parts) -> Iterator[BuildResult]:
        """Yield the build again with each further level; the server runs only if a level is missing."""
        kept = {load.key: parts.find(build.info.fingerprint, load.key, self._conditions(load)) for load in self.loads}
        for part in kept.values():
            if part is not None:
                build = self._with_part(build, part)
                self._advance(self.section.requests_per_level, build.info.name)
        yield build
        missing = [load for load in self.loads if kept[load.key] is None]
        if not missing:
            return
        prompts = self._prompts(build.info)
        timeout_s = build.info.recipe["serving"]["start_timeout_s"]
        with serve(Path(build.info.directory), timeout_s) as served:
            for load in missing:
                level = self._level(served, load, *prompts[load.key], build.info.name)
                part = Part(served.runner, served.version, level)
                parts.keep(build.info.fingerprint, load.key, self._conditions(load), part)
                build = self._with_part(build, part)
                yield build

    def _with_part(self, build: BuildResult, part: Part) -> BuildResult:
        info = replace(build.info, served_by=part.served_by, server=part.server)
        levels = sorted([*build.levels, part.level], key=lambda level: self.loads.index(level.load))
        return replace(build, info=info, levels=levels)

    def _level(self, served: Served, load: Load, warm_up: list[str], prompts: list[str], name: str) -> LevelResult:
        limits = Limits(self.section.output_tokens, self.section.request_timeout_s, self.section.level_timeout_s)
        what = f"{name}, {load.label}"
        self._advance(0, what)
        short = replace(limits, output_tokens=min(WARM_UP_TOKENS, limits.output_tokens))
        warm = run_level(served.address, Load(concurrency=WARM_UP_REQUESTS), warm_up, short, self.section.seed)
        served.check()
        if all(trace.error for trace in warm.traces):
            raise ServerError(f"every warm-up request failed, the first with: {warm.traces[0].error}")
        seen = run_level(served.address, load, prompts, limits, self.section.seed, lambda: self._advance(1, what))
        served.check(settle_s=SETTLE_S if any(trace.error for trace in seen.traces) else 0)
        return _level_result(load, seen, self.section)

    def _prompts(self, info: BuildInfo) -> dict[str, tuple[list[str], list[str]]]:
        """Return warm-up prompts and prompts of each level; no text is ever sent twice to one server."""
        s = self.section
        longest = longest_sequence_tokens(info)
        if s.prompt_tokens + s.output_tokens > longest:
            raise SitsError(
                f"prompts of {s.prompt_tokens} and answers of {s.output_tokens} tokens do not fit its engine, which "
                f"holds {longest} together; lower sweep.prompt_tokens or sweep.output_tokens"
            )
        each = WARM_UP_REQUESTS + s.requests_per_level
        tokenizer = load_tokenizer(weights_directory(info))
        prompts = make_prompts(tokenizer, each * len(self.loads), s.prompt_tokens, s.seed)
        return {
            load.key: (prompts[i : i + WARM_UP_REQUESTS], prompts[i + WARM_UP_REQUESTS : i + each])
            for load, i in zip(self.loads, range(0, len(prompts), each), strict=True)
        }

    def _conditions(self, load: Load | None = None) -> dict[str, Any]:
        """What must be the same for a figure to be taken over: settings, machine, versions, and the level."""
        settings = self.section.model_dump(mode="json")
        if load is not None:
            for unrelated in ("accuracy", "concurrencies", "request_rates", "arrival_cv"):
                del settings[unrelated]
            settings["load"] = vars(load)
        return {"settings": settings, "machine": self.machine, "versions": self.versions}

    def _advance(self, steps: int, what: str) -> None:
        self.done += steps
        self.progress(self.done, self.steps_of_a_build * len(self.results), what)

    def _accuracy_progress(self, name: str) -> Progress:
        began = self.done

        def update(done: int, total: int, what: str) -> None:
            self.done = began + self.section.requests_per_level * done // total
            self._advance(0, f"{name}, {what}")

        return update


def _level_result(load: Load, seen: LevelTraces, section: SweepSection) -> LevelResult:
    first_ns = min(trace.started_ns for trace in seen.traces)
    requests = []
    for trace in seen.traces:
        figures = request_figures(trace)
        requests.append(
            {
                "start_ms": (trace.started_ns - first_ns) / NS_PER_MS,
                "ttft_ms": figures.ttft_ms if figures else None,
                "e2e_ms": (trace.ended_ns - trace.started_ns) / NS_PER_MS,
                "tokens": trace.tokens,
                "error": trace.error,
            }
        )
    return LevelResult(
        load=load,
        metrics=level_metrics(seen.traces, section.slo.ttft_ms, section.slo.tpot_ms),
        client_cpu=seen.client_cpu,
        late_ms=seen.late_ms,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        requests=requests,
    )
