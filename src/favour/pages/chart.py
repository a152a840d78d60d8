"""Small charts as SVG, without a plotting library: axes, lines, bands, markers.

Colours are classes (see `style`), so one drawing serves light and dark pages; every marker can carry a `<title>` that
browsers show when it is pointed at. A value v of an axis [a, b] lies at (v − a)/(b − a) of its length, or the same of
logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from favour.pages.style import CHART, PALETTE

NAMESPACE = "http://www.w3.org/2000/svg"


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plain_label(value: float, step: float) -> str:
    if 0 < step < 1e-3 and abs(value) < 100 * step:
        power = math.floor(math.log10(step) + 1e-9)
        return f"{value / 10.0**power:g}·10{str(power).translate(_RAISED)}" if value else "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 2
    if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1  # a step of 2.5 or 0.25
    return f"{value:,.{decimals}f}".replace("-", "−")


@dataclass(frozen=True)
class Axis:
    """The range of an axis, its scale and its label; `form` writes a tick."""

    low: float
    high: float
    label: str = ""
    log: bool = False
    form: Callable[[float], str] | None = None

    def at(self, value: float) -> float:
        """Where a value lies, 0 … 1 inside the axis."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, wanted: int = 5) -> list[tuple[float, str]]:
        """Values and what to write there; about as many as wanted."""
        if self.log:
            return self._decades()
        raw = (self.high - self.low) / wanted
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        values = [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(v, self.form(v) if self.form else plain_label(v + 0.0, step)) for v in values]

    def _decades(self) -> list[tuple[float, str]]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5)):
            values = [d * 10.0**k for k in decades for d in digits]
            values = [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]
            if len(values) >= 3:
                break
        return [(v, self.form(v) if self.form else f"{v:,g}") for v in values]


def around(values: Sequence[float], share: float = 0.06, **rest: object) -> Axis:
    """An axis that holds the values, with some room; outliers are left out (see `fences`)."""
    low, high = min(values), max(values)
    if rest.get("log"):
        room = (high / low) ** share if high > low else 2.0
        return Axis(low / room, high * room, **rest)  # type: ignore[arg-type]
    room = share * (high - low) or abs(high) * 0.05 or 1.0
    return Axis(low - room, high + room, **rest)  # type: ignore[arg-type]


def fences(values: Sequence[float], kept: Sequence[float] = ()) -> tuple[float, float]:
    """The range of the values without far outliers: within two interquartile ranges; `kept` are always inside."""
    ordered = sorted(values)
    q1, q3 = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
    room = 2 * (q3 - q1)
    inside = [v for v in ordered if q1 - room <= v <= q3 + room] + list(kept)
    return min(inside), max(inside)


def shape(kind: str, x: float, y: float, r: float) -> str:
    """Path data of a marker."""
    if kind == "circle":
        return f"M{x - r:.1f} {y:.1f}a{r:.1f} {r:.1f} 0 1 0 {2 * r:.1f} 0a{r:.1f} {r:.1f} 0 1 0 {-2 * r:.1f} 0z"
    if kind == "square":
        return f"M{x - r:.1f} {y - r:.1f}h{2 * r:.1f}v{2 * r:.1f}h{-2 * r:.1f}z"
    if kind == "triangle":
        return f"M{x:.1f} {y - 1.2 * r:.1f}l{1.1 * r:.1f} {2 * r:.1f}h{-2.2 * r:.1f}z"
    if kind == "diamond":
        s = 1.5 * r
        return f"M{x:.1f} {y - s:.1f}l{s:.1f} {s:.1f}l{-s:.1f} {s:.1f}l{-s:.1f} {-s:.1f}z"
    if kind == "cross":
        s = 1.1 * r
        return f"M{x - s:.1f} {y - s:.1f}l{2 * s:.1f} {2 * s:.1f}m0 {-2 * s:.1f}l{-2 * s:.1f} {2 * s:.1f}"
    raise ValueError(kind)


