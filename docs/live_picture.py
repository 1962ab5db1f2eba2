"""Live view of a training run, as an SVG: `python docs/live_picture.py RUN STEP docs/live.svg`.

The metrics are those that the run recorded; the drawing is the one that the terminal shows.
"""

import argparse
import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from treadle.inspect.run_records import RunRecords
from treadle.observe.training_progress import TrainingView

WIDTH = 84
FONT_FACE = re.compile(r"@font-face \{.*?\}\n?", re.DOTALL)
"""Fonts that rich would fetch from elsewhere; the reader's own is taken instead."""


def draw(run_dir: Path, step: int, title: str) -> str:
    """The view of the run while the step after `step` was sampled."""
    records = RunRecords(run_dir)
    curves = records.metrics()
    view = TrainingView(records.steps()[-1], quiet=True)
    view.watch(lambda: "rollout")
    for number in range(step + 1):
        at = {name: value for name, curve in curves.items() for where, value in curve if where == number}
        if number:
            view.on_step(number, at)
        if "validation/success" in at:
            view.on_validation(number, at["validation/success"])
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(view.draw())
    return FONT_FACE.sub("", console.export_svg(title=title, unique_id="live"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("step", type=int, help="how many steps are done")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="treadle train calculator")
    arguments = parser.parse_args()
    arguments.picture.write_text(draw(arguments.run_dir, arguments.step, arguments.title), encoding="utf-8")


if __name__ == "__main__":
    main()
