"""How processes end, in words: exit statuses, signals, and kills for memory, which the control group counts."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.exit_status import MemoryCgroup, describe_exit

GIB = 1 << 30
VERSIONS = ["v1", "v2", "v2 beside v1", "v1 of a host", "v2 above"]


class Machine:
    """/proc and /sys of a container, as one of the versions lays them out."""

    def __init__(self, root: Path, version: str) -> None:
        self.root = root
        line, group, files = {
            "v1": ("4:memory:/", "memory", 1),
            "v2": ("0::/", "", 2),
            "v2 beside v1": ("3:cpu,cpuacct:/\n0::/pod", "unified/pod", 2),
            "v1 of a host": ("3:cpu:/\n4:blkio,memory:/docker/123", "memory", 1),
            "v2 above": ("0::/pod/app", "pod", 2),
        }[version]
        self.group = root / "sys/fs/cgroup" / group
        self.names = ("memory.max", "memory.events") if files == 2 else ("memory.limit_in_bytes", "memory.oom_control")
        self.group.mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(line + "\n")
        (root / "proc/meminfo").write_text("MemTotal:       1048576 kB\nMemFree: 5 kB\n")
        self.limit("max\n" if files == 2 else "9223372036854771712\n")
        self.kills(0)

    def limit(self, text: object) -> None:
        (self.group / self.names[0]).write_text(f"{text}\n")

    def kills(self, count: int) -> None:
        (self.group / self.names[1]).write_text(f"low 0\noom_kill_disable 0\noom 7\noom_kill {count}\n")


@pytest.fixture(params=VERSIONS)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, request.param)


def test_the_containers_limit_counts_before_the_machines(machine: Machine) -> None:
    here = MemoryCgroup(machine.root)
    assert here.memory_limit() == (GIB, "this machine")
    machine.limit(GIB // 4)
    assert here.memory_limit() == (GIB // 4, "the container")
    machine.limit(2 * GIB)
    assert here.memory_limit() == (GIB, "this machine")


def test_a_kill_for_memory_explains_one_death(machine: Machine) -> None:
    machine.kills(3)
    machine.limit(GIB // 2)
    here = MemoryCgroup(machine.root)
    assert here.describe(-signal.SIGKILL) == "killed by SIGKILL", "what was killed before is another's"
    machine.kills(5)
    assert here.describe(1) == "exit status 1"
    assert here.describe(-signal.SIGTERM) == "killed by SIGTERM"
    assert here.describe(-40) == "killed by signal 40"
    for _ in range(2):
        assert here.describe(-signal.SIGKILL) == "killed by the kernel for memory (limit 0.5 GB)"
    assert here.describe(-signal.SIGKILL) == "killed by SIGKILL"


def test_a_machine_without_a_limit_can_run_out_too(machine: Machine) -> None:
    here = MemoryCgroup(machine.root)
    machine.kills(1)
    assert here.describe(-signal.SIGKILL) == "killed by the kernel for memory (this machine has 1.1 GB)"


def test_where_nobody_counts_a_kill_is_a_kill(tmp_path: Path) -> None:
    here = MemoryCgroup(tmp_path)
    assert here.memory_limit() == (0, "this machine")
    assert here.describe(-signal.SIGKILL) == "killed by SIGKILL"


def test_real_processes_end_in_these_words() -> None:
    for code, words in (("exit(3)", "exit status 3"), ("import os; os.abort()", "killed by SIGABRT")):
        assert describe_exit(subprocess.run([sys.executable, "-c", code], check=False).returncode) == words


def test_an_instruction_that_the_cpu_refuses_comes_with_a_way_out() -> None:
    assert "ONEDNN_MAX_CPU_ISA" in describe_exit(-signal.SIGILL)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 400 MB, where this user may make one."""
    for top, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(top, f"treadle-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(400 << 20))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


PROGRAM = """
import asyncio, os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from functools import partial
from tests.unit.test_exit_status import eat
from treadle.config import LimitsConfig
from treadle.engine.remote import RemoteEngine

try:
    asyncio.run(RemoteEngine.create(eat, name="native-0", limits=LimitsConfig()))
except Exception as error:
    print(error)
"""


async def eat() -> None:
    """More than the group has."""
    held = [bytearray(os.urandom(1 << 20)) for _ in range(800)]
    raise AssertionError(f"{len(held)} MB, and alive")


def test_an_engine_that_outgrows_its_container_says_so(small_group: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(small_group)], capture_output=True, text=True, check=True
    ).stdout
    assert said == "native-0 died while it started: killed by the kernel for memory (limit 0.4 GB)\n"