class Chart:
    """One pair of axes.

    Args:
        x, y: The axes.
        title: On top; says what the vertical axis shows.
        width, height: Of the drawing, in units that are pixels at natural size.
        frame: With axes, grid and ticks.
    """

    def __init__(
        self, x: Axis, y: Axis, title: str = "", width: float = 340, height: float = 245, frame: bool = True
    ) -> None:
        self.x, self.y, self.title, self.width, self.height, self.frame = x, y, title, width, height, frame
        longest = max((len(label) for _, label in y.ticks()), default=0) if frame else 0
        self.left = 12 + 6.3 * longest + (14 if y.label else 0) if frame else 8
        self.right, self.top, self.bottom = 12, 26 if title else 8, (38 if x.label else 22) if frame else 8
        self.inside: list[str] = []  # clipped to the plot
        self.above: list[str] = []

    @property
    def size(self) -> tuple[float, float]:
        return self.width - self.left - self.right, self.height - self.top - self.bottom

    def _inner(self, x: float, y: float) -> str:
        w, h = self.size
        return f"{w * self.x.at(x):.1f} {h * (1 - self.y.at(y)):.1f}"

    def line(self, xs: Sequence[float], ys: Sequence[float], kind: str) -> None:
        """Through all points; `kind` are classes, such as `line c-cached`."""
        if len(xs) > 1:
            points = "L".join(self._inner(x, y) for x, y in zip(xs, ys, strict=True))
            self.inside.append(f'<path class="{kind}" d="M{points}"/>')

    def band(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], kind: str) -> None:
        there = [self._inner(x, y) for x, y in zip(xs, low, strict=True)]
        back = [self._inner(x, y) for x, y in zip(xs, high, strict=True)][::-1]
        self.inside.append(f'<path class="{kind}" d="M{"L".join(there + back)}z"/>')

    def dots(self, xs: Sequence[float], ys: Sequence[float], kind: str) -> None:
        """Many points as one path: strokes of no length with round ends."""
        points = "".join(f"M{self._inner(x, y)}h0" for x, y in zip(xs, ys, strict=True))
        if points:
            self.inside.append(f'<path class="{kind}" d="{points}"/>')

    def steps(self, xs: Sequence[float], ys: Sequence[float], kind: str) -> None:
        """A frontier: each value holds until the next point."""
        path = [(xs[0], ys[0])]
        for x, y in zip(xs[1:], ys[1:], strict=True):
            path += [(x, path[-1][1]), (x, y)]
        self.line([p[0] for p in path], [p[1] for p in path], kind)

    def mark(self, x: float, y: float, marker: str, kind: str, tip: str = "", r: float = 3.4) -> None:
        """A marker; one outside the axes is drawn on their edge."""
        w, h = self.size
        px = self.left + w * min(max(self.x.at(x), 0.0), 1.0)
        py = self.top + h * (1 - min(max(self.y.at(y), 0.0), 1.0))
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.above.append(f'<path class="mark {kind}" d="{shape(marker, px, py, r)}">{title}</path>')

    def text(self, x: float, y: float, words: str, kind: str = "", dx: float = 0, dy: float = 0) -> None:
        w, h = self.size
        px, py = self.left + w * self.x.at(x) + dx, self.top + h * (1 - self.y.at(y)) + dy
        self.above.append(f'<text class="{kind}" x="{px:.1f}" y="{py:.1f}">{escape(words)}</text>')

    def content(self) -> str:
        """Everything inside the `<svg>` element."""
        w, h = self.size
        parts = []
        if self.frame:
            grid, labels = [], []
            across = self.x.ticks()
            if sum(6.3 * len(label) + 12 for _, label in across) > w:
                across = self.x.ticks(2)
            for value, label in across:
                px = self.left + w * self.x.at(value)
                grid.append(f"M{px:.1f} {self.top}v{h:.1f}")
                labels.append(f'<text class="middle" x="{px:.1f}" y="{self.top + h + 15:.1f}">{escape(label)}</text>')
            for value, label in self.y.ticks():
                py = self.top + h * (1 - self.y.at(value))
                grid.append(f"M{self.left:.1f} {py:.1f}h{w:.1f}")
                labels.append(f'<text class="end" x="{self.left - 6:.1f}" y="{py + 3.8:.1f}">{escape(label)}</text>')
            corner = f"M{self.left:.1f} {self.top}v{h:.1f}h{w:.1f}"
            parts = [f'<path class="grid" d="{"".join(grid)}"/><path class="frame" d="{corner}"/>', *labels]
            if self.x.label:
                middle = f'x="{self.left + w / 2:.1f}" y="{self.height - 6:.1f}"'
                parts.append(f'<text class="middle" {middle}>{escape(self.x.label)}</text>')
            if self.y.label:
                place = f"translate(11 {self.top + h / 2:.1f}) rotate(-90)"
                parts.append(f'<text class="middle" transform="{place}">{escape(self.y.label)}</text>')
        if self.title:
            parts.append(f'<text class="title" x="{4 if self.frame else 8}" y="15">{escape(self.title)}</text>')
        box = f'x="{self.left:.1f}" y="{self.top}" width="{w:.1f}" height="{h:.1f}"'
        return "".join([*parts, f"<svg {box}>{''.join(self.inside)}</svg>", *self.above])

    def svg(self, alt: str) -> str:
        """Inline, for the page that has the style."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        size += f' style="max-width:{1.35 * self.width:.0f}px"'
        return f'<svg class="chart" {size} role="img" aria-label="{escape(alt, quote=True)}">{self.content()}</svg>'


def sheet(charts: Sequence[Chart], alt: str, columns: int = 3, legend: Sequence[tuple[str, str, str]] = ()) -> str:
    """A file of its own: charts in rows; its colours follow the viewer's preference.

    `legend` has (marker, class, words).
    """
    columns = min(columns, len(charts))
    width, height = max(c.width for c in charts), max(c.height for c in charts)
    rows = math.ceil(len(charts) / columns)
    top = 24 if legend else 0
    parts, at = [], 8.0
    for marker, kind, words in legend:
        parts.append(f'<path class="mark full {kind}" d="{shape(marker, at + 6, 11, 4)}"/>')
        parts.append(f'<text x="{at + 16:.0f}" y="15">{escape(words)}</text>')
        at += 34 + 6.2 * len(words)
    for i, chart in enumerate(charts):
        x, y = width * (i % columns), top + height * (i // columns)
        box = f'x="{x:g}" y="{y:g}" width="{chart.width:g}" height="{chart.height:g}"'
        parts.append(f"<svg {box}>{chart.content()}</svg>")
    w, h = max(width * columns, at if legend else 0), top + height * rows
    return (
        f'<svg xmlns="{NAMESPACE}" class="chart" viewBox="0 0 {w:g} {h:g}" width="{w:g}" height="{h:g}" role="img">'
        f"<title>{escape(alt)}</title><style>{PALETTE}{CHART}</style>{''.join(parts)}</svg>\n"
    )
