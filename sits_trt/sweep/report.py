"""Writing a sweep's report: report.json for programs, report.md and report.html for people."""

from __future__ import annotations

import json
from pathlib import Path

from sits_trt.sweep.html import render_html
from sits_trt.sweep.markdown import render_markdown
from sits_trt.sweep.result import SweepResult

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"


def write_report(result: SweepResult, directory: Path) -> None:
    """Write the three files into `directory`, which must exist."""
    text = json.dumps(result.to_dict(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    (directory / JSON_NAME).write_text(text, encoding="utf-8")
    (directory / MARKDOWN_NAME).write_text(render_markdown(result), encoding="utf-8")
    (directory / HTML_NAME).write_text(render_html(result), encoding="utf-8")
