"""The report's tables as rows of text, made once for Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sits_trt.sweep.compare import is_stand_in, runner_of
from sits_trt.sweep.metrics import Summary
from sits_trt.sweep.result import BuildResult, LevelResult, Status, SweepResult

MISSING = "–"
BUSY_CLIENT = 0.8
"""From this share of a core on, the load generator may have held the server back."""


@dataclass(frozen=True)
class Table:
    """`columns` are (group, name); columns of one group stand together. Rows are texts in their order."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]


def significant(value: float) -> str:
    """Return three significant digits, without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - int(f"{abs(value):e}".partition("e")[2]))
    return f"{value:.{digits}f}"


def _optional(value: float | None, show: Callable[[float], str] = significant) -> str:
    return MISSING if value is None else show(value)


def title(result: SweepResult) -> str:
    models = list(dict.fromkeys(build.info.model for build in result.builds))
    return f"Accuracy and latency of {models[0]}" if len(models) == 1 else "Accuracy and latency"


def subtitle(result: SweepResult) -> str:
    count = len(result.builds)
    gpus = result.machine["gpus"]
    where = ", ".join(gpus) if gpus else f"{result.machine['cpu']} ({result.machine['cores']} cores, no GPU)"
    return (
        f"{count} build{'s' if count != 1 else ''} served by Triton Inference Server on {where}, {result.created[:10]}"
    )


def build_table(result: SweepResult) -> Table:
    """One row a build: what it is, what its accuracy is, whether it was measured in full."""
    names = ("", "Build"), ("", "Weights"), ("", "Made for"), ("", "Served here by"), ("", "Weights, MB")
    accuracy = "Accuracy against fp16"
    figures = (
        "perplexity",
        "change",
        "KL",
        "top-1",
        "top-5",
        "equal answers",
        "equal tokens",
    )
    columns = (("", "#"), *names, *((accuracy, figure) for figure in figures), ("", "Status"))
    return Table(columns, tuple(_build_row(number, build) for number, build in enumerate(result.builds, 1)))


def _build_row(number: int, build: BuildResult) -> tuple[str, ...]:
    info, found = build.info, build.accuracy
    row = [str(number), info.name, info.weights, info.target, runner_of(build) or MISSING]
    row.append(significant(info.weights_bytes / 1e6) if info.weights_bytes else MISSING)
    if found is None:
        row.extend([MISSING] * 7)
    elif info.is_reference:
        row.extend([significant(found.perplexity), "reference", *[MISSING] * 5])
    elif info.source_quantized:
        # What it lost when it was quantized is not known; what its KV cache loses is no loss against fp16.
        row.extend([significant(found.perplexity), *[MISSING] * 6])
    else:
        row.extend([significant(found.perplexity), f"{found.perplexity_increase:+.1%}"])
        row.append(_optional(found.kl_divergence, lambda v: f"{v:.4f}"))
        row.append(_optional(found.top1_agreement, lambda v: f"{v:.1%}"))
        row.append(_optional(found.top5_agreement, lambda v: f"{v:.1%}"))
        row.append(MISSING if found.exact_prompts is None else f"{found.exact_prompts} of {found.prompts}")
        row.append(MISSING if found.exact_tokens is None else f"{found.exact_tokens:.0f} of {found.answer_tokens}")
    return (*row, build.status.value)


def stand_ins(result: SweepResult) -> str:
    """Say which measured builds were not served by the engine they are made for; empty when all were."""
    measured = [build for build in result.builds if build.levels]
    others = [build for build in measured if is_stand_in(build)]
    if not others:
        return ""
    engines = " and ".join(dict.fromkeys(f"{b.info.backend} on {b.info.target}" for b in others))
    names = "every build" if len(others) == len(measured) > 1 else " and ".join(b.info.name for b in others)
    return (
        f"Latency and throughput of {names} are those of the {runner_of(others[0])} of this machine, which takes the "
        f"same weights, not those of {engines}: measure them again there. Accuracy does not depend on it."
    )


def troubles(result: SweepResult) -> list[str]:
    """One sentence for each build that is not complete."""
    verbs = {Status.FAILED: "failed", Status.UNFINISHED: "is unfinished"}
    return [f"{b.info.name} {verbs[b.status]}: {b.reason}" for b in result.builds if b.status in verbs]


def level_table(build: BuildResult, result: SweepResult) -> Table:
    """One row a level, also for levels that were not measured."""
    percentiles = ("p50", "p95", "p99")
    columns = (
        ("", "Load"),
        ("Requests", "complete"),
        ("Requests", "failed"),
        *(("TTFT, ms", p) for p in percentiles),
        *(("ITL, ms", p) for p in percentiles),
        ("TPOT, ms", "p50"),
        ("TPOT, ms", "p95"),
        ("Gap, ms", "longest"),
        *(("End-to-end, ms", p) for p in percentiles),
        ("Per second", "tokens"),
        ("Per second", "requests"),
        ("Per second", "goodput"),
        ("Client", "CPU"),
    )
    measured = {level.load.key: level for level in build.levels}
    rows = []
    for load in result.loads():
        level = measured.get(load.key)
        cells = _level_cells(level) if level else ["not measured", *[MISSING] * (len(columns) - 2)]
        rows.append((load.label, *cells))
    return Table(columns, tuple(rows))


def _level_cells(level: LevelResult) -> list[str]:
    metrics = level.metrics
    bad = metrics.failed + metrics.empty
    return [
        str(metrics.completed),
        str(bad),
        *_percentiles(metrics.ttft_ms),
        *_percentiles(metrics.itl_ms),
        *_percentiles(metrics.tpot_ms)[:2],
        MISSING if metrics.gap_ms is None else significant(metrics.gap_ms.max),
        *_percentiles(metrics.e2e_ms),
        significant(metrics.output_tokens_per_s),
        significant(metrics.requests_per_s),
        significant(metrics.goodput_per_s),
        f"{level.client_cpu:.0%}",
    ]


def _percentiles(summary: Summary | None) -> list[str]:
    return [MISSING] * 3 if summary is None else [significant(v) for v in (summary.p50, summary.p95, summary.p99)]


def level_notes(build: BuildResult) -> list[str]:
    """What a reader must know of a build's levels: failures by cause, a client that was too busy or late."""
    notes: list[str] = []
    for level in build.levels:
        label, metrics = level.load.label, level.metrics
        notes.extend(f"{label}: {count} requests failed: {error}" for error, count in metrics.errors.items())
        if metrics.empty:
            notes.append(f"{label}: {metrics.empty} requests ended without a single token")
        if level.client_cpu >= BUSY_CLIENT:
            share = f"{level.client_cpu:.0%} of a core"
            notes.append(f"{label}: the load generator used {share}, so the server may be faster than this")
        if is_late(level):
            notes.append(f"{label}: a request was sent {level.late_ms:.0f} ms after its time")
    return notes


