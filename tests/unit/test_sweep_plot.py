"""Axes and charts of the report."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_trt.sweep.plot import LEAST_SPAN, Axis, Chart, Point, colour, draw, nice_axis

figures = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)


@given(figures, st.booleans())
def test_an_axis_holds_its_values_between_round_ticks_that_read_differently(values: list[float], zero: bool) -> None:
    axis = nice_axis("ms", values, include_zero=zero)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert not zero or axis.low <= 0
    places = [value for value, _ in axis.ticks]
    assert (places[0], places[-1]) == (axis.low, axis.high)
    assert 3 <= len(places) <= 9
    texts = [text for _, text in axis.ticks]
    assert len(set(texts)) == len(texts)
    for value, text in axis.ticks:
        assert float(text) == pytest.approx(value, rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(-0.2, 0.9), min_size=1, max_size=12))
def test_a_percent_axis_holds_negative_changes_too(values: list[float]) -> None:
    axis = nice_axis("perplexity", values, include_zero=True, suffix=" %", scale=100)
    assert axis.low <= min(*values, 0) <= max(*values, 0) <= axis.high
    for value, text in axis.ticks:
        assert float(text.removesuffix(" %")) == pytest.approx(100 * value, rel=1e-6, abs=1e-6)


def test_a_small_difference_does_not_fill_the_chart() -> None:
    axis = nice_axis("ms", [2279, 2292], include_zero=False)
    assert axis.place(2292, 0, 1) - axis.place(2279, 0, 1) < 0.05
    wide = nice_axis("ms", [100, 400], include_zero=False)
    assert wide.place(400, 0, 1) - wide.place(100, 0, 1) > 0.6
    assert pytest.approx(0.3) == LEAST_SPAN


def test_marks_stand_where_their_values_are() -> None:
    axis = Axis("x", 0, 10, ((0, "0"), (10, "10")))
    points = [Point(0, 0, 1, ("a",)), Point(10, 10, 2, ("b",), solid=False)]
    chart = Chart("t", "d", axis, axis, points, front=[(0, 0)])
    svg = draw(chart, "one")
    left, right, bottom, top = chart.plot
    dots = re.findall(r'class="dot" cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert [(float(x), float(y)) for x, y in dots] == [(left, bottom), (right, top)]
    assert svg.count(" solid") == svg.count(" hollow") == 1
    assert f'class="front" d="M{left}.0 {top}V{bottom}.0H{right}"' in svg


def test_texts_in_a_chart_are_escaped() -> None:
    axis = Axis("<x>", 0, 1, ((0, "<0>"), (1, "&")))
    svg = draw(Chart("<t>", "<d>", axis, axis, [Point(0, 0, 1, ('<tip>"',))], level_y=(0, "<fp16>")), "one")
    for raw in ("<x>", "<t>", "<d>", "<0>", "<fp16>", "<tip>"):
        assert raw not in svg
    assert 'aria-label="&lt;tip&gt;&quot;"' in svg


def test_ten_colours_then_again() -> None:
    assert [colour(build) for build in (1, 10, 11)] == ["c1", "c10", "c1"]
