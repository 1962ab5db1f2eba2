"""Answers that no model can have given: refused at the router by the replica's name, and asked of another one."""

import json
import random
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from tests import virtual_time
from tests.letters import ask, decode, encode
from tests.rollouts import engine, renderer, rollout, tasks
from treadle.config import FailureConfig, ModelConfig
from treadle.config.rollout import LimitsConfig, ScriptedConfig
from treadle.engine.requests import AnswerCheck
from treadle.engine.router import Router
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import EngineFailure
from treadle.model.tokenizer import read_vocabulary_size
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutParts
from treadle.types import Completion, Request

NUM_WORDS = 0x110000
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "beyond": ({"ids": (65, NUM_WORDS)}, f"token ids from 65 to {NUM_WORDS}; the model knows 0 to {NUM_WORDS - 1}"),
    "negative": ({"ids": (65, -1)}, "token ids from -1 to 65"),
    "no number": ({"ids": (65, "66")}, "something else than numbers"),
    "NaN": ({"logprobs": (-0.5, nan)}, "a logprob of nan for token 1"),
    "all NaN": ({"logprobs": (nan, nan)}, "a logprob of nan for token 0"),
    "positive": ({"logprobs": (0.5, -0.5)}, "a logprob of 0.5 for token 0"),
    "infinite": ({"logprobs": (-inf, -0.5)}, "a logprob of -inf for token 0"),
    "infinities that cancel": ({"logprobs": (inf, -inf)}, "a logprob of inf for token 0"),
    "too few logprobs": ({"logprobs": (-0.5,)}, "1 logprobs for 2 token ids"),
    "too many versions": ({"versions": (0, 0, 0)}, "3 versions for 2 token ids"),
    "processed": ({"processed_logprobs": (-0.5, 1.0)}, "a logprob of 1.0 for token 1"),
    "too few processed": ({"processed_logprobs": (-0.5,)}, "1 processed logprobs for 2 token ids"),
}
TRUE = {"ids": (65, 66), "logprobs": (-0.5, 1e-6), "versions": (0, 0)}


class LyingEngine(ScriptedEngine):
    """Changes its answers."""

    lie: dict[str, Any]

    async def generate(self, request: Request) -> Completion:
        return replace(await super().generate(request), **{**TRUE, **self.lie})


def liar(name: str, lie: dict[str, Any]) -> LyingEngine:
    made = LyingEngine.create(ScriptedConfig(), name=name, encode=encode, decode=decode)
    made.lie = lie
    return made


def door(*engines: ScriptedEngine, has_logprobs: bool = True) -> Router:
    failures, rng = FailureConfig(request_retries=1), random.Random(0)
    check = AnswerCheck(NUM_WORDS, has_logprobs=has_logprobs)
    return Router(engines, limits=LimitsConfig(), failures=failures, rng=rng, check=check)


@pytest.mark.parametrize("name", LIES)
def test_a_broken_answer_is_the_replicas_failure_and_another_one_is_asked(name: str) -> None:
    lie, words = LIES[name]

    async def main() -> None:
        with pytest.raises(EngineFailure, match=r"bad: session task/0: the engine answered with") as caught:
            await door(liar("bad", lie)).generate(ask())
        assert words in str(caught.value)
        both = door(liar("bad", lie), liar("good", {}))
        answers = [await both.generate(ask(uid=f"t{at}")) for at in range(8)]
        assert {answer.ids for answer in answers} == {TRUE["ids"]}
        assert {answer.logprobs for answer in answers} == {TRUE["logprobs"]}

    virtual_time.run(main())


def test_an_engine_that_measures_no_logprobs_may_say_so_for_all_of_them_and_not_for_some() -> None:
    async def main() -> None:
        unmeasured = door(liar("endpoint", {"logprobs": (nan, nan)}), has_logprobs=False)
        assert (await unmeasured.generate(ask())).ids == TRUE["ids"]
        with pytest.raises(EngineFailure, match="a logprob of nan for token 1"):
            await door(liar("endpoint", {"logprobs": (-0.5, nan)}), has_logprobs=False).generate(ask())

    virtual_time.run(main())


@pytest.mark.parametrize("config", [{"vocab_size": 333}, {"text_config": {"vocab_size": 333}}])
def test_a_rollout_refuses_ids_that_its_model_does_not_embed(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(path=str(tmp_path))
    assert read_vocabulary_size(model) == 333
    assert read_vocabulary_size(ModelConfig(path=str(tmp_path), override_config={"vocab_size": 7})) == 7
    once = FailureConfig(max_failed_fraction=1.0, session_retries=0, request_retries=0)
    parts = RolloutParts(engines=[engine(lambda request, rng: (65, 333))], renderer=renderer())
    with AgentLoopManager.create_blocking(rollout=rollout(failures=once), model=model, parts=parts) as made:
        (trajectory,) = made.generate_sequences_blocking(tasks(1)).trajectories
    assert trajectory.outcome.boundary == "engine"
    assert "scripted-0: session task0/0: the engine answered with token ids from 65 to 333" in trajectory.outcome.detail
    parts = RolloutParts(engines=[engine(lambda request, rng: (65, 66))], renderer=renderer())
    with AgentLoopManager.create_blocking(rollout=rollout(failures=once), model=model, parts=parts) as made:
        (trajectory,) = made.generate_sequences_blocking(tasks(1)).trajectories
    assert trajectory.outcome.ok
