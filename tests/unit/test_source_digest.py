"""The digest of a user's source: its own modules, in a fixed order, and no installed package of any environment."""

import ast
import sys
from pathlib import Path

import pytest

from treadle.rollout import provenance
from treadle.rollout.provenance import source_digest


def test_packages_of_another_environment_are_no_source_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a virtual environment shows the packages of the one that it was made in."""
    packages = tmp_path / "elsewhere" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "digest_agent.py").write_text("import digest_package\nimport digest_part\n")
    (tmp_path / "digest_part.py").write_text("ONE = 1\n")
    (packages / "digest_package.py").write_text("ONE = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(packages), *sys.path])
    before = source_digest("digest_agent")
    (packages / "digest_package.py").write_text("TWO = 2\n")
    assert source_digest("digest_agent") == before
    (tmp_path / "digest_part.py").write_text("TWO = 2\n")
    assert source_digest("digest_agent") != before


def test_imports_are_followed_in_a_fixed_order(tmp_path: Path) -> None:
    names = [f"digest_{letter}" for letter in "dbca"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
    source = "".join(f"import {name}\n" for name in names).encode()
    sys.path.insert(0, str(tmp_path))
    try:
        assert provenance._imports("x", tmp_path / "x.py", source) == sorted(names)
    finally:
        sys.path.remove(str(tmp_path))


def test_source_that_two_threads_read_at_once_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython then says that its own depth is wrong, which is no fault of the source."""
    (tmp_path / "digest_twice.py").write_text("import digest_below\n")
    (tmp_path / "digest_below.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    expected, parse, failures = source_digest("digest_twice"), ast.parse, iter([True, True, False, True])

    def flaky(source: bytes) -> ast.Module:
        if next(failures, False):
            raise SystemError("AST constructor recursion depth mismatch (before=60, after=55)")
        return parse(source)

    monkeypatch.setattr(ast, "parse", flaky)
    assert source_digest("digest_twice") == expected
