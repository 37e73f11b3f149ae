"""The report as Markdown, for a terminal, a pull request or a wiki."""

from __future__ import annotations

from sits_trt.sweep import tables
from sits_trt.sweep.compare import verdicts
from sits_trt.sweep.result import SweepResult


def render_markdown(result: SweepResult) -> str:
    parts = [f"# {_text(tables.title(result))}", _text(tables.subtitle(result))]
    parts.extend(f"> **{_text(trouble)}**" for trouble in tables.troubles(result))
    if stand_ins := tables.stand_ins(result):
        parts.append(f"> **{_text(stand_ins)}**")
    parts.extend(f"> {_text(verdict.sentence)}" for verdict in verdicts(result))
    parts.extend(["## Builds", _table(tables.build_table(result))])
    parts.append("## Latency and throughput of each build")
    for number, build in enumerate(result.builds, 1):
        parts.append(f"### {number}. {_text(build.info.name)}")
        parts.append(_table(tables.level_table(build, result)))
        if notes := tables.level_notes(build):
            parts.append("\n".join(f"- {_text(note)}" for note in notes))
    for heading, rows in (
        ("Settings", tables.setting_rows(result)),
        ("Machine", tables.machine_rows(result)),
        ("What the figures mean", tables.DEFINITIONS),
    ):
        parts.extend([f"## {heading}", "\n".join(f"- **{_text(name)}**: {_text(value)}" for name, value in rows)])
    return "\n\n".join(parts) + "\n"


def _table(table: tables.Table) -> str:
    header = [_text(f"{group} {name}".strip()) for group, name in table.columns]
    lines = [header, ["---"] * len(header), *([_text(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    """Escape what Markdown or the HTML inside it would act on; keep one line."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
