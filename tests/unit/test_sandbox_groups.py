"""Control groups of boxes, on files like the kernel's: where they are made, and what is said where none can be."""

import os
from pathlib import Path

import pytest

from treadle.sandbox import cgroup
from treadle.sandbox.cgroup import BoxCgroup
from treadle.sandbox.protocol import BoxSettings

SETTINGS = BoxSettings(memory_mb=100, disk_mb=28, processes=60)
GONE = (1 << 22) + 1
"""No process: the kernel counts up to 1 << 22."""


class Groups:
    """A tree of version 2, and the group that this process is in."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setattr(cgroup, "ROOT", root)
        monkeypatch.setattr(cgroup, "_SWEPT", set())
        monkeypatch.setattr(cgroup, "_own_groups", lambda: [f"0::{self.own}"])
        self.own = "/"
        self.make("", "cpu memory pids")

    def make(self, name: str, counts: str, limit: str = "max") -> Path:
        group = self.root / name
        group.mkdir(exist_ok=True)
        (group / "cgroup.subtree_control").write_text(counts + "\n")
        (group / "cgroup.procs").touch()
        if name:
            (group / "memory.max").write_text(limit + "\n")
        return group


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tmp_path, monkeypatch)


def refusal() -> str:
    made, (missing,) = BoxCgroup.create(SETTINGS)
    assert made is None and "counted ten times a second" in missing
    return missing


def test_a_box_is_beside_the_group_of_its_process_which_may_have_none_below(groups):
    groups.make("app.slice", "memory pids")
    groups.make("app.slice/run.scope", "")
    groups.own = "/app.slice/run.scope"
    made, missing = BoxCgroup.create(SETTINGS)
    assert made is not None and missing == ()
    (path,) = made.paths
    assert path.parent == groups.root / "app.slice"
    found = {name: (path / name).read_text() for name in ("pids.max", "memory.max", "memory.swap.max")}
    assert found == {"pids.max": "64", "memory.max": str(128 << 20), "memory.swap.max": "0"}


def test_groups_that_count_too_little_are_passed_over(groups):
    groups.make("user.service", "cpu memory pids")
    groups.make("user.service/app.slice", "pids")
    groups.make("user.service/app.slice/run.scope", "")
    groups.own = "/user.service/app.slice/run.scope"
    made, _ = BoxCgroup.create(SETTINGS)
    assert made is not None and made.paths[0].parent == groups.root / "user.service"


def test_a_group_that_limits_memory_is_not_left(groups):
    groups.make("system.slice", "memory pids")
    groups.make("system.slice/run.service", "", limit=str(8 << 30))
    groups.own = "/system.slice/run.service"
    assert f"run.service limits memory to {8 << 30} bytes, and is not left" in refusal()


def test_why_there_is_no_group_is_said(groups):
    groups.make("", "cpu")
    assert "no group above this process counts memory and processes" in refusal()
    groups.own = "/../outside"
    assert "outside of what is mounted here" in refusal()
    groups.own = "/nowhere"
    assert "nowhere/cgroup.subtree_control: No such file or directory" in refusal()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_group_of_another_user_is_not_delegated(groups):
    (groups.root / "cgroup.procs").chmod(0o444)
    assert "is not delegated to this user" in refusal()


def test_groups_that_a_killed_process_left_are_removed_once(groups):
    mine, gone, alive = (groups.root / f"treadle-box-{pid}-1000000" for pid in (os.getpid(), GONE, os.getppid()))
    for path in (mine, gone, alive):
        path.mkdir()
    BoxCgroup.create(SETTINGS)
    assert alive.exists() and not gone.exists() and not mine.exists()
    gone.mkdir()
    BoxCgroup.create(SETTINGS)
    assert gone.exists(), "only before its first box does a process look at what others left"
