"""CPU cores that this process may use: its affinity (taskset, Slurm), and the CPU quota of its container."""

import os
from functools import cache
from math import ceil
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Cores for the threads of this process; `os.cpu_count` counts those of the machine."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(allowed, _quota()))


@cache
def _quota(cgroup: Path = _CGROUP) -> int:
    """Cores that the container's CPU time amounts to; as many as the machine has where there is no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return ceil(int(limit) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return os.cpu_count() or 1
