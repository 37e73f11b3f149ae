"""Charts as inline SVG: small, accessible, coloured by the page's style sheet, no library behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, hypot, log10

LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 42
DOT_RADIUS = 5
LEAST_SPAN = 0.3
LABEL_RADIUS = 7.5
"""A label is one or two digits; this circle covers them."""


@dataclass(frozen=True)
class Axis:
    """A linear axis. `ticks` are (value, text) from low to high, which are the ends of the axis."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float, start: float, end: float) -> float:
        return start + (value - self.low) / (self.high - self.low) * (end - start)


@dataclass(frozen=True)
class Point:
    """One mark. `build` is the build's number from 1, written beside the mark where `numbered`; `solid` marks
    stand on the Pareto front; `tip` holds the lines that are shown when it is pointed at."""

    x: float
    y: float
    build: int
    tip: tuple[str, ...]
    solid: bool = True
    numbered: bool = True


@dataclass(frozen=True)
class Chart:
    """What to draw: `front` as a staircase, `lines` through points of one build each, `level_y` as a dotted line."""

    title: str
    description: str
    x_axis: Axis
    y_axis: Axis
    points: Sequence[Point]
    front: Sequence[tuple[float, float]] = ()
    lines: Sequence[Sequence[Point]] = ()
    level_y: tuple[float, str] | None = None
    width: int = 360
    height: int = 264

    @property
    def plot(self) -> tuple[int, int, int, int]:
        """Left, right, bottom and top of the area that the axes span."""
        return LEFT, self.width - RIGHT, self.height - BOTTOM, TOP


def colour(build: int) -> str:
    """Return the style class of a build's colour; there are ten, then they repeat."""
    return f"c{(build - 1) % 10 + 1}"


def nice_axis(label: str, values: Sequence[float], *, include_zero: bool, suffix: str = "", scale: float = 1) -> Axis:
    """Return an axis that holds all `values` with round ticks; `scale` multiplies the tick texts.

    Without zero it spans at least `LEAST_SPAN` of the largest value, so that a small difference looks small.
    """
    low, high = min(values), max(values)
    if include_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    elif (lacking := LEAST_SPAN * high - (high - low)) > 0:
        low, high = low - lacking / 2, high + lacking / 2
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        low, high = low - abs(low) * 0.1, high + (abs(high) * 0.1 or 0.01)
    step = _nice_step((high - low) / 4)
    pad = 0.04 * (high - low)
    first = floor((low - (pad if low < 0 or not include_zero else 0)) / step)
    last = ceil((high + pad) / step)
    decimals = max(0, -floor(log10(step * scale) + 1e-9))
    ticks = [(k * step, f"{k * step * scale:.{decimals}f}{suffix}") for k in range(first, last + 1)]
    return Axis(label, ticks[0][0], ticks[-1][0], tuple(ticks))


def _nice_step(rough: float) -> float:
    power = 10 ** floor(log10(rough))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * 0.999)


def draw(chart: Chart, ident: str) -> str:
    """Return the chart as an <svg> element. `ident` must be unique in the page."""
    x0, x1, y0, y1 = chart.plot
    spots = [(chart.x_axis.place(p.x, x0, x1), chart.y_axis.place(p.y, y0, y1)) for p in chart.points]
    body = [
        f'<title id="{ident}-t">{escape(chart.title)}</title><desc id="{ident}-d">{escape(chart.description)}</desc>',
        f'<text class="chart-title" x="{x0}" y="16">{escape(chart.title)}</text>',
        *_grid(chart),
    ]
    if chart.level_y:
        value, text = chart.level_y
        y = chart.y_axis.place(value, y0, y1)
        body.append(f'<path class="reference" d="M{x0} {y:.1f}H{x1}"/>')
        body.append(f'<text class="note" x="{x0 + 4}" y="{y - 4:.1f}">{escape(text)}</text>')
    if chart.front:
        body.append(f'<path class="front" d="{_staircase(chart)}"/>')
    for line in chart.lines:
        path = "L".join(f"{chart.x_axis.place(p.x, x0, x1):.1f} {chart.y_axis.place(p.y, y0, y1):.1f}" for p in line)
        body.append(f'<path class="line {colour(line[0].build)}" d="M{path}"/>')
    body.extend(_marks(chart, spots, ident))
    return (
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="group" '
        f'aria-labelledby="{ident}-t {ident}-d">{"".join(body)}</svg>'
    )


