"""The report as one HTML page: no script, no request to anywhere, every text escaped by the template engine."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import sits_trt
from sits_trt.sweep import tables
from sits_trt.sweep.charts import LATENCIES, pareto_charts, throughput_chart
from sits_trt.sweep.compare import verdicts
from sits_trt.sweep.plot import colour, draw
from sits_trt.sweep.result import BuildResult, SweepResult


def render_html(result: SweepResult) -> str:
    """Return the page. It can be opened from disk, mailed, or printed."""
    here = files("sits_trt.sweep")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((here / "page.html").read_text(encoding="utf-8"))
    charts = {latency: pareto_charts(result, latency) for latency in LATENCIES}
    throughput = throughput_chart(result)
    drawn = [chart for panels in charts.values() for chart in panels] + ([throughput] if throughput else [])
    most_points = max((len(chart.points) for chart in drawn), default=0)
    return template.render(
        title=tables.title(result),
        subtitle=tables.subtitle(result),
        style=Markup((here / "page.css").read_text(encoding="utf-8") + _tip_rules(most_points)),  # noqa: S704  our own file
        colour=colour,
        troubles=tables.troubles(result),
        stand_ins=tables.stand_ins(result),
        verdicts=[verdict.sentence for verdict in verdicts(result)],
        builds=_grouped(tables.build_table(result)),
        pareto=[
            {
                "key": latency.key,
                "label": latency.label,
                "svgs": [_svg(draw(chart, f"{latency.key}{i}")) for i, chart in enumerate(panels)],
            }
            for latency, panels in charts.items()
            if panels
        ],
        throughput=_svg(draw(throughput, "throughput")) if throughput else "",
        loads=", ".join(load.label for load in result.loads()),
        details=[_details(build, result) for build in result.builds],
        settings=tables.setting_rows(result),
        machine=tables.machine_rows(result),
        definitions=tables.DEFINITIONS,
        version=sits_trt.__version__,
    )


def _details(build: BuildResult, result: SweepResult) -> dict[str, Any]:
    info = build.info
    return {
        "name": info.name,
        "status": build.status.value,
        "reason": build.reason,
        "measured": bool(build.levels),
        "levels": _grouped(tables.level_table(build, result)),
        "notes": tables.level_notes(build),
        "provenance": [
            ("Build", info.directory),
            ("Repository fingerprint", info.fingerprint),
            ("Checkpoint fingerprint", info.checkpoint_fingerprint),
            ("Backend", info.backend),
            ("Served here by", info.served_by or tables.MISSING),
            ("Triton Inference Server", info.server or tables.MISSING),
        ],
        "recipe": json.dumps(info.recipe, indent=2),
    }


def _grouped(table: tables.Table) -> dict[str, Any]:
    """Add to a table the spans of its column groups, which the template engine cannot count."""
    groups = [{"name": name, "span": len(list(run))} for name, run in groupby(group for group, _ in table.columns)]
    return {"columns": table.columns, "rows": table.rows, "groups": groups}


def _svg(text: str) -> Markup:
    return Markup(text)  # noqa: S704  plot.draw escapes what it is given


def _tip_rules(most: int) -> str:
    """Style rules that show a mark's tip while the mark is pointed at or has the keyboard's focus."""
    shown = (f".m{i}:hover~.tip.m{i},.m{i}:focus-visible~.tip.m{i}" for i in range(most))
    return ",".join(shown) + "{visibility:visible}\n" if most else ""
