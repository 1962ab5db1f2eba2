"""A vLLM server that is killed while a run uses it is started again, and the run goes on."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos import Start, command, tiny_run
from tests.proc_tree import children
from treadle.journal import JournalReader

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

STEPS = 30
WORDS = (*tiny_run(STEPS), "rollout.name=vllm")


def test_a_killed_server_comes_back_and_the_run_goes_on(tmp_path: Path) -> None:
    with Start(tmp_path, *WORDS) as start:
        assert start.wait_for("a step", lambda: start.steps >= 2), start.said()
        (server,) = [pid for pid, words in children(start.process.pid) if "treadle.engine.vllm.server" in words]
        os.kill(server, signal.SIGKILL)
        assert start.end() == 0, start.said()
    with JournalReader.open(tmp_path) as reader:
        (recovery,) = [event.fields for event in reader.events(kind="replica")]
        versions = [event.fields["version"] for event in reader.events(kind="weights")]
    assert recovery["replica"] == recovery["replacement"] == "vllm-0" and "killed by SIGKILL" in recovery["cause"]
    assert versions == list(range(1, STEPS + 1))
    audited = command("audit", tmp_path)
    assert audited.returncode == 0 and "none skipped, none trained twice" in audited.stdout
