"""docs/agents.md tells the truth: its agents are the examples that other tests run, and its functions run here."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import treadle
from tests.integration.test_gateway_agents import check_exact, config, run
from tests.rollouts import save_model
from treadle.config import load

ROOT = Path(treadle.__file__).parents[1]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- file: (\S+) -->\n```(\w+)\n(.*?)```", PAGE, re.DOTALL)
FUNCTIONS = [(name, text) for name, _, text in BLOCKS if "/" not in name]


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, language, t in BLOCKS if "/" in n and language == "python"])
def test_a_program_of_the_page_is_the_example(name: str, text: str) -> None:
    assert text == (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, language, t in BLOCKS if language == "yaml"])
def test_a_config_of_the_page_starts_what_the_example_starts(name: str, text: str) -> None:
    shown = yaml.safe_load(text)["rollout"]["agent"]["loops"]["program_agent"]["kwargs"]
    started = dict(load(ROOT / name).rollout.agent.loops["program_agent"].kwargs)
    assert {**shown, "argv": tuple(shown["argv"])} == started


@pytest.mark.parametrize(("name", "text"), FUNCTIONS)
def test_a_function_of_the_page_trains_what_was_sampled(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model: Any = save_model(tmp_path / "model")
    section = config("function_agent", {"function": f"{name.removesuffix('.py')}:solve"})
    batch, recording = run(section, model, tmp_path, ground_truth="3")
    for trajectory in check_exact(tmp_path, recording):
        assert trajectory.num_turns == 3 and trajectory.extra["gateway"]["echoes"] == {"exact": 2}
    assert {trajectory.reward.value for trajectory in batch.trajectories if trajectory.reward} == {1.0}


def test_every_framework_has_its_lines() -> None:
    assert len(FUNCTIONS) == 2 and len(BLOCKS) == 8
