"""Episodes of several agents: a row and rewards for each seat, groups by seat, self-play and opponents."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.rollouts import engine, renderer, rollout, save_model, task
from treadle.algorithm.advantage_inputs import AdvantageInputs, rows_of, split_seats
from treadle.config import ModelConfig
from treadle.config.reward import RewardConfig
from treadle.errors import EnvironmentFailure
from treadle.reward.scorer import Scorer
from treadle.rollout import Action, Opening, Step
from treadle.rollout.environment import read_openings, read_step
from treadle.rollout.protocol import Job
from treadle.rollout.seats import choose_opponent
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import Group, Request, SamplingParams, Score, StopReason, Trajectory


class Race:
    """Players add to a total in turn, and who reaches five wins; the second seat is told of the first one's move."""

    def __init__(self, starts: int = 0) -> None:
        self._total, self._starts = 0, starts

    def reset(self, task: Any) -> list[Opening]:
        openings = [Opening("You are A."), Opening("You are B.")]
        openings[self._starts] = replace(openings[self._starts], first=True)
        return openings

    def step(self, action: Action) -> Step:
        self._total += int(action.text)
        if self._total < 5:
            return Step(f"total {self._total}", reward=0.25)
        return Step(done=True, rewards=[float(action.seat == 0), float(action.seat == 1)], info={"winner": action.seat})


class Names:
    """A scripted model that answers by seat, and notes who was asked."""

    def __init__(self, **answers: str) -> None:
        self.answers, self.asked = answers, list[Request]()

    def __call__(self, request: Request, rng: Any) -> str:
        self.asked.append(request)
        return self.answers["B" if "B." in str(request.messages[0]["content"]) else "A"]


def play(script: Names, sample: int = 0, **fields: Any) -> Trajectory:
    config = rollout(default_agent_loop="environment_agent", environment=f"{__name__}:Race", **fields)

    async def main() -> Trajectory:
        worker = await AgentLoopWorker.create(
            rollout=config, model=ModelConfig(path="unused"), engine=engine(script), renderer=renderer()
        )
        try:
            sampling = SamplingParams(config.response_length, stop_token_ids=renderer().stop_token_ids)
            played = await worker.run(Job(task(), sample, sampling))
            assert isinstance(played, Trajectory)
            return played
        finally:
            await worker.close()

    return asyncio.run(main())


def scored(trajectory: Trajectory, reward: RewardConfig | None = None) -> Trajectory:
    async def score() -> Score | None:
        scorer = await Scorer.create(reward or RewardConfig())
        try:
            return await scorer.score(task(), trajectory)
        finally:
            await scorer.close()

    return replace(trajectory, reward=asyncio.run(score()))


def test_each_seat_has_a_row_a_conversation_and_rewards_of_its_own():
    played = play(Names(A="2", B="1"))  # 2, 3, 5: A wins
    assert played.outcome.reason is StopReason.STOP and played.seats == (0, 1)
    first, second = played.rows
    assert first.prompt_ids == renderer().prompt([{"role": "user", "content": "You are A."}])
    opened = [{"role": "user", "content": "You are B.\n\ntotal 2"}]
    assert second.prompt_ids == renderer().prompt(opened), "a seat begins with all that it was told"
    assert [turn.reward for turn in first.turns] == [0.25, 1.0] and [turn.reward for turn in second.turns] == [0.25]
    assert [message["content"] for message in played.messages] == ["You are A.", "2", "total 3", "2"]
    assert played.extra["environment"] == {"winner": 0}


def test_the_seat_that_moves_first_is_the_environments_choice():
    played = play(Names(A="1", B="4"), environment_kwargs={"starts": 1})
    assert played.seats == (1, 0) and played.extra["environment"] == {"winner": 0}


def test_a_trajectory_has_the_mean_of_its_seats_and_training_each_ones_own():
    played = scored(play(Names(A="2", B="1")))
    assert played.reward.value == pytest.approx((1.25 + 0.25) / 2)
    lost = scored(replace(play(Names(A="1", B="4")), sample=1))  # 1, 5: B wins
    groups = split_seats([Group(task(), (played, lost))])
    assert [[item.reward.value for item in group.trajectories] for group in groups] == [[1.25, 0.25], [0.25, 1.0]]
    inputs = AdvantageInputs.of(groups)
    assert inputs.group_N.tolist() == [0, 0, 1, 1], "a seat is compared with the same seat in other samples"
    assert rows_of(groups) == (played.rows[0], lost.rows[0], played.rows[1], lost.rows[1])


