"""Recipe curves: write what a run measured beside its recipe, for `treadle recipes` to show.

    python bench/recipe_curve.py calculator runs/treadle/calculator --machine 'two CPU cores'

The metrics are the run's own. The command is the recipe's, or the one given by --command where keys were changed.
"""

import argparse
import json
from pathlib import Path

from treadle.cli.recipes import MEASURED, read_card
from treadle.config.load import RECIPES, recipe_names
from treadle.inspect.run_records import RunRecords
from treadle.journal.reader import JournalReader

METRICS = ("validation/success", "reward/mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=recipe_names())
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--machine", required=True, help="what it ran on, such as 'one H200'")
    parser.add_argument("--command", help="how it was started, where that is not the recipe's command")
    parser.add_argument("--metric", action="append", help=f"instead of {', '.join(METRICS)}; repeatable")
    arguments = parser.parse_args()
    recorded = RunRecords(arguments.run_dir).metrics()
    missing = [name for name in arguments.metric or METRICS if name not in recorded]
    if missing:
        parser.error(f"the run has no {', '.join(missing)}; it has {', '.join(recorded)}")
    names = arguments.metric or METRICS
    curves = {name: [[step, float(f"{value:.4g}")] for step, value in recorded[name]] for name in names}
    lines = [
        f'  "command": {json.dumps(arguments.command or read_card(arguments.recipe).command)},',
        f'  "machine": {json.dumps(arguments.machine)},',
        f'  "minutes": {read_minutes(arguments.run_dir):.1f},',
        '  "curves": {',
        ",\n".join(f'    "{name}": {json.dumps(curve)}' for name, curve in curves.items()),
        "  }",
    ]
    path = RECIPES / arguments.recipe / MEASURED
    path.write_text("\n".join(["{", *lines, "}"]) + "\n", encoding="utf-8")
    print(f"{path}: {', '.join(f'{name} {curve[-1][1]}' for name, curve in curves.items())}")


def read_minutes(run_dir: Path) -> float:
    """From the first metrics to the last, by the clock of the run."""
    times: list[float] = []
    with JournalReader.open(run_dir) as reader:
        after = 0
        while page := reader.metrics(after):
            times += [measured.time for measured in page]
            after = page[-1].id
    return (max(times) - min(times)) / 60


if __name__ == "__main__":
    main()
