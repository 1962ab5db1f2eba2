"""Maps are true: docs/files.md has one line for each file, docs/architecture.md the layers of the code; files exist.

`python tests/unit/test_architecture.py` writes map and layers anew.
"""

import ast
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.package_source import FILES, tree
from tests.unit.test_import_ranks import RANKS

ROOT = Path(__file__).parents[2]
MAP_PAGE, LAYER_PAGE = ROOT / "docs" / "files.md", ROOT / "docs" / "architecture.md"
PAGES = (*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")))
MAP = "<!-- map -->\n", "<!-- end of map -->\n"
LAYERS = "<!-- layers -->\n", "<!-- end of layers -->\n"


def first_line(file: Path) -> str:
    """What a module says it is, in one line."""
    doc = ast.get_docstring(tree(file)) or ""
    return doc.partition("\n")[0].removesuffix(".")


def draw_map() -> str:
    lines: list[str] = []
    for folder in sorted({file.parent for file in FILES}):
        lines.append(f"\n**{folder.relative_to(ROOT)}/**\n")
        lines += [f"- `{file.name}` {first_line(file)}" for file in sorted(folder.glob("*.py"))]
    return "\n".join(lines) + "\n"


def test_every_module_says_what_it_is():
    silent = [str(file.relative_to(ROOT)) for file in FILES if not first_line(file)]
    assert silent == []


def draw_layers() -> str:
    lines = ["| layer | folders |", "|---|---|"]
    for rank in sorted(set(RANKS.values())):
        names = [name or "*.py" for name in RANKS if RANKS[name] == rank and (ROOT / "treadle" / name).exists()]
        lines.append(f"| {rank} | {', '.join(f'`treadle/{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


def between(page: Path, marks: tuple[str, str]) -> str:
    return page.read_text(encoding="utf-8").partition(marks[0])[2].partition(marks[1])[0]


def write(page: Path, marks: tuple[str, str], drawn: str) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(marks[0])
    page.write_text(before + marks[0] + drawn + marks[1] + rest.partition(marks[1])[2], encoding="utf-8")


def test_map_and_layers_are_true():
    assert (between(MAP_PAGE, MAP), between(LAYER_PAGE, LAYERS)) == (draw_map(), draw_layers()), (
        f"run: python {Path(__file__).relative_to(ROOT)}"
    )


def test_every_folder_has_a_row_that_names_files_of_it():
    text = LAYER_PAGE.read_text(encoding="utf-8").partition("## Folders\n")[2]
    rows = dict(re.findall(r"^\| `((?:treadle|tests|bench)/[\w/]*)` \| .* \| (.*) \|$", text, re.MULTILINE))
    named = [f"{folder}{name}" for folder, files in rows.items() for name in re.findall(r"`([^`]+)`", files)]
    assert [name for name in named if not (ROOT / name).exists()] == []
    folders = {f"{file.parent.relative_to(ROOT)}/" for file in FILES} - {"treadle/"}
    assert [name for name in sorted(folders - set(rows)) if not name.startswith("treadle/recipes/")] == []


def is_there(name: str) -> bool:
    """A file or folder, as pages name it: from the root or from `treadle/`, with `*` or not; a test without folder."""
    name = name.rstrip("/")
    return any(
        folder.exists() and any(folder.glob(name))
        for folder in (ROOT, ROOT / "treadle", *sorted((ROOT / "tests").glob("*/")))
    )


def named_files(page: Path) -> set[str]:
    """Paths of ours in a page: those between backticks, and those that lead its drawings."""
    text = page.read_text(encoding="utf-8").partition(MAP[0])[0]
    folders = "|".join(sorted({"treadle", "tests", "bench", "docs", "examples", *filter(None, RANKS)}))
    found = re.findall(rf"`((?:{folders})/(?:[\w./*]*(?:\.\w+|/))?|test_[\w*]+\.py)`", text)  # metrics have no ending
    return {*found, *re.findall(rf"^ ((?:{folders})/[\w./]+\.py)", text, re.MULTILINE)}


def test_files_that_pages_name_are_there():
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    missing = [f"{page.name}: {name}" for page in pages for name in sorted(named_files(page)) if not is_there(name)]
    assert missing == []


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, heading = target.partition("#")
            file = page if not name else (page.parent / name).resolve()
            if "://" in target or (file.exists() and (not heading or heading in headings(file))):
                continue
            broken.append(f"{page.name}: {target}")
    assert broken == []


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub spells them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


if __name__ == "__main__":
    write(MAP_PAGE, MAP, draw_map())
    write(LAYER_PAGE, LAYERS, draw_layers())
