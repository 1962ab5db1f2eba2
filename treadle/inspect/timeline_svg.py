"""Timeline drawing: lanes over time, as one SVG that needs nothing else.

Owns layout, colours and ticks. Knows nothing of journals or training. Everything is given by column, as the share of
the column's time, so ten steps and ten thousand take the same room: short columns show single spans, long ones how
busy they were.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

COLUMNS = 1000
"""Pixels that the time of a run is spread over."""

_LEFT, _RIGHT, _TOP = 150, 40, 152
_TALL, _LOW, _GAP = 110, 26, 10
_LEAST = 3.0
"""Least width in pixels, however short the span."""

_MAX_TICKS = 10
_MAX_NAMED_MARKS = 12
_INTERVALS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800)

_COLOURS = {
    "sample": ("#4c78d0", "#6f9bf0"),
    "validate": ("#a06cc8", "#bd93e0"),
    "train": ("#35935a", "#4fbf7a"),
    "wait": ("#e0922f", "#e8a552"),
    "hold": ("#c25b8e", "#dc83b0"),
    "push": ("#1f97a6", "#45bccb"),
    "save": ("#7d838c", "#9aa1ab"),
    "idle": ("#d9c9a3", "#5c5442"),
}
"""On light and on dark ground."""


@dataclass(frozen=True, slots=True)
class Band:
    """One kind of thing in a lane, by column: a share of the time from 0 to 1, or a count."""

    name: str
    colour: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Lane:
    """Bands on top of each other."""

    name: str
    bands: tuple[Band, ...]
    top: float = 1.0
    """The value that reaches the upper edge; lanes of counts say it."""

    @property
    def height(self) -> int:
        return _LOW if self.top == 1.0 else _TALL


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A labelled moment: a column, which may be a fraction, and its name."""

    column: float
    name: str


