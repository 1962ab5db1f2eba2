"""Every example runs as its own first lines say."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.fake_endpoint import FakeEndpoint
from tests.integration.test_gateway_agents import check_exact
from tests.integration.test_gateway_agents import config as loop_config
from tests.integration.test_gateway_agents import run as run_agents
from tests.rollouts import save_model
from treadle.cli.main import main
from treadle.journal import JournalReader

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/rollout.yaml"))


def run(monkeypatch, capsys, tmp_path: Path, name: str, *words: str) -> dict:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["treadle"])
    with pytest.raises(SystemExit) as left:
        main(["rollout", f"examples/{name}/rollout.yaml", f"logging.run_dir={tmp_path}", "--json", *words])
    printed = capsys.readouterr()
    assert left.value.code == 0, printed.err
    return json.loads(printed.out)


def test_the_index_names_every_example():
    index = (ROOT / "examples" / "README.md").read_text()
    assert all(f"examples/{name}/rollout.yaml" in index for name in EXAMPLES)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "endpoint"])
def test_an_example_runs_and_scores(monkeypatch, capsys, tmp_path, name):
    summary = run(monkeypatch, capsys, tmp_path, name)
    assert summary["num_failed"] == 0
    assert summary["sources"][0]["reward_mean"] > 0


def test_a_grpo_of_forty_lines_learns(monkeypatch):
    path = ROOT / "examples" / "hand_written_grpo" / "grpo.py"
    assert len(path.read_text().splitlines()) <= 40
    curve = runpy.run_path(str(path))["main"](steps=12)
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 0.15


def test_a_game_is_trained_by_self_play_and_played_against_an_opponent(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["treadle"])
    small = ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=2", "trainer.total_training_steps=2"]
    config, run_dir, match = "examples/self_play/train.yaml", tmp_path / "run", tmp_path / "match"
    with pytest.raises(SystemExit) as trained:
        main(["train", config, f"logging.run_dir={run_dir}", "logging.annotations=1", *small])
    assert trained.value.code == 0
    with JournalReader.open(run_dir) as reader:
        games = [entry.trajectory for entry in reader.trajectories()]
        assert {game.seats[:1] for game in games} == {(0,)} and all(
            len(game.policy_seats) == game.num_rows for game in games
        )
        assert any(game.num_rows == 2 for game in games)
    opponent = "rollout.multi_turn.opponents=[treadle/tiny-calculator]"
    with pytest.raises(SystemExit) as played:
        words = [f"model.path={run_dir}", opponent, "data.train_max_samples=2", f"logging.run_dir={match}", *small[2:3]]
        main(["rollout", config, *words])
    assert played.value.code == 0
    with JournalReader.open(match) as reader:
        games = [entry.trajectory for entry in reader.trajectories()]
    assert len(games) == 4 and all(game.extra["opponent"] == "treadle/tiny-calculator" for game in games)
    for game in games:
        assert set(game.policy_seats) <= {game.sample}, "samples of a task take the seats in turn"


STREAMING = "rollout.agent.loops.function_agent.kwargs.function=examples.openai_sdk_agent.streaming:solve"
SDK_AGENTS = {
    "treadle.recipes.openai_sdk_agent.agent": ("openai_sdk_agent", "chat", []),
    "examples.openai_sdk_agent.streaming": ("openai_sdk_agent", "chat", [STREAMING]),
    "examples.anthropic_sdk_agent.agent": ("examples/anthropic_sdk_agent/train.yaml", "messages", []),
}


@pytest.mark.parametrize("name", SDK_AGENTS)
def test_an_sdk_agent_trains_unmodified(monkeypatch, capsys, tmp_path, name):
    config, dialect, words = SDK_AGENTS[name]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["treadle"])
    small = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=4", "trainer.total_training_steps=2"]
    quiet = ["trainer.test_freq=-1", "trainer.val_before_train=false", "data.val_files=[]"]
    with pytest.raises(SystemExit) as left:
        main(["train", config, f"logging.run_dir={tmp_path}", *small, *quiet, *words])
    printed = capsys.readouterr()
    assert left.value.code == 0 and f"{dialect} requests of 32 sessions in 32 rows" in printed.err, printed.err
    with JournalReader.open(tmp_path) as reader:
        (event,) = reader.events(kind="gateway")
    assert event.fields["echoes/exact"] > 0 and not [name for name in event.fields if name.startswith("forks/")]


def calculates(request, rng) -> str:
    """A call, spaced as no serializer does; what is wrong with it; an answer."""
    said = (
        '<tool_call>\n{"name": "calculate",  "arguments": {"expression":"1+2"}}\n</tool_call>',
        '<tool_call>\n{"name": "calculate",  "arguments": {"expression": "one"}}\n</tool_call>',
        "It is 3.",
    )
    return said[sum(message["role"] == "assistant" for message in request.messages)]


@pytest.mark.parametrize("name", SDK_AGENTS)
def test_an_sdk_agent_trains_what_was_sampled_token_by_token(tmp_path, name):
    section = loop_config("function_agent", {"function": f"{name}:solve"}, num_workers=1)
    _, recording = run_agents(section, save_model(tmp_path / "model"), tmp_path, calculates)
    for trajectory in check_exact(tmp_path, recording):
        assert len(trajectory.rows) == 1 and trajectory.extra["gateway"]["echoes"] == {"exact": 2}
        results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        assert results[0] == "3" and results[1].startswith("write two whole numbers")
        assert trajectory.response_text == "It is 3."


def test_the_endpoint_example_evaluates_a_server(monkeypatch, capsys, tmp_path):
    with FakeEndpoint() as endpoint:
        summary = run(monkeypatch, capsys, tmp_path, "endpoint", f"rollout.openai.base_url={endpoint.base_url}")
    assert (summary["num_trajectories"], summary["num_failed"]) == (40, 0)
