"""Metric curves of one or several runs: as text for a terminal, as SVG of our own, as PNG by matplotlib.

Owns which metrics are shown where none is named, the common axes of several runs, and the drawing. Every picture of a
metric has the same range for all runs, so that they can be compared by eye. Reads runs through `run_records`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from math import ceil, isfinite, log10
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from treadle.errors import ConfigError, Mistake, RunError, nearest
from treadle.inspect.run_records import Curve, RunRecords

DEFAULT_METRICS = (
    "validation/success",
    "validation/loss",
    "reward/mean",
    "sft/loss",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "actor/ppo_kl",
    "rollout/truncated",
    "batch/no_signal",
    "staleness/mean",
    "rollout/tokens_per_s",
    "sft/tokens_per_s",
)
"""Shown where none is named, as far as a run has them: whether it learns, whether it is healthy, how fast it is."""

FORMATS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class MetricPanel:
    """One metric of all runs that have it, with common axes."""

    name: str
    curves: Mapping[str, Curve]
    """By run."""
    steps: tuple[int, int]
    range: tuple[float, float]
    dropped: int = 0
    """Values that are not finite, and so have no place on an axis."""


def read_panels(run_dirs: Sequence[Path], patterns: Sequence[str] = ()) -> list[MetricPanel]:
    """The metrics that the patterns name (`reward/*`), in their order; of several runs, those that any of them has."""
    runs = {name: RunRecords(run_dir).metrics() for name, run_dir in name_runs(run_dirs).items()}
    known = sorted({name for metrics in runs.values() for name in metrics})
    if not known:
        raise RunError(f"{', '.join(map(str, run_dirs))}: no metrics are recorded; only training runs have them")
    panels = [_panel(name, runs) for name in _choose(known, patterns)]
    return [panel for panel in panels if panel is not None]


def name_runs(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """A short name for each run: the last part of its path, or all of it where two would share that."""
    short = [run_dir.resolve().name for run_dir in run_dirs]
    return {
        name if short.count(name) == 1 else str(run_dir): run_dir for name, run_dir in zip(short, run_dirs, strict=True)
    }


def _choose(known: Sequence[str], patterns: Sequence[str]) -> list[str]:
    if not patterns:
        return [name for name in DEFAULT_METRICS if name in known] or list(known)
    chosen, mistakes = dict[str, None](), list[Mistake]()
    for pattern in patterns:
        found = [name for name in known if fnmatchcase(name, pattern)]
        chosen |= dict.fromkeys(found)
        if not found:
            fix = nearest(pattern, known) or "--list prints the names of all metrics"
            mistakes.append(Mistake("--metric", f"no run has a metric {pattern!r}", pattern, fix=fix))
    if mistakes:
        raise ConfigError(mistakes)
    return list(chosen)


def _panel(name: str, runs: Mapping[str, Mapping[str, Curve]]) -> MetricPanel | None:
    """None where no value is finite."""
    given = {run: metrics[name] for run, metrics in runs.items() if name in metrics}
    finite = {run: [point for point in curve if isfinite(point[1])] for run, curve in given.items()}
    curves = {run: curve for run, curve in finite.items() if curve}
    if not curves:
        return None
    dropped = sum(map(len, given.values())) - sum(map(len, curves.values()))
    steps = [step for curve in curves.values() for step, _ in curve]
    values = [value for curve in curves.values() for _, value in curve]
    return MetricPanel(name, curves, (min(steps), max(steps)), (min(values), max(values)), dropped)


_ROWS, _LABEL = 5, 9
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille letter by row and column: four dots high, two wide."""


def draw_text(panel: MetricPanel, width: int = 80) -> str:
    """One block of lines for each run, under the name of the metric."""
    lines = [panel.name + (f" ({panel.dropped} values are not finite, and are left out)" if panel.dropped else "")]
    if panel.range[0] == panel.range[1]:
        return f"{lines[0]}\n{'':{_LABEL}}  {format_value(panel.range[0])} at every step"
    for run, curve in panel.curves.items():
        last_step, last = curve[-1]
        told = f"{format_value(curve[0][1])} → {format_value(last)} at step {last_step}"
        lines.append(f"{'':{_LABEL}}  {run}: {told}" if len(panel.curves) > 1 else f"{'':{_LABEL}}  {told}")
        lines += _plot(panel, curve, max(10, width - _LABEL - 3))
    first, last_step = panel.steps
    lines.append(f"{'':{_LABEL}}  step {first}" + f"{last_step}".rjust(max(1, width - _LABEL - 8 - len(str(first)))))
    return "\n".join(lines)


def _plot(panel: MetricPanel, curve: Curve, width: int) -> Iterator[str]:
    cells = [[0] * width for _ in range(_ROWS)]
    for x, y in _line(panel, curve, width * 2 - 1, _ROWS * 4 - 1):
        row, column = _ROWS - 1 - y // 4, x // 2
        cells[row][column] |= _DOTS[3 - y % 4][x % 2]
    least, most = panel.range
    labels = {0: format_value(most), _ROWS - 1: format_value(least)}
    for at, row_of_cells in enumerate(cells):
        letters = "".join(chr(0x2800 + bits) if bits else " " for bits in row_of_cells)
        yield f"{labels.get(at, ''):>{_LABEL}} │{letters}".rstrip()


