"""The sweep's report: JSON that parses back, Markdown and HTML that show everything, safely and without the network."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sits_trt.sweep.compare import pareto_front, verdicts
from sits_trt.sweep.html import render_html
from sits_trt.sweep.markdown import render_markdown
from sits_trt.sweep.report import write_report
from sits_trt.sweep.result import Accuracy, BuildResult, Status, SweepResult
from sits_trt.sweep.tables import MISSING, build_table, level_notes, significant
from sits_trt.sweep.workload import Load
from tests.support.sweep_results import made_build, made_level, made_result

VOID = {"meta", "input", "br", "path", "circle", "rect"}


class Page(HTMLParser):
    """Checks that tags close in order; collects tags, attributes, and text by the tag around it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def count(self, tag: str, **attributes: str) -> int:
        return sum(t == tag and attributes.items() <= a.items() for t, a in self.tags)


@pytest.fixture
def three() -> SweepResult:
    return made_result([made_build(0, quantized=False), made_build(1), made_build(2)])


def test_json_parses_back_to_the_same_result(tmp_path: Path, three: SweepResult) -> None:
    write_report(three, tmp_path)
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert data["schema_version"] == 1
    assert data["builds"][1]["levels"][2]["load"] == {"concurrency": 16, "requests_per_s": None, "arrival_cv": 1.0}
    assert data["builds"][1]["levels"][2]["metrics"]["ttft_ms"]["count"] == 12
    assert data["settings"]["slo"] == {"ttft_ms": 2000.0, "tpot_ms": 200.0}
    assert SweepResult.from_dict(data) == three


def test_page_needs_nothing_from_outside(three: SweepResult) -> None:
    html = render_html(three)
    assert not re.search(r"(?i)\b(?:https?|ftp|wss?|data|file):|//[a-z0-9]", html)
    page = Page(html)
    assert not page.count("script")
    assert not page.count("link")
    assert not page.count("img")
    for _, attributes in page.tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "onclick", "onload"}
    assert "url(" not in html
    assert "@import" not in html


@pytest.mark.parametrize("count", [1, 2, 10, 13])
def test_page_draws_every_build_at_every_level(count: int) -> None:
    result = made_result([made_build(0, quantized=False), *(made_build(n) for n in range(1, count))])
    html = render_html(result)
    page = Page(html)
    # Three latencies with a panel a level, and the throughput chart.
    assert page.count("svg") == 3 * 3 + 1
    assert len([a for t, a in page.tags if t == "g" and "mark" in (a.get("class") or "")]) == count * 3 * (3 + 1)
    for build in result.builds:
        assert page.texts.count(("h3", build.info.name)) == 1
    identities = [a["id"] for _, a in page.tags if "id" in a]
    assert len(identities) == len(set(identities))
    most = max(int(m) for m in re.findall(r'class="mark m(\d+) ', html))
    assert f".m{most}:hover" in html


def test_labels_and_marks_lie_inside_the_charts() -> None:
    html = render_html(made_result([made_build(0, quantized=False), *(made_build(n) for n in range(1, 10))]))
    charts = re.findall(r'<svg class="chart" viewBox="0 0 (\d+) (\d+)".*?</svg>', html, flags=re.DOTALL)
    assert charts
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
        for x, y in re.findall(r'<(?:circle class="dot" c|text class="number" )x="([\d.]+)" c?y="([\d.]+)"', svg):
            assert 0 < float(x) < width
            assert 0 < float(y) < height


def test_numbers_of_close_builds_do_not_lie_on_each_other() -> None:
    same_speed = [made_build(0, quantized=False), *(made_build(n) for n in range(1, 6))]
    crowded = [replace(b, levels=[made_level(Load(concurrency=1), 9.0)], accuracy=Accuracy(20, 9)) for b in same_speed]
    svg = render_html(made_result(crowded, concurrencies=(1,))).split("<svg")[1]
    spots = [(float(x), float(y)) for x, y in re.findall(r'class="number" x="([\d.]+)" y="([\d.]+)"', svg)]
    assert len(spots) == 6
    for i, (x, y) in enumerate(spots):
        assert all(abs(x - ox) > 6 or abs(y - oy) > 10 for ox, oy in spots[:i])


def test_names_and_reasons_cannot_inject_markup(tmp_path: Path) -> None:
    nasty = '<img src=x onerror="alert(1)">&\'"|`*_[x](y)\n# h'
    build = made_build(1)
    info = replace(build.info, name=nasty, model=nasty, weights=nasty, target=nasty, served_by=nasty, directory=nasty,
                   recipe={"name": nasty, "quantization": {"scheme": "w4a16"}})  # fmt: skip
    level = made_level(Load(concurrency=1), 9.0, errors=(nasty,))
    evil = BuildResult(info, Status.FAILED, nasty, build.accuracy, [level])
    result = made_result([made_build(0, quantized=False), evil])
    write_report(replace(result, versions={nasty: nasty}), tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not page.count("img")
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert any(nasty.splitlines()[0] in text for _, text in page.texts)
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<img" not in markdown.replace("\\<img", "")
    assert not re.search(r"^# h", markdown, flags=re.MULTILINE)
    rows = [line for line in markdown.splitlines() if line.startswith("| 2 |")]
    assert rows
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 15 for row in rows)


