"""Every config we ship or show loads: recipes, examples, and each YAML block of the README and the docs.

A block that is a fragment stands below `<!-- fragment -->`, or names what it is laid over: `<!-- file: A over B -->`.
One that shows mistakes says `broken` there, and must not load.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

import treadle
from tests.configs import TRAINING
from treadle.config import TrainConfig, load, loads
from treadle.config.load import RECIPES, build
from treadle.config.parse import read_text
from treadle.config.section import fields_of
from treadle.errors import ConfigError

REPOSITORY = Path(treadle.__file__).parents[1]
FILES = sorted([*RECIPES.rglob("*.y*ml"), *(REPOSITORY / "examples").rglob("*.y*ml")])
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?^```ya?ml\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A YAML block of a page, and the comment above it."""

    page: Path
    line: int
    note: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_config(self) -> bool:
        sections = yaml.safe_load(self.text)
        return isinstance(sections, dict) and bool(sections.keys() & fields_of(TrainConfig).keys())


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found.group(1) or "", found.group(2))
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.is_config]


def mistakes_of(read: Callable[[], object]) -> str:
    """What is wrong with a config; nothing where it loads."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return ""


def test_every_shipped_file_loads():
    wrong = {path.relative_to(REPOSITORY).as_posix(): mistakes_of(partial(load, path)) for path in FILES}
    assert {name: problem for name, problem in wrong.items() if problem} == {}


def test_every_block_on_a_page_loads_unless_it_shows_a_mistake():
    offenders = []
    for block in BLOCKS:
        read = partial(load_over_base, block) if is_fragment(block) else partial(loads, block.text)
        problem, is_broken = mistakes_of(read), "broken" in block.note
        if bool(problem) is not is_broken:
            offenders.append(f"{block}: {problem or 'it loads, and should show a mistake'}")
    assert offenders == []


def is_fragment(block: Block) -> bool:
    """Whether a block says that it is laid over another."""
    return "fragment" in block.note or " over " in block.note


def load_over_base(block: Block) -> TrainConfig:
    """The fragment laid over a small training config, as a second file would be."""
    mistakes: list = []
    config = build([read_text(TRAINING, "base", mistakes), read_text(block.text, str(block), mistakes)], mistakes)
    assert isinstance(config, TrainConfig)
    return config


def test_there_is_something_to_test():
    assert FILES
    assert any(block.page.name == "config.md" for block in BLOCKS)


def test_a_block_that_does_not_load_would_be_found():
    wrong = Block(Path("x.md"), 1, "", "model: {path: x}\nrollout: {nn: 1}\n")
    assert wrong.is_config
    assert "rollout.nn" in mistakes_of(partial(loads, wrong.text))
