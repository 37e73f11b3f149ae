"""Comparing builds: who is on the Pareto front, and where quantization pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sits_trt.sweep.result import BuildResult, SweepResult


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other one beats, by rising first value; less is better in both.

    Of equal points each is on the front.
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    front: list[int] = []
    best = float("inf")
    for i in order:
        x, y = points[i]
        if y < best or (front and points[front[-1]] == (x, y)):
            front.append(i)
            best = y
    return front


SAME_WITHIN = 0.05
"""Medians that differ by less are called equal: two runs of one build differ as much."""


@dataclass(frozen=True)
class Verdict:
    """A build beside the unquantized build of the same checkpoint.

    `speedups` maps level labels to how many times faster the median request ends; it is empty where either was
    served by a stand-in, as that says nothing of the engines. `sentence` is for people.
    """

    build: str
    baseline: str
    speedups: dict[str, float]
    sentence: str


def runner_of(build: BuildResult) -> str:
    """The runner that served the build, without the reason."""
    return build.info.served_by.partition(":")[0]


def is_stand_in(build: BuildResult) -> bool:
    """Say whether the build was served by the eager runner in place of the engine that it is made for."""
    return build.info.backend != "eager" and runner_of(build).startswith("eager")


def verdicts(result: SweepResult) -> list[Verdict]:
    """Return one verdict for each measured build that has an unquantized twin in the sweep."""
    found = []
    for build in result.builds:
        baseline = _baseline(result, build)
        if baseline is not None and build.levels:
            speedups = {} if is_stand_in(build) or is_stand_in(baseline) else _speedups(build, baseline, result)
            found.append(Verdict(build.info.name, baseline.info.name, speedups, _sentence(build, baseline, speedups)))
    return found


def _baseline(result: SweepResult, build: BuildResult) -> BuildResult | None:
    if build.info.is_reference:
        return None
    same_model = (
        other
        for other in result.builds
        if other.info.is_reference
        and other.levels
        and other.info.checkpoint_fingerprint == build.info.checkpoint_fingerprint
    )
    return next(same_model, None)


def _speedups(build: BuildResult, baseline: BuildResult, result: SweepResult) -> dict[str, float]:
    speedups = {}
    for load in result.loads():
        ours, theirs = build.level(load.key), baseline.level(load.key)
        if ours and theirs and ours.e2e_ms and theirs.e2e_ms:
            speedups[load.label] = theirs.e2e_ms.p50 / ours.e2e_ms.p50
    return speedups


def _sentence(build: BuildResult, baseline: BuildResult, speedups: dict[str, float]) -> str:
    name = baseline.info.name
    facts = []
    if speedups:
        ratios = [f"{ratio:.2f}× at {label}" for label, ratio in speedups.items()]
        facts.append(", ".join(ratios).replace("×", "× the speed", 1))
    if build.accuracy is not None:
        facts.append(f"perplexity {build.accuracy.perplexity_increase:+.1%}")
    if baseline.info.weights_bytes:
        facts.append(f"{build.info.weights_bytes / baseline.info.weights_bytes:.2f}× the weight bytes")
    advice = f" {_advice(name, speedups)}." if speedups else ""
    return f"{build.info.name} against {name}: {'; '.join(facts)}.{advice}"


def _advice(baseline: str, speedups: dict[str, float]) -> str:
    faster = [label for label, ratio in speedups.items() if ratio > 1 + SAME_WITHIN]
    slower = [label for label, ratio in speedups.items() if ratio < 1 - SAME_WITHIN]
    match bool(faster), bool(slower):
        case True, True:
            return f"Prefer it for {_list(faster)}, and {baseline} for {_list(slower)}"
        case True, False:
            return "It is never slower"
        case False, True:
            return f"It is never faster here: {baseline} is the better choice unless memory decides"
        case _:
            return "No difference in speed"


def _list(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
