"""Defaults that pages state are those of the classes.

A page states a default in one of these ways, with the whole key, or a last part that means the same everywhere:

    `reward.success_threshold` (1)                       a value in brackets right after the key
    `rollout.agent.num_workers`, null by default         a value, then "by default"
    | `cpu_offload` | `false` | …                        a row of a table with a column `default`
"""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

import treadle
from treadle.config import SFTRunConfig
from treadle.config.section import REQUIRED, fields_of, types_of
from treadle.config.tree import is_section, subclasses

ROOT = Path(treadle.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KEY = r"`([a-z_]+(?:\.[a-z_0-9]+)*)`"
VALUE = r"(-?[\d.,]*\d(?:e-?\d+)?|null|true|false)"
STATED = (re.compile(rf"{KEY}\s+\({VALUE}\)"), re.compile(rf"{KEY},\s+{VALUE}\s+by\s+default"))


@cache
def defaults() -> dict[str, object]:
    """Every key by its whole name, and by its last part where all sections that have it agree."""
    found: dict[str, object] = {}

    def visit(cls: type, path: str) -> None:
        for variant in subclasses(cls):
            if not variant.__module__.startswith("treadle.config."):
                continue
            for name, key in fields_of(variant).items():
                hint = types_of(variant)[name]
                if is_section(hint):
                    visit(hint, f"{path}{name}.")
                elif key.default is not REQUIRED:
                    found.setdefault(f"{path}{name}", key.default)

    visit(SFTRunConfig, "")
    short: dict[str, list[object]] = {}
    for name, value in found.items():
        for tail in {name.rpartition(".")[2], ".".join(name.split(".")[-2:])}:
            short.setdefault(tail, []).append(value)
    return {
        **{tail: values[0] for tail, values in short.items() if all(value == values[0] for value in values)},
        **found,
    }


def stated_in(text: str) -> list[tuple[str, str]]:
    """Each key with the default that a page states for it."""
    found = [pair for pattern in STATED for pair in pattern.findall(text)]
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        if "default" in rows[0]:
            at = rows[0].index("default")
            found += [(row[0].strip("`"), row[at].strip("`")) for row in rows[2:] if len(row) > at]
    return found


def wrong_in(text: str) -> list[str]:
    known = defaults()
    return [
        f"{key}: the page says {value}, the class {known[key]!r}"
        for key, value in stated_in(text)
        if key in known and yaml.safe_load(value.replace(",", "")) != known[key]
    ]


def test_every_default_on_a_page_is_that_of_the_class():
    wrong = {page.name: wrong_in(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_pages_state_defaults_that_are_compared():
    known = defaults()
    compared = {key for page in PAGES for key, _ in stated_in(page.read_text(encoding="utf-8")) if key in known}
    assert {"reward.success_threshold", "rollout.agent.num_workers", "fsdp_size"} <= compared
    assert len(compared) >= 8


@pytest.mark.parametrize(
    "text",
    [
        "`reward.success_threshold` (2)",
        "`rollout.n`, 8 by default",
        "| key | default |\n|---|---|\n| `fsdp_size` | 3 |\n",
    ],
)
def test_a_page_that_says_otherwise_is_found(text):
    assert len(wrong_in(text)) == 1
