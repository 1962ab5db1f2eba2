"""Ctrl-C typed at a real terminal, and signals while a model loads: how runs end, and that nothing is left of them."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos import ROOT, tiny_run
from tests.proc_tree import children
from treadle.errors import RunError
from treadle.journal import JournalReader

LIMIT_S = 300.0


class Terminal:
    """A command at a terminal of its own: keys are typed, what it prints is kept."""

    def __init__(self, *command: str) -> None:
        self.shown = ""
        self.pid, self._keys = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            os.environ["TERM"] = "xterm"
            os.execv(sys.executable, [sys.executable, *command])

    def type(self, keys: bytes) -> None:
        os.write(self._keys, keys)

    def wait_for(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < deadline, self.shown[-2000:]
            self._read()

    def end(self) -> int:
        """The status, as a shell tells it."""
        status = 0
        done = 0
        deadline = time.monotonic() + LIMIT_S
        while not done:
            assert time.monotonic() < deadline, self.shown[-2000:]
            self._read()
            done, status = os.waitpid(self.pid, os.WNOHANG)
        self._read()
        os.close(self._keys)
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code < 0 else code

    def _read(self) -> None:
        while select.select([self._keys], [], [], 0.05)[0]:
            try:
                self.shown += os.read(self._keys, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                time.sleep(0.05)
                return


def runs(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, f"processes {left} outlive the run"
        time.sleep(0.05)


def count_trajectories(run_dir: Path) -> int:
    try:
        with JournalReader.open(run_dir) as reader:
            return len(list(reader.headlines()))
    except RunError:
        return 0  # there is no journal yet, or it is being made


def test_a_third_ctrl_c_ends_a_run_at_once_and_leaves_terminal_and_machine_as_they_were(tmp_path: Path) -> None:
    """In a training step that takes minutes, so that neither the first nor the second can end it."""
    words = [*tiny_run(3), "actor.ppo_epochs=100000", "rollout.nnodes=1", "rollout.agent.num_workers=1"]
    run = Terminal("-m", "treadle", "train", "calculator", f"logging.run_dir={tmp_path / 'run'}", *words)
    run.wait_for(lambda: "train" in run.shown and (tmp_path / "run/journal.sqlite").exists())
    run.wait_for(lambda: len(list(children(run.pid))) >= 2 and "\x1b[?25l" in run.shown)
    run.wait_for(lambda: count_trajectories(tmp_path / "run") == 4)  # all that the first step trains on
    time.sleep(3)  # into the step
    parts = [pid for pid, _ in children(run.pid)]
    run.type(b"\x03")
    run.wait_for(lambda: "SIGINT: stopping" in run.shown)
    run.type(b"\x03")
    run.wait_for(lambda: "once more ends it at once" in run.shown)
    run.type(b"\x03")
    assert run.end() == 130, run.shown[-2000:]
    assert "Traceback" not in run.shown
    assert re.findall(r"\x1b\[\?25[hl]", run.shown)[-1] == "\x1b[?25h", "the cursor is visible again"
    wait_until_gone(parts)


@pytest.mark.parametrize("delay_s", [0.0, 0.4, 1.5])
def test_ctrl_c_while_a_model_loads_ends_with_its_own_status(tmp_path: Path, delay_s: float) -> None:
    """Torch and its threads are imported, built or at work then; Python's own end would abort in there."""
    command = [sys.executable, "-m", "treadle", "train", "calculator", f"logging.run_dir={tmp_path / 'run'}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        deadline = time.monotonic() + LIMIT_S
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    assert "Traceback" not in said


SWALLOWING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError("cannot load module more than once per process") from None
"""


def test_an_interrupt_that_an_import_takes_for_its_own_failure_is_an_interrupt(tmp_path: Path) -> None:
    """As numpy's does, inside torch's; a real one may come at any moment of it."""
    (tmp_path / "numpy.py").write_text(SWALLOWING)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "treadle", "train", "calculator", f"logging.run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.endswith("interrupted\n")


def test_an_interrupt_that_an_import_swallows_is_raised_again(tmp_path: Path) -> None:
    swallows = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    tool = '\n\ndef look() -> str:\n    """Look around."""\n    return "nothing"\n'
    (tmp_path / "careless.py").write_text(swallows + tool)
    words = (*tiny_run(100_000), "rollout.multi_turn.tools=careless:look", f"logging.run_dir={tmp_path / 'run'}")
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "train", "calculator", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


MCP_SERVER = """
import subprocess, sys
from mcp.server.mcpserver import MCPServer

child = subprocess.Popen(["sleep", "3600"])
open(sys.argv[1], "a").write(f"{child.pid}\\n")
server = MCPServer("parent")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

server.run("stdio")
"""


@pytest.mark.parametrize("way", ["done", "interrupted", "killed"])
def test_what_a_stdio_mcp_server_starts_does_not_outlive_the_run(tmp_path: Path, way: str) -> None:
    pytest.importorskip("mcp")
    server, pids = tmp_path / "server.py", tmp_path / "pids"
    server.write_text(MCP_SERVER)
    servers = json.dumps({"parent": {"command": [sys.executable, str(server), str(pids)]}})
    steps = 1 if way == "done" else 100_000
    words = [*tiny_run(steps), f"rollout.multi_turn.mcp_servers={servers}", f"logging.run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "treadle", "train", "calculator", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        if way != "done":
            metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + LIMIT_S
            while not metrics.exists() or not metrics.read_text():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT if way == "interrupted" else signal.SIGKILL)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == {"done": 0, "interrupted": 130, "killed": -signal.SIGKILL}[way], said
    started = [int(line) for line in pids.read_text().split()]
    assert started
    wait_until_gone(started)
