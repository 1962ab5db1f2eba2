"""`treadle recipes`: the gallery of shipped configs, each with its command, its needs and the curve that was measured.

Owns how a card is read and shown. Beside `recipe.yaml`, `card.json` says what the recipe teaches and what must be
installed or fetched; `measured.json` says on what machine which command gave which metrics, as `bench/recipe_curve.py`
reads them off a run. Invariant: every shipped recipe has a card, and a curve is a run's own metrics.
"""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from treadle.cli.parser import Arguments, Commands, add_command
from treadle.errors import ConfigError, Mistake, nearest
from treadle.terminal import say

if TYPE_CHECKING:
    from treadle.inspect.curves import MetricPanel

CARD, MEASURED = "card.json", "measured.json"
MAX_COLUMNS = 100
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE = 40
"""Widest sparkline; longer curves are averaged into so many parts."""

Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run of the recipe gave: its command, the machine, its minutes, and metrics over the steps."""

    command: str
    machine: str
    minutes: float
    curves: dict[str, Curve]


@dataclass(frozen=True, slots=True)
class RecipeCard:
    """A recipe of the gallery."""

    name: str
    about: str
    command: str
    needs: str
    minutes: str
    prepare: tuple[str, ...] = ()
    """Commands that install or fetch what the recipe needs."""
    measured: MeasuredRun | None = None


def register(commands: Commands) -> None:
    examples = """
    examples:
      treadle recipes                    all of them, each with its command and its curve
      treadle recipes calculator         one: what it needs, and its curves in full
      treadle recipes --json             cards and measured curves
      treadle config show calculator     every key of a recipe

    A recipe is a config: treadle train NAME KEY=VALUE changes it. treadle init writes a project of your own.
    """
    command = add_command(commands, "recipes", recipes, examples)
    command.add_argument("name", nargs="?", metavar="NAME", help="show one recipe in full")
    command.add_argument("--json", action="store_true", help="a JSON array of cards, or with NAME one card")


def recipes(arguments: Arguments) -> int:
    """List the configs that come with treadle: command, needs, minutes, and the curve that was measured."""
    from treadle.config.load import recipe_names

    names = recipe_names()
    if arguments.name is not None and arguments.name not in names:
        fix = nearest(arguments.name, names) or f"the recipes are {', '.join(names)}"
        raise ConfigError([Mistake("NAME", "no such recipe", arguments.name, fix=fix)])
    cards = [read_card(name) for name in names]
    if arguments.name is not None:
        (card,) = [card for card in cards if card.name == arguments.name]
        say(json.dumps(asdict(card)) if arguments.json else describe(card))
    elif arguments.json:
        say(json.dumps([asdict(card) for card in cards]))
    else:
        say("\n\n".join(summarize(card) for card in cards))
        say("\ntreadle recipes NAME shows one in full; treadle init writes a project of your own")
    return 0


def read_card(name: str) -> RecipeCard:
    """The card of a recipe, with what was measured where there is such."""
    from treadle.config.load import RECIPES

    card: dict[str, Any] = json.loads((RECIPES / name / CARD).read_text(encoding="utf-8"))
    measured = RECIPES / name / MEASURED
    return RecipeCard(
        name=name,
        about=card["about"],
        command=card["command"],
        needs=card["needs"],
        minutes=card["minutes"],
        prepare=tuple(card["prepare"]),
        measured=_read_measured(json.loads(measured.read_text(encoding="utf-8"))) if measured.exists() else None,
    )


def _read_measured(values: dict[str, Any]) -> MeasuredRun:
    curves = {name: [(int(step), float(value)) for step, value in curve] for name, curve in values["curves"].items()}
    return MeasuredRun(values["command"], values["machine"], float(values["minutes"]), curves)


def summarize(card: RecipeCard) -> str:
    """A few lines for the list."""
    lines = [f"{card.name}: {card.about}", f"  {card.command}", f"  needs {card.needs}; {card.minutes}"]
    if card.measured is None:
        lines.append("  no curve is measured yet")
    else:
        width = max(len(metric) for metric in card.measured.curves)
        for metric, curve in card.measured.curves.items():
            first, last = curve[0][1], curve[-1][1]
            lines.append(f"  {metric:{width}}  {first:.3f} {sparkline(curve)} {last:.3f}  step {curve[-1][0]}")
    return "\n".join(lines)


def describe(card: RecipeCard) -> str:
    """The whole card, with its curves."""
    from shutil import get_terminal_size

    from treadle.config.load import RECIPES
    from treadle.inspect.curves import draw_text

    lines = [f"{card.name}: {card.about}", "", f"needs     {card.needs}", f"takes     {card.minutes}"]
    lines += [f"{'prepare' if at == 0 else '':8}  {command}" for at, command in enumerate(card.prepare)]
    lines += [f"train     {card.command}", f"config    {RECIPES / card.name / 'recipe.yaml'}", ""]
    if card.measured is None:
        return "\n".join([*lines, "no curve is measured yet"])
    told = card.measured
    lines += [f"measured  {told.command}", f"          on {told.machine}, {told.minutes:.3g} minutes", ""]
    width = min(get_terminal_size().columns, MAX_COLUMNS)
    panels = [_panel(card.name, metric, curve) for metric, curve in told.curves.items()]
    return "\n".join(lines) + "\n" + "\n\n".join(draw_text(panel, width) for panel in panels)


def sparkline(curve: Curve) -> str:
    """A letter for each value, or for the mean of several, between the least and the largest of the curve."""
    parts = min(SPARKLINE, len(curve))
    bounds = [at * len(curve) // parts for at in range(parts + 1)]
    values = [sum(value for _, value in curve[start:stop]) / (stop - start) for start, stop in pairwise(bounds)]
    least, most = min(values), max(values)
    reach = (most - least) or 1.0
    return "".join(BARS[round((value - least) / reach * (len(BARS) - 1))] for value in values)


def _panel(name: str, metric: str, curve: Curve) -> "MetricPanel":
    from treadle.inspect.curves import MetricPanel

    values = [value for _, value in curve]
    return MetricPanel(metric, {name: curve}, (curve[0][0], curve[-1][0]), (min(values), max(values)))
