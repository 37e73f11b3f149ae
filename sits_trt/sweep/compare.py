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

    `speedups` maps level labels to how many times faster the median request ends; `sentence` is for people.
    """

    build: str
    baseline: str
    speedups: dict[str, float]
    perplexity_increase: float | None
    sentence: str


def verdicts(result: SweepResult) -> list[Verdict]:
    """Return one verdict for each measured build that has an unquantized twin in the sweep."""
    found = []
    for build in result.builds:
        baseline = _baseline(result, build)
        if baseline is None:
            continue
        speedups = {}
        for load in result.loads():
            ours, theirs = build.level(load.key), baseline.level(load.key)
            if ours and theirs and ours.e2e_ms and theirs.e2e_ms:
                speedups[load.label] = theirs.e2e_ms.p50 / ours.e2e_ms.p50
        if speedups:
            increase = build.accuracy.perplexity_increase if build.accuracy else None
            sentence = _sentence(build.info.name, baseline.info.name, speedups, increase)
            found.append(Verdict(build.info.name, baseline.info.name, speedups, increase, sentence))
    return found


def _baseline(result: SweepResult, build: BuildResult) -> BuildResult | None:
    if not build.info.quantized:
        return None
    same_model = (
        other
        for other in result.builds
        if not other.info.quantized
        and other.levels
        and other.info.checkpoint_fingerprint == build.info.checkpoint_fingerprint
    )
    return next(same_model, None)


def _sentence(name: str, baseline: str, speedups: dict[str, float], increase: float | None) -> str:
    faster = [label for label, ratio in speedups.items() if ratio > 1 + SAME_WITHIN]
    slower = [label for label, ratio in speedups.items() if ratio < 1 - SAME_WITHIN]
    ratios = ", ".join(f"{ratio:.2f}× at {label}" for label, ratio in speedups.items()).replace("×", "× the speed", 1)
    cost = "" if increase is None else f"; perplexity {increase:+.1%}"
    match bool(faster), bool(slower):
        case True, True:
            advice = f"Prefer it for {_list(faster)}, and {baseline} for {_list(slower)}"
        case True, False:
            advice = "It is never slower"
        case False, True:
            advice = f"It is never faster here: {baseline} is the better choice unless memory decides"
        case _:
            advice = "No difference in speed"
    return f"{name} against {baseline}: {ratios}{cost}. {advice}."


def _list(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
