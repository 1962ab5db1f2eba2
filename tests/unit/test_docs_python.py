"""Python shown in the README and the docs parses, and what it imports from treadle is there."""

import ast
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (f"{page.name}, block {at}", block)
    for page in PAGES
    for at, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


def problems_of(block: str) -> list[str]:
    """What is wrong with a block: that it does not parse, or what it imports from treadle and is not there."""
    try:
        nodes = list(ast.walk(ast.parse(block)))
    except SyntaxError as error:
        return [str(error)]
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("treadle"):
            module = import_module(node.module or "")
            found += [f"no {alias.name} in {node.module}" for alias in node.names if not hasattr(module, alias.name)]
    return found


def test_every_block_parses_and_its_imports_exist():
    assert len(BLOCKS) > 20
    assert [f"{where}: {problem}" for where, block in BLOCKS for problem in problems_of(block)] == []
    assert problems_of("from treadle.types import Nothing\n") == ["no Nothing in treadle.types"]
    assert problems_of("def f(:") != []


def test_the_torch_that_pages_name_is_the_one_of_the_tests():
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    named = [version for page in PAGES for version in re.findall(r"torch==(\S+)", page.read_text(encoding="utf-8"))]
    assert {*named} == {pinned}


def test_every_link_to_a_file_leads_somewhere():
    links = [
        (page, link) for page in PAGES for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []
