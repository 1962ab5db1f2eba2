"""Exit statuses: those of our commands, those of child processes in words, and the container's memory limit (cgroup).

An exit status cannot tell an out-of-memory kill by the kernel from any other SIGKILL; the counter of such kills in the
cgroup (v1 and v2) can. Each counted kill explains one death. Where the counter counts the kill of a process that is not
ours, a later SIGKILL from elsewhere is reported as one for memory.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

STATUS_FAILED = 1
STATUS_CONFIG = 2
"""A config is wrong: it would be on every machine."""
STATUS_MISSING = 3
"""A config is right, as far as it could be checked, and this machine lacks something that it asks for."""
STATUS_INTERRUPTED = 130

GB = 1e9

_V2 = ("memory.max", "memory.events")
_V1 = ("memory.limit_in_bytes", "memory.oom_control")
"""Files of a control group: its limit, and its count of kills (`oom_kill N`)."""


class MemoryCgroup:
    """The control group of this process, as far as memory goes. `root` is where /proc and /sys are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._lock = Lock()
        self._explained = self.count_kills()

    def memory_limit(self) -> tuple[int, str]:
        """Bytes of main memory this process may use, and whose limit that is. 0: unknown."""
        machine = self._machine_bytes()
        limits = [int(text) for limit, _ in self._groups() if (text := _read(limit).strip()).isdigit()]
        least = min(limits, default=0)
        if least and (not machine or least < machine):  # version 1 says "no limit" with a number beyond any memory
            return least, "the container"
        return machine, "this machine"

    def count_kills(self) -> int:
        """How many processes of this group the kernel has killed for memory so far."""
        for _, events in self._groups():
            words = dict(line.split(maxsplit=1) for line in _read(events).splitlines() if " " in line)
            if "oom_kill" in words:
                return int(words["oom_kill"])
        return 0

    def describe(self, status: int) -> str:
        """How a process ended: `exit status 3`, `killed by SIGTERM`, `killed by the kernel for memory (limit 2 GB)`."""
        if status >= 0:
            return f"exit status {status}"
        if status == -signal.SIGKILL and self._take_kill():
            limit, whose = self.memory_limit()
            limited = f"limit {limit / GB:.1f} GB" if whose == "the container" else f"{whose} has {limit / GB:.1f} GB"
            return f"killed by the kernel for memory ({limited})"
        if status == -signal.SIGILL:
            return "killed by SIGILL (on a virtual CPU, try ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16)"
        return f"killed by {_signal_name(-status)}"

    def _take_kill(self) -> bool:
        """Whether the kernel has killed a process for memory whose death is not explained yet."""
        with self._lock:
            if self.count_kills() <= self._explained:
                return False
            self._explained += 1
            return True

    def _groups(self) -> Iterator[tuple[Path, Path]]:
        """The files of this process's control group and of those above it, nearest first."""
        mounted = self._root / "sys/fs/cgroup"
        for line in _read(self._root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            tops, files = ((mounted / "memory",), _V1) if controllers else ((mounted, mounted / "unified"), _V2)
            for top in tops:
                group = top / path.lstrip("/")  # of the host, in a container that does not see it: then only `top` is
                for found in (group, *(above for above in group.parents if above.is_relative_to(top))):
                    if (found / files[0]).exists():
                        yield found / files[0], found / files[1]

    def _machine_bytes(self) -> int:
        lines = _read(self._root / "proc/meminfo").splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:")), 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such controller, or none that we may look at
        return ""


_HERE = MemoryCgroup()


def describe_exit(status: int) -> str:
    """How a process that this one started has ended, in words. Once for each death."""
    return _HERE.describe(status)


def memory_limit() -> tuple[int, str]:
    """Bytes of main memory this process may use, and whose limit that is: the container's or this machine's."""
    return _HERE.memory_limit()
