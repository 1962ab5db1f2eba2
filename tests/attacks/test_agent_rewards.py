"""Agent programs that want to give themselves a reward: none is left when the grader starts, and it hides its key."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_gateway_agents import config, run
from tests.rollouts import save_model, say

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are found on Linux alone")

SURVIVOR = """
import glob, json, os, re, signal, sys, time, urllib.request

def ask():
    body = {"model": "policy", "messages": [{"role": "user", "content": "Add."}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
    request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    urllib.request.urlopen(request).read()

def steal():
    tried = set()
    while True:
        for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try:
                found = set(re.findall(rb"[0-9a-f]{32}", open(path, "rb").read())) - tried
            except OSError:
                continue
            tried |= found
            for key in found:
                url = os.environ["OPENAI_BASE_URL"] + "/notes"
                request = urllib.request.Request(url, json.dumps({"reward": 99.0}).encode())
                request.add_header("authorization", "Bearer " + key.decode())
                try:
                    urllib.request.urlopen(request).read()
                except OSError:
                    pass

ask()
told, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.write(tell, str(os.getpid()).encode())
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    steal()
open("survivor", "wb").write(os.read(told, 20))
"""

GRADER = """
import json, os, pathlib, sys, urllib.request
key = sys.stdin.readline().strip()
assert len(key) == 32 and not sys.stdin.read()
survivor = int((pathlib.Path(sys.argv[1]) / "survivor").read_text())
process = pathlib.Path(f"/proc/{os.getpid()}")
seen = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
notes = {"survives": pathlib.Path(f"/proc/{survivor}").exists(), "shown": key.encode() in seen}
request = urllib.request.Request(os.environ["TREADLE_NOTES_URL"], json.dumps({"reward": 0.0, "notes": notes}).encode())
request.add_header("authorization", "Bearer " + key)
urllib.request.urlopen(request).read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def graded(agent: str) -> dict[str, Any]:
    return {"argv": ["python", "-c", agent], "grader": ["python", "-c", GRADER, "{{directory}}"]}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_agent_that_leaves_a_process_behind_does_not_grade_itself(workers: int, model: Any, tmp_path: Path) -> None:
    section = config("program_agent", graded(SURVIVOR), num_workers=workers)
    batch, _ = run(section, model, tmp_path, say("Well."), count=1)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.ok, trajectory.outcome
    assert trajectory.extra["notes"] == {"survives": False, "shown": False}
    assert trajectory.reward is not None and trajectory.reward.value == 0.0


def test_an_agent_that_kills_its_guard_is_a_failure_and_gets_no_grade(model: Any, tmp_path: Path) -> None:
    code = SURVIVOR + "\nos.kill(os.getppid(), signal.SIGKILL)"
    batch, _ = run(config("program_agent", graded(code)), model, tmp_path, say("Well."), count=1)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.boundary == "loop" and "guard of python was killed" in trajectory.outcome.detail
    assert trajectory.reward is None and "notes" not in trajectory.extra
