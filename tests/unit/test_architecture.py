"""The map in docs/architecture.md has one line for each file, in the file's own words.

`python tests/unit/test_architecture.py` writes the map anew.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- map -->\n", "<!-- end of map -->\n"


def first_line(file: Path) -> str:
    """What a module says it is, in one line."""
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].removesuffix(".")


def draw_map() -> str:
    lines: list[str] = []
    for folder in sorted({file.parent for file in (ROOT / "treadle").rglob("*.py")}):
        lines.append(f"\n**{folder.relative_to(ROOT)}/**\n")
        lines += [f"- `{file.name}` {first_line(file)}" for file in sorted(folder.glob("*.py"))]
    return "\n".join(lines) + "\n"


def test_every_module_says_what_it_is():
    silent = [str(file.relative_to(ROOT)) for file in (ROOT / "treadle").rglob("*.py") if not first_line(file)]
    assert silent == []


def test_the_map_is_true():
    drawn = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    assert drawn == draw_map(), f"run: python {Path(__file__).relative_to(ROOT)}"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + draw_map() + END + rest.partition(END)[2], encoding="utf-8")
