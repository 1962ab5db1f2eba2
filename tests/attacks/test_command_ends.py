"""How the command ends where something else would have it end otherwise: a sentence and a status, never a lie."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollouts import save_model

CODE = """
import os

async def leave(text: str) -> str:
    '''Ends the process as if all were well.

    Args:
        text: what
    '''
    os._exit(0)

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


def test_an_async_tool_that_leaves_with_status_0_does_not_end_the_run_well(folder):
    tools = "rollout.multi_turn.tools=[code_of_this_test:leave]"
    done = treadle(folder, tools, "rollout.agent.default_agent_loop=tool_agent")
    assert done.returncode == 1
    assert "code_of_this_test.py:" in done.stderr
