"""What keys of `reward` change: in scores of functions and judges, in failures, and in what a judge is asked when."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests import virtual_time
from tests.effects.cases import Case, config_cases, configured
from tests.fake_endpoint import FakeEndpoint
from tests.reward_models import make_task, make_trajectory
from tests.rollouts import renderer, save_model
from treadle.config.reward import RewardConfig
from treadle.engine.replica_supervisor import StartedEngines
from treadle.errors import TreadleError
from treadle.reward.context import NO_CONTEXT, RewardContext
from treadle.reward.function import RewardFunction
from treadle.reward.scorer import Gradings, Scorer
from treadle.rollout.engines import start_engines
from treadle.types import Request, Row, StopReason, ToolResult, Trajectory, Turn

HERE = __name__
FUNCTIONS = "tests.effects.reward_functions"
BASE = "model: {path: unused}\nrollout: {name: scripted}\nreward: {num_workers: 0}\n"
ASKED: list[Request] = []
"""What the scripted judge was asked."""


async def patient(response: str) -> float:
    await asyncio.sleep(5)
    return 1.0


def judged(request: Request, rng: Random) -> str:
    """The scripted judge: scores that differ from draw to draw; every third answer cannot be read."""
    ASKED.append(request)
    draw = request.sample
    if "unreadable" in str(request.messages[-1]["content"]) and draw < 2:
        return "I would rather not say."
    return f"Score: {(5, 1, 5, 2)[draw % 4]} Grade: {draw + 1}\nverdict: fair"


def loud(request: Request, rng: Random) -> str:
    return "Score: 9"


def half(text: str) -> float:
    return 0.5


def make_sample(number: int) -> Trajectory:
    """With rewards for a turn and for a tool call, and an answer of its own length."""
    turn = Turn(0, 1, 1, StopReason.STOP, results=(ToolResult("3", reward=0.25),), reward=0.5)
    row = Row((1,), (5,), (1,), (-0.5,), (0,), turns=(turn,))
    return replace(make_trajectory("42" + "!" * number, sample=number), rows=(row,))


async def scores(reward: RewardConfig, context: RewardContext = NO_CONTEXT, count: int = 2) -> Any:
    """Scores of some samples of a task that are scored side by side, and of their group; or the failures."""

    async def one(sample: Trajectory) -> Any:
        try:
            return await scorer.score(task, sample)
        except TreadleError as error:
            return str(error)

    ASKED.clear()
    task, clock = replace(make_task(), ground_truth=os.getpid()), asyncio.get_running_loop().time
    samples, began = [make_sample(number) for number in range(count)], clock()
    try:
        scorer = await Scorer.create(reward, context)
    except TreadleError as error:
        return str(error)
    async with scorer:
        found = await asyncio.gather(*map(one, samples))
        if scorer.scores_groups:
            scored = [replace(item, reward=score) for item, score in zip(samples, found, strict=True)]
            try:
                found = await scorer.score_group(task, scored)
            except TreadleError as error:
                found = [str(error)]
    asked = sorted((request.uid, request.sample, request.ids, str(request.sampling)) for request in ASKED)
    return found, asked, clock() - began


def scored(directory: Path, **keys: Any) -> Any:
    """In virtual time, in this process; judges speak through scripted engines, started as a rollout starts them."""
    started: list[str] = []

    async def start(*arguments: Any) -> StartedEngines:
        replicas = await start_engines(*arguments)
        started.extend(engine.name for engine in replicas.engines)
        return replicas

    config = configured(BASE, keys)
    around = RewardContext(save_model(directory / "policy"), renderer(), None, start)
    return virtual_time.run(scores(config.reward, around)), started


def scored_by_model(directory: Path, **keys: Any) -> Any:
    """The same with a judge that has a tokenizer and a template of its own."""
    for name in ("a", "b"):
        save_model(directory / name)
    template = directory / "b" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> "))
    template = directory / "a" / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ mood }}")
    path = keys["reward.judges.*.path"]
    return scored(directory, **{**keys, "reward.judges.*.path": str(directory / path)})


def in_workers(directory: Path, **keys: Any) -> Any:
    """In real worker processes; without times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_A_JUDGE", "secret")
        found = asyncio.run(
            scores(configured(BASE, {"reward.num_workers": 1, "reward.retries": 0, **keys}).reward, count=1)
        )
    return found[0] if isinstance(found, tuple) else found


def at_endpoint(directory: Path, **keys: Any) -> Any:
    """What a judge behind an HTTP server sends there; or why it did not start."""
    with FakeEndpoint() as endpoint:
        url = endpoint.base_url
        endpoint.message = {"content": "Score: 3"}
        endpoint.models = replace(endpoint.models, delay_s=0.05)
        given = {**keys, "reward.judges.*.engine.openai.base_url": keys[f"{ENGINE}.openai.base_url"].format(url)}
        around = RewardContext(
            save_model(directory), renderer(), None, start_engines, api_keys={"ONE": "key 1", "TWO": "key 2"}
        )
        found = asyncio.run(scores(configured(BASE, given).reward, around, count=1))
        found = found[0] if isinstance(found, tuple) else found
        headers = [header.get("authorization") for header in endpoint.headers]
        return str(found).replace(url, "URL"), endpoint.chats, headers


