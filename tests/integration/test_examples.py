"""Every example runs as its own first lines say."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.fake_endpoint import FakeEndpoint
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


def test_an_openai_sdk_agent_trains_unmodified(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["treadle"])
    small = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=4", "trainer.total_training_steps=2"]
    quiet = ["trainer.test_freq=-1", "trainer.val_before_train=false", "data.val_files=[]"]
    with pytest.raises(SystemExit) as left:
        main(["train", "openai_sdk_agent", f"logging.run_dir={tmp_path}", *small, *quiet])
    printed = capsys.readouterr()
    assert left.value.code == 0 and "chat requests of 32 sessions in 32 rows" in printed.err, printed.err
    with JournalReader.open(tmp_path) as reader:
        (event,) = reader.events(kind="gateway")
    assert event.fields["echoes/exact"] > 0 and not [name for name in event.fields if name.startswith("forks/")]


def test_the_endpoint_example_evaluates_a_server(monkeypatch, capsys, tmp_path):
    with FakeEndpoint() as endpoint:
        summary = run(monkeypatch, capsys, tmp_path, "endpoint", f"rollout.openai.base_url={endpoint.base_url}")
    assert (summary["num_trajectories"], summary["num_failed"]) == (40, 0)