def test_failed_and_unfinished_builds_stay_in_sight() -> None:
    failed = made_build(1, status=Status.FAILED, reason="the server ended while loading", accuracy=None, levels=[])
    part = made_build(2)
    unfinished = replace(part, status=Status.UNFINISHED, reason="stopped after 1 of 3 levels", levels=part.levels[:1])
    result = made_result([made_build(0, quantized=False), failed, unfinished])
    page = Page(render_html(result))
    texts = [text for _, text in page.texts]
    assert "int4-1 failed: the server ended while loading" in texts
    assert "int4-2 is unfinished: stopped after 1 of 3 levels" in texts
    assert texts.count("not measured") == 2
    assert "No load was measured." in texts
    markdown = render_markdown(result)
    assert "int4-1 failed: the server ended while loading" in markdown
    assert markdown.count("not measured") == 3 + 2


def test_nothing_measured_is_said_and_not_drawn() -> None:
    result = made_result([made_build(1, status=Status.FAILED, reason="no server", accuracy=None, levels=[])])
    page = Page(render_html(result))
    assert not page.count("svg")
    assert any("nothing to plot" in text for _, text in page.texts)


def test_missing_figures_are_dashes_not_zeros() -> None:
    silent = made_level(Load(concurrency=1), 9.0, errors=("refused",) * 12)
    build = made_build(1, levels=[silent])
    markdown = render_markdown(made_result([build], concurrencies=(1,)))
    row = next(line for line in markdown.splitlines() if line.startswith("| 1 stream "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["0", "12"]
    assert cells[3:15] == ["–"] * 12
    assert level_notes(build) == ["1 stream: 12 requests failed: refused"]


def test_notes_say_when_the_client_was_measured_instead() -> None:
    level = made_level(Load(requests_per_s=10.0), 9.0)
    busy = made_build(1, levels=[replace(level, client_cpu=0.93, late_ms=40.0)])
    notes = level_notes(busy)
    assert any("load generator used 93% of a core" in note for note in notes)
    assert any("sent 40 ms after its time" in note for note in notes)
    assert level_notes(made_build(1, levels=[level])) == []


def test_figures_of_a_stand_in_are_not_passed_off_as_the_targets() -> None:
    native = made_build(0, quantized=False)
    native = replace(native, info=replace(native.info, backend="eager", target="cpu"))
    stand_in = made_build(1)
    for text in (render_html(made_result([native, stand_in])), render_markdown(made_result([native, stand_in]))):
        assert "throughput of int4-1 are those of the eager runner on cpu of this machine" in text
        assert "not those of tensorrt-rtx on a100-80gb" in text
    assert "every build" in render_html(made_result([stand_in, made_build(2)]))
    on_target = replace(stand_in, info=replace(stand_in.info, served_by="tensorrt runner on cuda: an A100 is here"))
    assert "measure them again" not in render_html(made_result([native, on_target]))


def test_pareto_front() -> None:
    assert pareto_front([(3, 0), (1, 5), (2, 6), (2, 1), (4, 0), (5, -1)]) == [1, 3, 0, 5]
    assert pareto_front([(1, 1), (1, 1), (2, 1)]) == [0, 1]
    assert pareto_front([]) == []


def native(build: BuildResult) -> BuildResult:
    """The same build, served by the engine it is made for."""
    return replace(build, info=replace(build.info, served_by="tensorrt-rtx runner on cuda: an A100 is here"))


def test_verdicts_say_where_quantization_pays() -> None:
    base = native(made_build(0, quantized=False))
    slow_at_16 = native(made_build(1))
    slow_at_16 = replace(slow_at_16, levels=[*slow_at_16.levels[:2], made_level(Load(concurrency=16), 60.0)])
    (verdict,) = verdicts(made_result([base, slow_at_16]))
    assert verdict.speedups["1 stream"] == pytest.approx(10 / 8.5, rel=1e-3)
    assert verdict.sentence == (
        "int4-1 against fp16: 1.18× the speed at 1 stream, 1.18× at 4 streams, 0.57× at 16 streams; "
        "perplexity +2.1%; 0.44× the weight bytes. Prefer it for 1 stream and 4 streams, and fp16 for 16 streams."
    )


def test_verdicts_compare_only_builds_of_one_checkpoint_that_were_measured() -> None:
    base, other = native(made_build(0, quantized=False)), native(made_build(1))
    foreign = replace(other, info=replace(other.info, checkpoint_fingerprint="d" * 32))
    assert verdicts(made_result([base, foreign])) == []
    assert verdicts(made_result([replace(base, levels=[]), other])) == []
    assert verdicts(made_result([other])) == []
    equal = replace(other, levels=base.levels)
    assert verdicts(made_result([base, equal]))[0].sentence.endswith("No difference in speed.")


def test_a_stand_in_says_nothing_of_speed() -> None:
    (verdict,) = verdicts(made_result([native(made_build(0, quantized=False)), made_build(1)]))
    assert verdict.speedups == {}
    assert verdict.sentence == "int4-1 against fp16: perplexity +2.1%; 0.44× the weight bytes."


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.005, "1.00"), (99.96, "100.0"), (1234.5, "1234"), (-2.5, "-2.50")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_accuracy_columns_name_what_they_hold() -> None:
    table = build_table(made_result([made_build(0, quantized=False), made_build(1)]))
    heads = [name for _, name in table.columns]
    reference, quantized = (dict(zip(heads, row, strict=True)) for row in table.rows)
    names = ("change", "KL", "top-1", "top-5", "equal answers", "equal tokens")
    assert [quantized[name] for name in names] == ["+2.1%", "0.0100", "96.0%", "94.5%", "1 of 4", "78 of 128"]
    assert [reference[name] for name in names] == ["reference", *[MISSING] * 5]