def _grid(chart: Chart) -> list[str]:
    x0, x1, y0, y1 = chart.plot
    parts = []
    for value, text in chart.y_axis.ticks:
        y = chart.y_axis.place(value, y0, y1)
        parts.append(f'<path class="grid" d="M{x0} {y:.1f}H{x1}"/>')
        parts.append(f'<text class="tick" x="{x0 - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in chart.x_axis.ticks:
        x = chart.x_axis.place(value, x0, x1)
        parts.append(f'<path class="axis" d="M{x:.1f} {y0}v4"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y0 + 16}" text-anchor="middle">{escape(text)}</text>')
    parts.append(f'<path class="axis" d="M{x0} {y0}H{x1}"/>')
    parts.append(
        f'<text class="axis-label" x="{(x0 + x1) / 2}" y="{chart.height - 8}" text-anchor="middle">'
        f"{escape(chart.x_axis.label)}</text>"
    )
    middle = (y0 + y1) / 2
    parts.append(
        f'<text class="axis-label" transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_axis.label)}</text>"
    )
    return parts


def _staircase(chart: Chart) -> str:
    """The edge of the region that some build reaches: from the top down to the first point, then step by step."""
    x0, x1, y0, y1 = chart.plot
    path = ""
    for x, y in chart.front:
        px, py = chart.x_axis.place(x, x0, x1), chart.y_axis.place(y, y0, y1)
        path += f"H{px:.1f}V{py:.1f}" if path else f"M{px:.1f} {y1}V{py:.1f}"
    return f"{path}H{x1}"


def _marks(chart: Chart, spots: Sequence[tuple[float, float]], ident: str) -> list[str]:
    """Dots, their numbers, and after all of them the tips, so that no dot covers a tip."""
    labels = _place_labels(chart, spots)
    dots, tips = [], []
    for number, (point, (x, y), label) in enumerate(zip(chart.points, spots, labels, strict=True)):
        kind = "solid" if point.solid else "hollow"
        dots.append(
            f'<g class="mark m{number} {colour(point.build)} {kind}" tabindex="0" role="img" '
            f'aria-label="{escape("; ".join(point.tip))}"><circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="12"/>'
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{DOT_RADIUS}"/>{_label(point.build, x, y, label)}</g>'
        )
        tips.append(_tip(point, x, y, f"tip m{number}", chart.width))
    return dots + tips


def _label(build: int, x: float, y: float, at: tuple[float, float] | None) -> str:
    if at is None:
        return ""
    lx, ly = at
    leader = f'<path class="leader" d="M{x:.1f} {y:.1f}L{lx:.1f} {ly:.1f}"/>' if hypot(lx - x, ly - y) > 16 else ""
    return f'{leader}<text class="number" x="{lx:.1f}" y="{ly + 4:.1f}" text-anchor="middle">{build}</text>'


def _place_labels(chart: Chart, spots: Sequence[tuple[float, float]]) -> list[tuple[float, float] | None]:
    """Give each numbered mark's label the nearest free place around it, clear of dots, other labels and the edges."""
    taken = [(x, y, float(DOT_RADIUS)) for x, y in spots]
    places: list[tuple[float, float] | None] = []
    for point, (x, y) in zip(chart.points, spots, strict=True):
        if not point.numbered:
            places.append(None)
            continue
        best = min(_candidates(x, y), key=lambda c: (_crowding(c, taken, chart), hypot(c[0] - x, c[1] - y)))
        taken.append((*best, LABEL_RADIUS))
        places.append(best)
    return places


def _candidates(x: float, y: float) -> list[tuple[float, float]]:
    around = [(0, -1), (0.8, -0.8), (-0.8, -0.8), (1, 0), (-1, 0), (0.8, 0.8), (-0.8, 0.8), (0, 1)]
    return [(x + dx * far, y + dy * far) for far in (13, 22, 32, 44) for dx, dy in around]


def _crowding(place: tuple[float, float], taken: Sequence[tuple[float, float, float]], chart: Chart) -> float:
    """How far a label at `place` would lie over what is already drawn or past the plot's edges, in pixels."""
    x, y = place
    over = sum(max(0.0, radius + LABEL_RADIUS - hypot(x - tx, y - ty)) for tx, ty, radius in taken)
    x0, x1, y0, y1 = chart.plot
    past = max(0, x0 + 4 - x) + max(0, x - x1 - 8) + max(0, y1 - 4 - y) + max(0, y - y0 + 6)
    return round(over + past, 1)


def _tip(point: Point, x: float, y: float, classes: str, chart_width: int) -> str:
    width = 16 + 6.4 * max(len(line) for line in point.tip)
    height = 10 + 15 * len(point.tip)
    left = min(max(2.0, x - width / 2), chart_width - 2 - width)
    top = y - height - 12 if y - height - 12 > 0 else y + 12
    lines = "".join(
        f'<text x="{left + 8:.1f}" y="{top + 17 + 15 * row:.1f}">{escape(line)}</text>'
        for row, line in enumerate(point.tip)
    )
    box = f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}" rx="4"/>'
    return f'<g class="{classes}" aria-hidden="true">{box}{lines}</g>'
