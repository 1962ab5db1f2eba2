"""Tasks of verifiers: mistakes are found before anything starts, and its errors are failures at a boundary of ours."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts import rollout
from treadle.config import DataConfig
from treadle.data.generators import check_source_kwargs, is_function
from treadle.data.tasks import load_training_tasks
from treadle.errors import ConfigError, EnvironmentFailure, LoopFailure, RewardFailure, ToolFailure
from treadle.gateway.verifiers_agent import VerifiersAgentLoop


def load(**options: Any) -> Any:
    return load_training_tasks(DataConfig(train_files=("verifiers:sums",), source_kwargs={"sums": options}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "must be an interpreter that has verifiers"),
        ({"python": "/no/such/python"}, "must be an interpreter that has verifiers"),
        ({"python": sys.executable, "size": 3}, "takes python and env, not size"),
        ({"python": sys.executable, "env": 3}, "must be a map"),
        ({"python": sys.executable}, "verifiers cannot list it: ModuleNotFoundError: No module named 'verifiers'"),
    ],
)
def test_a_taskset_that_cannot_be_listed_says_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(**options)


def test_a_taskset_is_no_function_and_its_arguments_are_used() -> None:
    assert not is_function("verifiers:sums")
    check_source_kwargs(DataConfig(train_files=("verifiers:sums",), source_kwargs={"sums": {}}))


@pytest.mark.parametrize("source", ["harbor:hello-world", "harbor:org/hello-world@2"])
def test_tasks_of_harbor_are_refused_with_what_plays_them(source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_tasks(DataConfig(train_files=(source,)))
    assert "data.train_files: Harbor's tasks each have a container image of their own" in str(caught.value)
    assert f"env.taskset.dataset: {source.removeprefix('harbor:')}" in str(caught.value)


class FakeSession:
    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("ToolsetError", ToolFailure),
        ("TaskError", RewardFailure),
        ("EnvError", EnvironmentFailure),
        ("SandboxError", EnvironmentFailure),
        ("HarnessError", LoopFailure),
    ],
)
def test_an_error_of_verifiers_is_a_failure_and_never_a_zero(kind: str, failure: Any, tmp_path: Path) -> None:
    loop = VerifiersAgentLoop(rollout(), sys.executable)
    result = {"ok": False, "reward": 0.0, "errors": [{"type": kind, "message": "it broke"}], "stops": [], "metrics": {}}
    (tmp_path / ".treadle-result.json").write_text(json.dumps(result))
    session: Any = FakeSession()
    with pytest.raises(failure, match=f"verifiers: {kind}: it broke"):
        loop.read_result(tmp_path, session)
    assert session.extra["verifiers"]["errors"] == result["errors"]
    (tmp_path / ".treadle-result.json").write_text(json.dumps({**result, "ok": True, "reward": 0.5, "errors": []}))
    assert loop.read_result(tmp_path, session) == 0.5


def test_an_interpreter_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="there is no such interpreter"):
        VerifiersAgentLoop(rollout(), "/no/such/python")
