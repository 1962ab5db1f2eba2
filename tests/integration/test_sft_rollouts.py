"""Supervised fine-tuning on the trajectories of a run, which are sampled once for several tests."""

import asyncio
import json
import shutil

import pytest

import treadle
from tests.sft_runs import MODEL, run_sft, sft_config
from treadle.api.results import Evaluation
from treadle.config import ModelConfig, SFTRunConfig
from treadle.data.renderer import Renderer
from treadle.errors import ConfigError
from treadle.journal import JournalReader
from treadle.model.tokenizer import Vocabulary, resolve_model_path
from treadle.rollout import Action, Opening, Step
from treadle.trainer.sft_data import load_sft_rows
from treadle.types import Task

pytestmark = pytest.mark.filterwarnings("ignore::treadle.config.ConfigWarning")


def refuse(config: SFTRunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        run_sft(config)
    return str(caught.value)


def _score(trajectory) -> float:
    return float(trajectory.sample == 0)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """The trajectories of a run; of each task the first sample has a reward of 1."""
    return treadle.rollout(
        model=MODEL,
        tasks=[{"prompt": f"{at}+2=", "answer": str(at + 2)} for at in range(8)],
        reward={"length": {"path": _score}},
        rollout={"n": 2, "response_length": 12},
        run_dir=tmp_path_factory.mktemp("rollout") / "sampled",
    )


def test_the_trajectories_of_a_run_train_with_the_tokens_that_were_sampled(tmp_path, sampled):
    config = sft_config(tmp_path, f"data.train_files={sampled.run_dir}", "sft.min_reward=0.5")
    rows = asyncio.run(load_sft_rows(config, Renderer.create(config.model)))
    good = [item for item in sampled.trajectories() if item.reward is not None and item.reward.value >= 0.5]
    assert 0 < len(good) < 16
    assert sorted((row.prompt_ids, row.ids, row.mask) for row in rows.rows.values()) == sorted(
        (row.prompt_ids, row.ids, row.mask) for item in good for row in item.rows
    )
    assert rows.below_reward == 16 - len(good)
    with JournalReader.open(sampled.run_dir) as reader:
        assert len(list(reader.headlines())) == 16


class Unfair:
    """Two players, one move each: the first one wins."""

    def reset(self, task: Task) -> list[Opening]:
        return [Opening("You are A.", first=True), Opening("You are B.")]

    def step(self, action: Action) -> Step:
        return Step(done=True, rewards=[1.0, 0.0]) if action.seat else Step("A has moved.", seat=1)


def test_of_an_episode_of_several_agents_the_seats_that_were_rewarded_are_learned(tmp_path):
    sampled = treadle.rollout(
        model=MODEL,
        tasks=[{"prompt": "play", "uid": "validation-of-mine"}],
        environment=Unfair,
        rollout={"n": 2, "response_length": 12},
        run_dir=tmp_path / "sampled",
    )
    config = sft_config(tmp_path, f"data.train_files={sampled.run_dir}", "sft.min_reward=1")
    rows = asyncio.run(load_sft_rows(config, Renderer.create(config.model)))
    winners = [
        row for item in sampled.trajectories() for row, seat in zip(item.rows, item.seats, strict=True) if not seat
    ]
    assert len(winners) == 2 == rows.below_reward
    assert sorted((row.prompt_ids, row.ids) for row in rows.rows.values()) == sorted(
        (row.prompt_ids, row.ids) for row in winners
    )


def test_a_run_without_a_least_reward_is_refused(tmp_path):
    treadle.rollout(model=MODEL, tasks=[{"prompt": "1"}], run_dir=tmp_path / "sampled", rollout={"response_length": 4})
    assert "sft.min_reward: is needed" in refuse(
        sft_config(tmp_path / "it", f"data.train_files={tmp_path / 'sampled'}")
    )
    told = refuse(sft_config(tmp_path / "it", f"data.train_files={tmp_path / 'sampled'}", "sft.min_reward=2"))
    assert "no trajectory has a reward of sft.min_reward 2 or more" in told


def test_the_ids_of_another_tokenizer_are_refused(tmp_path, sampled):
    other = tmp_path / "other"
    shutil.copytree(resolve_model_path(MODEL), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    merged = {token: at for at, token in enumerate(tokenizer["model"]["vocab"])}
    one, two = list(merged)[100:102]
    tokenizer["model"]["vocab"][one], tokenizer["model"]["vocab"][two] = merged[two], merged[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    difference = Vocabulary.of(ModelConfig(path=MODEL)).difference(Vocabulary.of(ModelConfig(path=str(other))))
    assert difference is not None and "2 differ" in difference
    words = (f"model.path={other}", f"data.train_files={sampled.run_dir}", "sft.min_reward=0")
    assert "those of another tokenizer" in refuse(sft_config(tmp_path / "it", *words))
