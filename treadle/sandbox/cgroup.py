"""Control groups of a box: memory and number of processes, counted over everything in it.

Owns the folders under /sys/fs/cgroup that one box has, where this process may make them.

    version 1    in this process's own groups: as root
    version 2    in the nearest group from this process's own upwards that counts memory and processes for those below:
                 as root, or where that was delegated to this user. A group that has processes counts for none below it
                 (only the root does), so it is mostly the next one above. A group that limits memory is not left

Elsewhere the limits of single processes hold, and what is missing is said.
Invariant: `remove` leaves no process and no folder; folders of a process that was killed are removed by the next.
"""

import itertools
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from treadle.sandbox.protocol import BoxSettings

ROOT = Path("/sys/fs/cgroup")
REMOVE_S = 5.0
PREFIX = "treadle-box"
_NUMBERS = itertools.count(1)
_SWEPT: set[Path] = set()
_SWEEPING = Lock()


@dataclass(frozen=True, slots=True)
class BoxCgroup:
    """The groups of one box, by their folders."""

    paths: tuple[Path, ...]

    @classmethod
    def create(cls, settings: BoxSettings) -> tuple["BoxCgroup | None", tuple[str, ...]]:
        """Groups with the limits of a box; or none, and what is missing without them."""
        name = f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        made: list[Path] = []
        try:
            for folder, values in _wanted(settings):
                _sweep(folder)
                path = folder / name
                path.mkdir()
                made.append(path)
                for key, value in values.items():
                    (path / key).write_text(str(value))
        except OSError as error:
            cls(tuple(made)).remove()
            why = f"{error.filename}: {error.strerror}" if error.filename else error
            counted = "memory and processes are counted ten times a second while a command runs, else once"
            return None, (f"no control group ({why}): {counted}",)
        return cls(tuple(made)), _limit_swap(made)

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
        return [
            (ROOT / "pids" / own["pids"].strip("/"), {"pids.max": settings.processes + 4}),
            (ROOT / "memory" / own["memory"].strip("/"), {"memory.limit_in_bytes": memory}),
        ]
    return [(_find_counting(own.get("", "/")), {"pids.max": settings.processes + 4, "memory.max": memory})]


def _find_counting(own: str) -> Path:
    """The nearest group of version 2 that counts for those below it, from this process's own upwards."""
    if ".." in Path(own).parts:
        raise OSError("the group of this process is outside of what is mounted here")
    group = ROOT / own.strip("/")
    while not {"pids", "memory"} <= set((group / "cgroup.subtree_control").read_text().split()):
        if group == ROOT:
            raise OSError("no group above this process counts memory and processes for those below it")
        with suppress(FileNotFoundError):
            if (limit := (group / "memory.max").read_text().strip()) != "max":
                raise OSError(f"{group} limits memory to {limit} bytes, and is not left")
        group = group.parent
    if not os.access(group / "cgroup.procs", os.W_OK):
        raise OSError(f"{group} is not delegated to this user")
    return group


def _limit_swap(made: list[Path]) -> tuple[str, ...]:
    """Keep a box from the swap, so that its memory is what it may have; what is missing without."""
    path = made[-1]
    try:
        if (path / "memory.swappiness").exists():
            (path / "memory.swappiness").write_text("0")
        else:
            (path / "memory.swap.max").write_text("0")
    except OSError:
        return ("no limit on swap: a box may have more memory than it is given, where the machine has swap",)
    return ()


def _sweep(folder: Path) -> None:
    """Remove, once, what boxes left here whose process was killed: groups that still hold a process stay."""
    with _SWEEPING:
        if folder in _SWEPT:
            return
        _SWEPT.add(folder)
        for path in folder.glob(f"{PREFIX}-*-*"):
            pid = path.name.removeprefix(f"{PREFIX}-").partition("-")[0]
            if pid == str(os.getpid()) or not os.path.exists(f"/proc/{pid}"):
                with suppress(OSError):
                    path.rmdir()


def _own_groups() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()