ENGINE = "reward.judges.*.engine"
JUDGE = {
    "reward.judges.*.prompt": "Rate {{ response }}",
    f"{ENGINE}.name": "scripted",
    f"{ENGINE}.scripted.script": f"{HERE}:judged",
}
HARD = {**JUDGE, "reward.judges.*.prompt": "unreadable {{ response }}"}
OWN = {**JUDGE, "reward.judges.*.path": "a"}
SLOW = {**JUDGE, f"{ENGINE}.scripted.latency_s": 10.0}
SERVED = {
    "reward.judges.*.prompt": "Rate {{ response }}",
    f"{ENGINE}.name": "openai",
    f"{ENGINE}.openai.base_url": "{}",
}
LENGTH = {"reward.functions.*.path": f"{FUNCTIONS}:length"}
PATIENT = {"reward.functions.*.path": f"{HERE}:patient"}


def path(name: str) -> dict[str, str]:
    return {"reward.functions.*.path": f"{FUNCTIONS}:{name}"}


def graded(directory: Path, **keys: Any) -> Any:
    """How many gradings run at once."""
    running, most = [0], [0]

    async def grade() -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0)
        running[0] -= 1
        return 1.0

    async def run() -> None:
        gradings = await Gradings.create(configured(BASE, keys).reward)
        function = RewardFunction("tests", grade, (), (), {})
        await asyncio.gather(*(gradings.run(function, {}) for _ in range(4)))
        await gradings.close()

    asyncio.run(run())
    return most[0]


EFFECTS: dict[str, Case] = {
    **config_cases(
        "reward",
        scored,
        ("bounds", [-1e6, 1e6], [0.0, 2.0], LENGTH),
        ("environment_weight", None, 3.0, LENGTH),
        ("tools_weight", None, 3.0, LENGTH),
        ("timeout_s", 1.0, 10.0, PATIENT),
        ("on_timeout", None, -1.0, {**PATIENT, "reward.timeout_s": 1.0}),
        ("retries", 0, 2, {**PATIENT, "reward.timeout_s": 1.0}),
        ("rate_limit_per_s", None, 0.5, LENGTH),
        ("functions.*.path", f"{FUNCTIONS}:length", f"{FUNCTIONS}:double"),
        ("functions.*.kwargs", {"offset": 0.0}, {"offset": 1.0}, LENGTH),
        ("functions.*.weight", 1.0, 2.0, LENGTH),
        ("functions.*.scope", "sample", "group", LENGTH),
        ("judges.*.weight", 1.0, 2.0, JUDGE),
        ("judges.*.prompt", "Rate {{ response }}", "Rate this: {{ response }}", JUDGE),
        ("judges.*.scope", "sample", "group", {**JUDGE, "reward.judges.*.prompt": "Rate {{ responses }}"}),
        ("judges.*.system", None, "Be fair.", JUDGE),
        ("judges.*.pattern", r"Score: (\d)", r"Grade: (\d)", JUDGE),
        ("judges.*.words", {"fair": 0.5}, {"fair": 0.7}, {**JUDGE, "reward.judges.*.pattern": r"verdict: (\w+)"}),
        ("judges.*.parser", None, f"{HERE}:half", JUDGE),
        ("judges.*.bounds", None, [0.0, 1.0], JUDGE),
        ("judges.*.retries", 0, 2, HARD),
        ("judges.*.n", 1, 3, JUDGE),
        ("judges.*.vote", "mean", "majority", {**JUDGE, "reward.judges.*.n": 3}),
        ("judges.*.temperature", 0.6, 0.7, JUDGE),
        ("judges.*.top_p", 1.0, 0.9, JUDGE),
        ("judges.*.seed", 1, 2, JUDGE),
        ("judges.*.response_length", 4, 99, JUDGE),
        ("judges.*.max_concurrency", 1, 2, SLOW),
        ("judges.*.timeout_s", 5.0, 20.0, SLOW),
        ("judges.*.engine.replicas", 1, 2, JUDGE),
        ("judges.*.engine.max_model_len", 20, 99, {**JUDGE, "reward.judges.*.response_length": 15}),
        ("judges.*.engine.scripted.script", f"{HERE}:judged", f"{HERE}:loud", JUDGE),
        ("judges.*.engine.scripted.latency_s", 1.0, 2.0, JUDGE),
        ("judges.*.engine.scripted.latency_tail", 1.0, 5.0, SLOW),
        ("judges.*.engine.scripted.failure_rate", 0.0, 1.0, JUDGE),
        ("judges.*.engine.scripted.hang_rate", 0.0, 1.0, JUDGE),
    ),
    **config_cases(
        "reward.judges.*",
        scored_by_model,
        ("path", "a", "b", OWN),
        ("apply_chat_template_kwargs", {}, {"mood": "!"}, OWN),
    ),
    **config_cases(
        "reward",
        in_workers,
        ("num_workers", 0, 1, path("home")),
        ("memory_mb", 256, 2048, path("allocate")),
        ("cpu_time_s", 0.1, 60.0, path("spin")),
        ("functions.*.sandbox", False, True, path("reach")),
        ("functions.*.python", None, sys.executable, path("apart")),
        ("functions.*.env", [], ["KEY_OF_A_JUDGE"], path("reach")),
    ),
    **config_cases("reward", graded, ("max_gradings", 1, 3)),
    **config_cases(
        ENGINE,
        at_endpoint,
        ("name", "openai", "scripted", SERVED),
        ("openai.base_url", "{}", "{}/nowhere", SERVED),
        ("openai.model", None, "second-model", SERVED),
        ("openai.api_key_env", "ONE", "TWO", SERVED),
        ("openai.extra_body", {}, {"user": "me"}, SERVED),
        ("launch_timeout_s", 0.01, 300.0, SERVED),
    ),
}
