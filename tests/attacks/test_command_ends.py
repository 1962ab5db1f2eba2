"""How the command ends where something else would have it end otherwise: a sentence and a status, never a lie."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos import hear_signals
from tests.proc_tree import is_alive
from tests.rollouts import save_model

CODE = """
import os
import re
import subprocess
from pathlib import Path

from treadle.rollout.agent_loop import AgentLoopBase

async def hold(text: str) -> str:
    '''Holds the interpreter, in C code that never lets go.

    Args:
        text: what
    '''
    Path("began").touch()
    re.match(r"(a+)+$", "a" * 60 + "b")
    return text

class Hold(AgentLoopBase):
    async def run(self, session):
        await session.generate()
        await hold("x")

async def leave(text: str) -> str:
    '''Ends the process as if all were well.

    Args:
        text: what
    '''
    os._exit(0)

async def start(text: str) -> str:
    '''Starts processes that outlive it: a child, one in a session of its own, and one whose parent has ended.

    Args:
        text: what
    '''
    first = subprocess.Popen(["sleep", "600"])
    second = subprocess.Popen(["sleep", "600"], start_new_session=True)
    third = subprocess.check_output(["env", "-i", "/bin/sh", "-c", "/bin/sleep 600 >&- 2>&- & echo $!"])
    Path("pids").write_text(f"{first.pid} {second.pid} {int(third)}")
    return text

def call_start(request, rng):
    if any(message["role"] == "assistant" for message in request.messages):
        return "done"
    return '<tool_call>{"name": "start", "arguments": {"text": "x"}}</tool_call>'

def call_and_interrupt(request, rng):
    if any(message["role"] == "assistant" for message in request.messages):
        os.kill(os.getpid(), 2)
    return call_start(request, rng)

def call(request, rng):
    return '<tool_call>{"name": "leave", "arguments": {"text": "x"}}</tool_call>'
"""

CONFIG = """
model: {path: model}
data: {train_files: tasks.jsonl}
rollout: {name: scripted, scripted: {script: "code_of_this_test:call"}}
reward: {functions: {answer: {path: number_match}}}
logging: {run_dir: run}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    (tmp_path / "code_of_this_test.py").write_text(CODE)
    (tmp_path / "my.yaml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "What is 1 + 1?", "answer": "2"}) + "\n")
    return tmp_path


def treadle(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle", "rollout", "my.yaml", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_dead_endpoint_is_a_sentence(folder):
    done = treadle(folder, "rollout.name=openai", "rollout.openai.base_url=http://127.0.0.1:9/v1")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "rollout.openai.base_url = http://127.0.0.1:9/v1" in done.stderr


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("ending", ["", "interrupted"])
def test_what_a_tool_starts_ends_with_the_command_and_what_was_there_before_lives_on(folder, num_workers, ending):
    tool = ["rollout.multi_turn.tools=code_of_this_test:start", "rollout.agent.default_agent_loop=tool_agent"]
    script = "rollout.scripted.script=code_of_this_test:call_start"
    words = [*tool, script, f"rollout.agent.num_workers={num_workers}"]
    if ending:
        words = [word.replace("call_start", "call_and_interrupt") for word in words]
    command = shlex.join([sys.executable, "-m", "treadle", "rollout", "my.yaml", *words])
    shell = ["sh", "-c", f"sleep 600 >&- 2>&- & echo $! > before; exec {command}"]
    done = subprocess.run(shell, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    before = int((folder / "before").read_text())
    try:
        assert done.returncode == (130 if ending else 0), done.stderr
        pids = [int(pid) for pid in (folder / "pids").read_text().split()]
        assert len(pids) == 3 and not [pid for pid in pids if is_alive(pid)]
        assert is_alive(before)
    finally:
        os.kill(before, signal.SIGKILL)


HELD = {
    "rollout": ("rollout", "my.yaml", "rollout.agent.default_agent_loop=code_of_this_test:Hold"),
    "train": ("train", "calculator", "rollout.agent.default_agent_loop=code_of_this_test:Hold", "logging.run_dir=run"),
}


@pytest.mark.parametrize("name", HELD)
def test_ctrl_c_ends_a_command_whose_driver_is_held(folder, name):
    command = [sys.executable, "-m", "treadle", *HELD[name], "rollout.agent.num_workers=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as process:
        deadline = time.monotonic() + 240
        while not (folder / "began").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        try:
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                time.sleep(0.2)  # signals of one kind that wait together are one
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "3 interrupts were not heard" in errors and "rollout.agent.num_workers=1" in errors


def test_the_third_interrupt_of_a_process_that_hears_is_the_systems(folder):
    """The watcher counts what was not heard, and not what the process sends to itself."""
    code = """
import os, signal, time
from treadle.process.interrupt_watcher import discount_interrupt, watched_interrupts
signal.signal(signal.SIGINT, lambda *_: None)
with watched_interrupts():
    for _ in range(9):
        discount_interrupt()
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n", done.stderr


def test_a_held_process_ends_after_the_grace_of_sigterm(folder):
    code = """
import os, re, signal
from treadle.process import interrupt_watcher
signal.signal(signal.SIGTERM, lambda *_: None)
with interrupt_watcher.watched_interrupts(grace_s=-14.5):
    os.kill(os.getpid(), signal.SIGTERM)
    re.match(r"(a+)+$", "a" * 60 + "b")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9 and "after the signal to end" in done.stderr


def test_an_async_tool_that_leaves_with_status_0_does_not_end_the_run_well(folder):
    tools = "rollout.multi_turn.tools=[code_of_this_test:leave]"
    done = treadle(folder, tools, "rollout.agent.default_agent_loop=tool_agent")
    assert done.returncode == 1
    assert "died: exit status 0" in done.stderr + done.stdout

    done = treadle(folder, tools, "rollout.agent.default_agent_loop=tool_agent", "rollout.agent.num_workers=0")
    assert done.returncode == 1
    assert "code_of_this_test.py:" in done.stderr


EARLY = """
import os, signal, sys

class DuringImport:
    def find_spec(self, name, path=None, target=None):
        if name == "treadle.cli.plan":
            os.kill(os.getpid(), signal.{name})

sys.meta_path.insert(0, DuringImport())
sys.argv = ["treadle", "--version"]
from treadle.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_the_command_is_imported_is_a_sentence_and_a_status(name):
    line = [sys.executable, "-c", EARLY.format(name=name)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, preexec_fn=hear_signals)
    assert done.returncode == 130 and not done.stdout
    assert done.stderr == f"interrupted by {name} before anything was started\n"


def test_a_signal_that_is_ignored_stays_ignored_from_the_beginning():
    """As under nohup."""
    program = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{EARLY.format(name='SIGHUP')}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.startswith("treadle ")