def is_late(level: LevelResult) -> bool:
    """Say whether an open loop lost its pace: late by more than a tenth of the mean gap."""
    rate = level.load.requests_per_s
    return bool(rate) and level.late_ms > 100 / (rate or 1)


def setting_rows(result: SweepResult) -> list[tuple[str, str]]:
    """The sweep's settings for a reader."""
    s = result.settings
    accuracy = s["accuracy"]
    rows = [("Loads", ", ".join(load.label for load in result.loads()))]
    if s["request_rates"]:
        kind = "Poisson" if s["arrival_cv"] == 1 else f"gamma, coefficient of variation {s['arrival_cv']:g}"
        rows.append(("Arrivals of the open loop", kind))
    return [
        *rows,
        ("Requests a level", str(s["requests_per_level"])),
        ("Prompt", f"{s['prompt_tokens']} tokens, each prompt different from its first words on"),
        ("Answer", f"{s['output_tokens']} tokens, greedy, never shorter"),
        ("Goodput bounds", f"TTFT ≤ {s['slo']['ttft_ms']:g} ms and TPOT ≤ {s['slo']['tpot_ms']:g} ms"),
        ("Time limits", f"{s['request_timeout_s']} s a request, {s['level_timeout_s']} s a level"),
        ("Seed", str(s["seed"])),
        (
            "Accuracy text",
            f"{accuracy['text']}, {accuracy['blocks']} blocks of {accuracy['block_tokens']} tokens; "
            f"{accuracy['prompts']} greedy answers of {accuracy['exact_match_tokens']} tokens",
        ),
    ]


def machine_rows(result: SweepResult) -> list[tuple[str, str]]:
    machine = result.machine
    gpus = ", ".join(machine["gpus"]) or "none"
    return [
        ("Measured", result.created),
        ("CPU", f"{machine['cpu']}, {machine['cores']} cores"),
        ("Memory", f"{machine['memory_gb']:.0f} GB"),
        ("GPU", gpus),
        ("System", machine["system"]),
        ("Versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())),
    ]


DEFINITIONS = (
    ("TTFT", "Time to first token: from the start of a request to the first message that carries a generated token."),
    (
        "ITL",
        "Inter-token latency: the time between two tokens. Tokens that come in one message share the time since "
        "the message before.",
    ),
    ("TPOT", "Time per output token: a request's mean ITL. Answers of one token have none."),
    ("Gap", "The longest time between two messages with tokens: the worst stall that a reader saw."),
    ("End-to-end", "From the start of a request to the end of its stream."),
    (
        "Start of a request",
        "When it was sent; with requests/s, when it was due, so that a late client does not flatter the server.",
    ),
    (
        "Percentiles",
        "Linear interpolation between the closest ranks, over complete requests only (ITL: over all their tokens). "
        "With few requests p99 is close to the maximum.",
    ),
    (
        "Per second",
        "Tokens, requests, and requests within the goodput bounds, of complete requests, divided by the time from "
        "the first start to the last end.",
    ),
    ("Failed", "Refused, broken off, late, or ended without a token. Counted, and in no other figure."),
    ("Client CPU", "Share of one core that the load generator used. Near 100 % it is the client that was measured."),
    (
        "Accuracy",
        "Of the checkpoint that the build was made from, evaluated in float32 by the reference model, against the "
        "fp16 checkpoint it was quantized from. It shows the cost of quantization, not the engine's own rounding.",
    ),
    (
        "Change, KL, top-1, top-5",
        "Perplexity relative to fp16; mean Kullback-Leibler divergence of the build's next-token distribution from "
        "that of fp16, in nats a token; share of tokens after which both find the same next token most likely; "
        "mean share of the five that fp16 finds most likely which are among the build's five.",
    ),
    (
        "Equal answers, tokens",
        "Greedy answers that are the same as those of fp16, token by token; mean number of tokens until the first "
        "difference.",
    ),
)
