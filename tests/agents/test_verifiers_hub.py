"""A taskset of verifiers, listed and played by the real package: `make test-hubs` builds an environment for it."""

import os
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.agents.environment import ROOT
from tests.gateways import trained
from tests.integration.test_gateway_agents import Recording
from tests.rollouts import engine, rollout, save_model
from treadle.config import AgentLoopConfig, FailureConfig, RewardConfig
from treadle.data.generators import list_verifiers_tasks
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutParts
from treadle.types import Request, Status

PYTHON = Path(os.environ.get("VERIFIERS", ROOT / ".venv-verifiers")).absolute() / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test-hubs builds .venv-verifiers")

TASKSET = """
import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str = ""


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "0":
            raise RuntimeError("no zero")
        return float(self.data.answer in str(trace.nodes[-1].message.content))


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self) -> list[SumsTask]:
        return [SumsTask(SumsData(prompt=f"What is {n} + {n}?", answer=str(2 * n)), self.config.task) for n in range(3)]


__all__ = ["SumsTaskset"]
"""


def two(request: Request, rng: Random) -> str:
    return "It is 2."


def test_tasks_are_listed_played_and_scored_by_verifiers_with_exact_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "treadle_sums.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = {"python": str(PYTHON)}
    tasks = list(list_verifiers_tasks("verifiers:treadle_sums", options, "data.train_files"))
    assert [task.messages[0]["content"] for task in tasks] == [f"What is {n} + {n}?" for n in range(3)]
    kwargs = {"python": str(PYTHON), "inherit_env": ["PYTHONPATH", "SSL_CERT_FILE", "UV_DEFAULT_INDEX", "UV_INDEX_URL"]}
    section = rollout(
        loops={"verifiers_agent": AgentLoopConfig(kwargs=kwargs)},
        response_length=1000,
        max_model_len=4000,
        failures=FailureConfig(session_retries=0, max_failed_fraction=1.0),
    )
    recording: Any = Recording(engine(two))
    reward = RewardConfig(environment_weight=1.0)
    parts = RolloutParts(engines=[recording])
    model = save_model(tmp_path / "model")
    with AgentLoopManager.create_blocking(rollout=section, model=model, reward=reward, parts=parts) as manager:
        zero, one, other = manager.generate_sequences_blocking(tasks).trajectories
    assert (
        zero.outcome.status is Status.FAILED and zero.outcome.boundary == "reward" and "no zero" in zero.outcome.detail
    )
    assert [one.reward.value, other.reward.value] == [1.0, 0.0]
    found = sum((trained(trajectory.rows) for trajectory in (one, other)), Counter())
    assert found <= Counter(recording.sampled) and found.total() == 2
