"""What treadle needs is bounded from both sides: a package of tomorrow is not installed before it was tried."""

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_every_package_that_a_user_installs_has_a_lowest_and_a_highest_version() -> None:
    extras = {name: needed for name, needed in PROJECT["optional-dependencies"].items() if name != "dev"}
    needed = [*PROJECT["dependencies"], *(item for items in extras.values() for item in items)]
    assert len(needed) > 15
    assert [item for item in needed if ">=" not in item or ",<" not in item] == []