def test_what_reward_functions_gave_belongs_to_every_seat():
    played = scored(play(Names(A="2", B="1")), RewardConfig(environment_weight=0.5))
    whole = replace(played.reward, value=played.reward.value + 10.0, parts={**played.reward.parts, "style": 10.0})
    first, second = split_seats([Group(task(), (replace(played, reward=whole),))], {"environment": 0.5, "tools": 1.0})
    assert [group.trajectories[0].reward.value for group in (first, second)] == [10.625, 10.125]


def test_a_failed_episode_stays_one_failure_and_groups_of_one_agent_stay_as_they_are():
    played = scored(play(Names(A="2", B="1")))
    failed = play(Names(A="2", B="x"))
    assert not failed.outcome.ok and "int()" in failed.outcome.detail
    groups = split_seats([Group(task(), (played, replace(failed, sample=1)))])
    assert [len(group.trajectories) for group in groups] == [2, 1]
    alone = Group(task(), (replace(played, extra={}),))
    assert split_seats([alone]) == (alone,)


def test_against_an_opponent_the_policy_plays_one_seat_and_samples_take_turns():
    script = Names(A="2", B="1")
    for sample, own in ((0, 0), (1, 1)):
        script.asked.clear()
        played = play(script, sample, opponents=("old",))
        assert played.extra["opponent"] == "old" and list(played.policy_seats) == [own]
        assert [request.opponent for request in script.asked] == ["" if at == own else "old" for at in (0, 1, 0)]
        other = played.rows[1 - own]
        assert not any(other.mask) and set(other.versions) == {-1}, "what an opponent says is given"
        assert [request.position for request in script.asked if request.row == 0] == [0, 2], "noise goes on"
        assert [group.trajectories[0].rows for group in split_seats([Group(task(), (scored(played),))])] == [
            (played.rows[own],)
        ]


def test_a_share_of_tasks_is_played_against_opponents_each_by_the_same_one():
    turns = rollout(opponents=("old", "older"), opponent_share=0.5, environment="x:Y").multi_turn
    chosen = [choose_opponent(task(f"task{at}"), turns) for at in range(400)]
    assert chosen == [choose_opponent(task(f"task{at}"), turns) for at in range(400)]
    assert {*chosen} == {"", "old", "older"} and 150 < chosen.count("") < 250


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([Opening("x")], "a list of 1"),
        ([Opening("x", first=True), Opening("y", first=True)], "seats [0, 1] all move first"),
        ([Opening("x"), {"messages": "y", "frist": True}], "'frist'"),
        ([Opening("x", first=1), Opening("y")], "first must be true or false"),  # type: ignore[arg-type]
    ],
)
def test_openings_that_are_none_are_failures(returned, problem):
    with pytest.raises(EnvironmentFailure) as caught:
        read_openings(returned)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (Step("x", seat=2), "from 0 to 1, got 2"),
        (Step("x", seat=True), "from 0 to 1, got True"),
        (Step("x", rewards=[1.0]), "one number for each of 2 seats"),
        (Step("x", rewards=[1.0, float("nan")]), "finite"),
    ],
)
def test_steps_that_name_no_seat_are_failures(returned, problem):
    with pytest.raises(EnvironmentFailure) as caught:
        read_step(returned, 2)
    assert problem in str(caught.value)
    with pytest.raises(EnvironmentFailure, match="left out: there is one agent"):
        read_step(Step("x", rewards=[1.0]))


def test_an_opponent_with_another_tokenizer_is_refused(tmp_path):
    from treadle.errors import ConfigError
    from treadle.rollout.seats import Opponents

    other = save_model(tmp_path / "other")
    config = rollout(opponents=(other.path,), environment="x:Y")
    with pytest.raises(ConfigError, match="tokenizer is not that of"):
        asyncio.run(Opponents.start(config, ModelConfig(path="treadle/tiny-calculator"), renderer(), None))