def _line(panel: MetricPanel, curve: Curve, width: int, height: int) -> Iterator[tuple[int, int]]:
    """Dots of the curve, points joined by straight lines."""
    points = [(round(x * width), round(y * height)) for x, y in _scaled(panel, curve)]
    for (x0, y0), (x1, y1) in pairwise(points):
        reach = max(abs(x1 - x0), abs(y1 - y0), 1)
        yield from ((round(x0 + (x1 - x0) * at / reach), round(y0 + (y1 - y0) * at / reach)) for at in range(reach))
    yield points[-1]


def _scaled(panel: MetricPanel, curve: Curve) -> Iterator[tuple[float, float]]:
    """Points between 0 and 1 on both axes; a metric that never changes lies in the middle."""
    (first, last), (least, most) = panel.steps, panel.range
    for step, value in curve:
        x = (step - first) / (last - first) if last > first else 0.0
        yield x, (value - least) / (most - least) if most > least else 0.5


def format_value(value: float) -> str:
    """A number in few letters."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 if value == 0 else max(0, 3 - ceil(log10(abs(value)))) if abs(value) >= 1 else 3
        return f"{value:,.{digits}f}" if value != int(value) else f"{value:,.0f}"
    return f"{value:.1e}"


def write_picture(panels: Sequence[MetricPanel], path: Path) -> None:
    """Write the curves as SVG or PNG, by the ending of the path."""
    if path.suffix not in FORMATS:
        raise ConfigError([Mistake("--output", f"must end in {' or '.join(FORMATS)}", str(path))])
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        _write_png(panels, path)
    else:
        path.write_text(draw_svg(panels), encoding="utf-8")


_WIDTH, _HEIGHT, _GAP, _TOP = 420, 190, 60, 50
_COLUMNS = 2
_COLOURS = ("#4c78d0", "#e0922f", "#35935a", "#a06cc8", "#c25b8e", "#1f97a6", "#7d838c", "#b8860b")
"""One for each run, in turn; legible on light and on dark ground."""


def draw_svg(panels: Sequence[MetricPanel]) -> str:
    """The curves as one SVG that needs nothing else."""
    runs = list(dict.fromkeys(run for panel in panels for run in panel.curves))
    width = _COLUMNS * (_WIDTH + _GAP) + _GAP
    height = _TOP + ceil(len(panels) / _COLUMNS) * (_HEIGHT + _GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="metrics of {escape(", ".join(runs), {chr(34): "&quot;"})}">',
        "<style>text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
        ".ground{fill:#ffffff}.axis{stroke:#d8dce1;fill:none}.soft{fill:#656d76;font-size:11px}"
        ".name{font-weight:600}.end{text-anchor:end}.curve{fill:none;stroke-width:1.6;stroke-linejoin:round}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.ground{fill:#0d1117}.axis{stroke:#30363d}"
        ".soft{fill:#9198a1}}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        *_legend(runs),
    ]
    for at, panel in enumerate(panels):
        row, column = divmod(at, _COLUMNS)
        parts += _svg_panel(panel, runs, _GAP + column * (_WIDTH + _GAP), _TOP + row * (_HEIGHT + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(runs: Sequence[str]) -> Iterator[str]:
    x = _GAP
    for at, run in enumerate(runs):
        yield f'<rect x="{x}" y="14" width="12" height="12" rx="2" fill="{_COLOURS[at % len(_COLOURS)]}"/>'
        yield f'<text x="{x + 18}" y="24">{escape(run)}</text>'
        x += 40 + round(7 * len(run))


def _svg_panel(panel: MetricPanel, runs: Sequence[str], x: int, y: int) -> Iterator[str]:
    least, most = panel.range
    yield f'<text class="name" x="{x}" y="{y + 4}">{escape(panel.name)}</text>'
    top, bottom = y + 14, y + _HEIGHT
    yield f'<path class="axis" d="M{x} {top}V{bottom}H{x + _WIDTH}"/>'
    for value, at in ((most, top + 8), (least, bottom)):
        yield f'<text class="soft end" x="{x - 6}" y="{at}">{format_value(value)}</text>'
    yield f'<text class="soft" x="{x}" y="{bottom + 15}">step {panel.steps[0]}</text>'
    yield f'<text class="soft end" x="{x + _WIDTH}" y="{bottom + 15}">{panel.steps[1]}</text>'
    for run, curve in panel.curves.items():
        colour = _COLOURS[runs.index(run) % len(_COLOURS)]
        points = [(x + px * _WIDTH, bottom - py * (bottom - top)) for px, py in _scaled(panel, curve)]
        shown = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        if len(points) == 1:
            yield f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{colour}"/>'
        yield f'<polyline class="curve" stroke="{colour}" points="{shown}">'
        yield f"<title>{escape(run)}: {format_value(curve[-1][1])} at step {curve[-1][0]}</title></polyline>"


def _write_png(panels: Sequence[MetricPanel], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "pip install 'treadle[plot]', or give a path that ends in .svg, which needs no package"
        mistake = Mistake("--output", "PNG needs matplotlib", str(path), fix=fix, missing="package")
        raise ConfigError([mistake]) from error
    rows = ceil(len(panels) / _COLUMNS)
    figure: Any = Figure(figsize=(5.2 * _COLUMNS, 2.8 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for panel, axis in zip(panels, axes, strict=False):
        for run, curve in panel.curves.items():
            steps, values = zip(*curve, strict=True)
            axis.plot(steps, values, label=run.replace("$", r"\$"), marker="." if len(curve) < 20 else None)
        axis.set_title(panel.name.replace("$", r"\$"), fontsize=10)
        axis.set_xlabel("step", fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if any(len(panel.curves) > 1 for panel in panels):
        axes[0].legend(fontsize=8)
    figure.savefig(path)