@dataclass(frozen=True, slots=True)
class ChartNote:
    """Tooltip of some columns."""

    begins: float
    ends: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A run, ready to be drawn."""

    title: str
    remarks: tuple[str, ...]
    seconds: float
    """Total of all columns."""
    lanes: tuple[Lane, ...]
    steps: tuple[ChartMark, ...] = ()
    """Where steps ended, in order; those that would stand too close are left out."""
    starts: tuple[ChartMark, ...] = ()
    """Where the run was resumed."""
    notes: tuple[ChartNote, ...] = ()


def draw_svg(chart: Chart) -> str:
    """The picture as SVG text."""
    width, bottom = _LEFT + COLUMNS + _RIGHT, _TOP + sum(lane.height + _GAP for lane in chart.lanes)
    height = bottom + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{_quote(chart.title)}">',
        f"<style>{_style()}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        *_head(chart),
        *_grid(chart, bottom),
        *_lanes(chart.lanes),
        *_moments(chart, bottom),
        *(_note(note, bottom) for note in chart.notes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style() -> str:
    """Plain rules for light ground, and others over them for dark: not every viewer knows variables."""
    text = "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:%s}"
    rules = ".ground{fill:%s}.line{stroke:%s;stroke-width:1;fill:none}.soft{fill:%s}"
    light = [text % "#1f2328", rules % ("#ffffff", "#d8dce1", "#656d76")]
    dark = ["text{fill:#e6edf3}", rules % ("#0d1117", "#30363d", "#9198a1")]
    for name, (on_light, on_dark) in _COLOURS.items():
        light.append(f".{name}{{fill:{on_light}}}")
        dark.append(f".{name}{{fill:{on_dark}}}")
    fixed = (
        ".title{font-size:17px;font-weight:600}.small{font-size:11px}.end{text-anchor:end}.middle{text-anchor:middle}"
    )
    fixed += ".start{stroke-dasharray:3 3}.note{fill:#888888;fill-opacity:0}.note:hover{fill-opacity:0.18}"
    return f"{''.join(light)}{fixed}@media(prefers-color-scheme:dark){{{''.join(dark)}}}"


def _head(chart: Chart) -> Iterator[str]:
    yield f'<text class="title" x="20" y="30">{escape(chart.title)}</text>'
    for at, remark in enumerate(chart.remarks):
        yield f'<text class="soft" x="20" y="{52 + 17 * at}">{escape(remark)}</text>'
    x = 20
    named = dict.fromkeys((band.colour, band.name) for lane in chart.lanes for band in lane.bands)
    for colour, name in named:
        yield f'<rect class="{colour}" x="{x}" y="{_TOP - 46}" width="11" height="11" rx="2"/>'
        yield f'<text class="small" x="{x + 16}" y="{_TOP - 36}">{escape(name)}</text>'
        x += 34 + round(6.2 * len(name))


def _grid(chart: Chart, bottom: float) -> Iterator[str]:
    """Lines and labels of time below, of steps above."""
    for second, label in _time_ticks(chart.seconds):
        x = _LEFT + COLUMNS * second / max(chart.seconds, 1e-9)
        yield f'<path class="line" d="M{x:.1f} {_TOP}V{bottom}"/>'
        yield f'<text class="small soft middle" x="{x:.1f}" y="{bottom + 16}">{label}</text>'
    yield f'<text class="small soft end" x="{_LEFT - 20}" y="{bottom + 16}">time at work</text>'
    if chart.steps:
        yield f'<text class="small soft end" x="{_LEFT - 20}" y="{_TOP - 6}">after step</text>'


def _moments(chart: Chart, bottom: float) -> Iterator[str]:
    for mark in _spread(chart.steps):
        x = _LEFT + mark.column
        yield f'<path class="line" d="M{x:.1f} {_TOP - 3}V{_TOP + 3}"/>'
        yield f'<text class="small soft middle" x="{x:.1f}" y="{_TOP - 6}">{escape(mark.name)}</text>'
    for mark in chart.starts:
        x = _LEFT + mark.column
        yield f'<path class="line start" d="M{x:.1f} {_TOP}V{bottom + 22}"/>'
        if len(chart.starts) <= _MAX_NAMED_MARKS:
            yield f'<text class="small soft" x="{x + 3:.1f}" y="{bottom + 32}">{escape(mark.name)}</text>'


def _lanes(lanes: Sequence[Lane]) -> Iterator[str]:
    y = float(_TOP)
    for lane in lanes:
        base = y + lane.height
        yield f'<text class="end" x="{_LEFT - 12}" y="{y + lane.height / 2 + 4:.1f}">{escape(lane.name)}</text>'
        if lane.top != 1.0:
            yield f'<text class="small soft end" x="{_LEFT - 12}" y="{y + 12:.1f}">{lane.top:g}</text>'
        yield f'<path class="line" d="M{_LEFT} {base:.1f}H{_LEFT + COLUMNS}"/>'
        yield from _bands(lane, base)
        y = base + _GAP


def _bands(lane: Lane, base: float) -> Iterator[str]:
    below = [0.0] * COLUMNS
    for band in lane.bands:
        heights = [_height(value, lane) for value in band.values]
        path = _outline(below, heights, base)
        if path:
            yield f'<path class="{band.colour}" d="{path}"/>'
        below = [min(lane.height, low + high) for low, high in zip(below, heights, strict=True)]


def _height(value: float, lane: Lane) -> float:
    if value <= 0:
        return 0.0
    return round(min(lane.height, max(_LEAST, lane.height * value / lane.top)), 1)


def _outline(below: Sequence[float], heights: Sequence[float], base: float) -> str:
    """One box for each run of columns that are alike; those of height 0 are left out."""
    boxes, column = [], 0
    for (low, high), run in groupby(zip(below, heights, strict=True)):
        count = sum(1 for _ in run)
        if high:
            boxes.append(f"M{_LEFT + column} {base - low:.1f}v{-high:.1f}h{count}v{high:.1f}z")
        column += count
    return "".join(boxes)


def _note(note: ChartNote, bottom: float) -> str:
    x, width = _LEFT + note.begins, max(1.0, note.ends - note.begins)
    return (
        f'<rect class="note" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{bottom - _TOP}">'
        f"<title>{escape(note.text)}</title></rect>"
    )


def _spread(marks: Sequence[ChartMark]) -> Iterator[ChartMark]:
    """As many as can be read side by side, the last among them."""
    room = COLUMNS / _MAX_TICKS * 0.6
    chosen: list[ChartMark] = []
    for mark in reversed(marks):
        if not chosen or chosen[-1].column - mark.column >= room:
            chosen.append(mark)
    yield from reversed(chosen)


def _time_ticks(seconds: float) -> Iterator[tuple[float, str]]:
    interval = next((item for item in _INTERVALS_S if seconds / item <= _MAX_TICKS), _INTERVALS_S[-1])
    for at in range(int(seconds / interval) + 1):
        yield at * interval, format_duration(at * interval)


def format_duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    named = [f"{count} {unit}" for count, unit in units if count]
    return " ".join(named[:2]) or "0 s"


def _quote(text: str) -> str:
    return escape(text, {'"': "&quot;"})
