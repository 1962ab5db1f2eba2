"""Control groups of a box: memory and number of processes, counted over everything in it.

Owns the folders under /sys/fs/cgroup that one box has, in version 1 or 2, where this process may make them: as root, or
in a group that was delegated to it. Elsewhere the limits of single processes hold, and what is missing is said.
Invariant: `remove` leaves no process and no folder.
"""

import itertools
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from treadle.sandbox.protocol import BoxSettings

ROOT = Path("/sys/fs/cgroup")
REMOVE_S = 5.0
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class BoxCgroup:
    """The groups of one box, by their folders."""

    paths: tuple[Path, ...]

    @classmethod
    def create(cls, settings: BoxSettings) -> tuple["BoxCgroup | None", tuple[str, ...]]:
        """Groups with the limits of a box; or none, and what is missing without them."""
        name = f"treadle-box-{os.getpid()}-{next(_NUMBERS)}"
        made: list[Path] = []
        try:
            for folder, values in _wanted(settings):
                path = folder / name
                path.mkdir()
                made.append(path)
                for key, value in values.items():
                    (path / key).write_text(str(value))
        except OSError:
            cls(tuple(made)).remove()
            made = []
        if made:
            return cls(tuple(made)), ()
        return None, (
            "no control group: memory and processes are counted ten times a second while a command runs, else once",
        )

    def remove(self) -> None:
        """Kill what is in the groups and remove them."""
        deadline = time.monotonic() + REMOVE_S
        for path in self.paths:
            while time.monotonic() < deadline:
                with suppress(OSError):
                    for pid in (path / "cgroup.procs").read_text().split():
                        with suppress(OSError):
                            os.kill(int(pid), 9)
                try:
                    path.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.002)


def _wanted(settings: BoxSettings) -> list[tuple[Path, dict[str, int]]]:
    """Folders to make one in, and the values to set there; OSError where there is none."""
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in _own_groups())}
    memory = (settings.memory_mb + settings.disk_mb) << 20  # files of a box are memory, too
    if "pids" in own and "memory" in own:
        limits = {"memory.limit_in_bytes": memory, "memory.swappiness": 0}
        return [
            (ROOT / "pids" / own["pids"].strip("/"), {"pids.max": settings.processes + 4}),
            (ROOT / "memory" / own["memory"].strip("/"), limits),
        ]
    folder = ROOT / own.get("", "/").strip("/")
    enabled = (folder / "cgroup.subtree_control").read_text().split()
    if not {"pids", "memory"} <= set(enabled):
        raise OSError("no controller is delegated")
    return [(folder, {"pids.max": settings.processes + 4, "memory.max": memory, "memory.swap.max": 0})]


def _own_groups() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()
