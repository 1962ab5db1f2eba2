"""A box's folder is removed whole, and nothing beside it."""

import os
from pathlib import Path

import pytest

from treadle.sandbox.init import kernel
from treadle.sandbox.init.kernel import remove_folder


def test_a_deep_folder_with_closed_ones_is_removed(tmp_path: Path) -> None:
    (tmp_path / "box" / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "box" / "a" / "file").touch()
    (tmp_path / "box" / "a" / "b").chmod(0)
    (tmp_path / "box" / "link").symlink_to(tmp_path)
    remove_folder(str(tmp_path / "box"))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_moved_meanwhile_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that still runs moves the folder that is being emptied up, so that its ".." is another one."""
    box, beside = tmp_path / "box", tmp_path / "victim"
    for folder in (box / "a", box / "victim", beside):
        folder.mkdir(parents=True)
    (beside / "precious").touch()
    empty = kernel._empty

    def empty_and_move(folder: int) -> list[str]:
        if Path(f"/proc/self/fd/{folder}").resolve() == box / "a":
            (box / "a").rename(tmp_path / "a")
        return sorted(empty(folder), reverse=True)

    monkeypatch.setattr(kernel, "_empty", empty_and_move)
    remove_folder(str(box))
    assert (beside / "precious").exists()
