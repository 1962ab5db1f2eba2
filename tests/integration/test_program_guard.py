"""Guard of agent programs: their status as it is, and nothing of what they started is left."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from treadle.errors import LoopFailure
from treadle.gateway.agent_program import AgentProgram

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="orphans are found on Linux alone")
ENVIRONMENT = {"PATH": os.environ["PATH"]}


def start(directory: Path, *argv: str, stdin: bytes = b"") -> tuple[int, AgentProgram]:
    program = AgentProgram(argv, ENVIRONMENT, directory)
    return asyncio.run(program.run(stdin)), program


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_program_has_its_status_its_environment_and_its_input(tmp_path: Path) -> None:
    assert start(tmp_path, "sh", "-c", "exit 7")[0] == 7
    assert start(tmp_path, "sh", "-c", "kill -9 $$")[0] == -9
    assert start(tmp_path, "sh", "-c", "kill 0")[0] == -15, "the guard is in another group"
    status, program = start(tmp_path, "env")
    assert status == 0 and sorted(program.stdout.splitlines()) == [f"PATH={ENVIRONMENT['PATH']}"]
    assert start(tmp_path, "cat", stdin=b"a key\n")[1].stdout == "a key\n"
    assert start(tmp_path, "cat")[1].stdout == ""
    with pytest.raises(LoopFailure, match=r"/no/such cannot be started: No such file"):
        start(tmp_path, "/no/such")


DETACHES = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open("pid.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.part", "pid")
    while True:
        time.sleep(600)
while not os.path.exists("pid"):
    time.sleep(0.01)
"""


@linux_only
def test_what_has_left_group_and_session_ends_with_the_program(tmp_path: Path) -> None:
    assert start(tmp_path, "python", "-c", DETACHES)[0] == 0
    assert is_gone(int((tmp_path / "pid").read_text()))


@linux_only
def test_a_chain_of_processes_that_each_start_the_next_is_ended(tmp_path: Path) -> None:
    code = "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        if os.fork(): os._exit(0)"
    assert start(tmp_path, "python", "-c", code)[0] == 0


@linux_only
def test_a_program_that_is_cancelled_ends_with_what_it_has_detached(tmp_path: Path) -> None:
    async def main() -> None:
        program = AgentProgram(["python", "-c", DETACHES + "time.sleep(600)"], ENVIRONMENT, tmp_path)
        running = asyncio.ensure_future(program.run())
        async with asyncio.timeout(60):
            while not (tmp_path / "pid").exists():  # noqa: ASYNC110  another process makes it
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running}, timeout=60)
        assert running.cancelled()

    asyncio.run(main())
    assert is_gone(int((tmp_path / "pid").read_text()))


@linux_only
@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_a_program_whose_guard_is_killed_or_stopped_is_ended_all_the_same(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.gateway.agent_program.GUARD_S", 0.1)

    async def main() -> None:
        code = f"echo $$ > part; mv part pid; kill -{how} $PPID; sleep 600"
        program = AgentProgram(["sh", "-c", code], ENVIRONMENT, tmp_path)
        running = asyncio.ensure_future(program.run())
        async with asyncio.timeout(60):
            while not (tmp_path / "pid").exists():  # noqa: ASYNC110  another process makes it
                await asyncio.sleep(0.01)
        if how == "STOP":
            running.cancel()
        await asyncio.wait({running}, timeout=60)
        assert running.cancelled() if how == "STOP" else isinstance(running.exception(), LoopFailure)

    asyncio.run(main())
    deadline = time.monotonic() + 60
    while not is_gone(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
