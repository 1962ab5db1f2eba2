"""What keys of `rollout` change: in trajectories of the scripted engine, in virtual time."""

import asyncio
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import virtual_time
from tests.effects.cases import Case, config_cases, configured
from tests.rollouts import CALL, FINAL, renderer, task, turns_of
from treadle.config import RolloutConfig
from treadle.errors import TreadleError
from treadle.rollout import AgentLoopBase, Session
from treadle.rollout.environment import Action, Opening, Reply, Step
from treadle.rollout.service import RolloutKind, RolloutParts, RolloutService
from treadle.types import Batch, Request, Task, Trajectory

HERE = __name__
BASE = f"""
model: {{path: unused}}
rollout:
  name: scripted
  scripted: {{script: "{HERE}:answer"}}
  agent: {{num_workers: 0}}
  multi_turn: {{tools: ["tests.rollouts:add", "{HERE}:wait"]}}
  failures: {{max_failed_fraction: 1.0}}
"""
WAIT = '<tool_call>{"name": "wait", "arguments": {"seconds": 20}}</tool_call>'
DOWN_CALL = '<tool_call>{"name": "unreachable", "arguments": {}}</tool_call>'
BROKEN = "<tool_call>{not json</tool_call>"


def answer(request: Request, rng: random.Random) -> str:
    """What the last message of the prompt asks for: the answers to come, turn by turn, after a bar."""
    first = str(next(message["content"] for message in request.messages if message["role"] == "user"))
    if first == "sampling":
        return json.dumps([str(value) for value in vars_of(request.sampling)])
    words = {"call": CALL, "wait": WAIT, "twice": WAIT + WAIT, "broken": BROKEN, "down": DOWN_CALL}
    asked = first.split()
    return words.get(asked[min(turns_of(request), len(asked) - 1)], FINAL)


def shout(request: Request, rng: random.Random) -> str:
    return "LOUD"


def vars_of(record: Any) -> list[Any]:
    return [getattr(record, name) for name in type(record).__dataclass_fields__]


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "0123456789" * 3


async def unreachable() -> str:
    """A tool whose host is down."""
    raise ConnectionError("no route")


class Twice(AgentLoopBase):
    """Two turns; says whether it runs in a worker process."""

    def __init__(self, rollout: RolloutConfig, doubt: str = "Sure?") -> None:
        super().__init__(rollout)
        self.doubt = doubt

    async def run(self, session: Session) -> None:
        session.extra["apart"] = "treadle.process" in sys.orig_argv
        await session.generate()
        await session.observe(self.doubt)
        await session.generate()


class Stubborn(AgentLoopBase):
    """Takes a minute to end when it is cancelled."""

    async def run(self, session: Session) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(60)


class Echo:
    """An environment that answers three times. Built by an async function: threads have no place in virtual time."""

    def __init__(self, seconds: float = 0.0, word: str = "again") -> None:
        self.seconds, self.word, self.turns = seconds, word, 0

    async def step(self, messages: Any) -> Reply:
        await asyncio.sleep(self.seconds)
        self.turns += 1
        return Reply(self.word if self.turns < 4 else None, 0.5)


class Silent(Echo):
    """One that answers never."""

    async def step(self, messages: Any) -> Reply:
        return Reply(None, 1.0)


class Duel:
    """Two seats with one turn each."""

    async def reset(self, task: Task) -> list[Opening]:
        return [Opening("one"), Opening("two")]

    async def step(self, action: Action) -> Step:
        return Step("go on") if action.seat == 0 else Step(done=True, rewards=[0.0, 1.0])


async def echo(task: Task, **kwargs: Any) -> Echo:
    return Echo(**kwargs)


async def silent(task: Task) -> Silent:
    return Silent()


def described(trajectory: Trajectory) -> Any:
    """What happened in it, and when; without what is measured by a real clock."""
    timing = replace(trajectory.timing, started_at=0.0)
    turns = [
        (turn.start, turn.reward, [result.text for result in turn.results], turn.generate_s, turn.tool_s)
        for row in trajectory.rows
        for turn in row.turns
    ]
    rows = [(row.prompt_ids, row.ids, row.mask) for row in trajectory.rows]
    times = [round(value, 6) for value in vars_of(timing)]
    known = (trajectory.uid, trajectory.sample, trajectory.attempt, trajectory.outcome, trajectory.extra)
    return *known, trajectory.messages, turns, rows, times


async def sampled(
    keys: dict[str, Any], asks: str, kind: RolloutKind = RolloutKind.TRAINING, agent: str | None = None
) -> Any:
    """The batch of two tasks with all its times, stall reports, and when closing was over; or the error."""
    random.seed(0)  # of the waits between attempts
    clock, stalls = asyncio.get_running_loop().time, list[Any]()
    rollout = configured(BASE, keys).rollout
    parts = RolloutParts(renderer=renderer(), on_stall=lambda report: stalls.append((report.now, report.waits)))
    model, asked = configured(BASE, {}).model, [task(f"t{at}", agent=agent) for at in range(2)]
    asked = [replace(item, messages=({"role": "user", "content": asks},)) for item in asked]
    service = await RolloutService.start(rollout, model, None, parts)
    try:
        batch: Batch | str = await service.generate(asked, kind)
    except TreadleError as error:
        batch = f"{type(error).__name__}: {error}"
    finally:
        await service.close()
    if isinstance(batch, str):
        return batch, stalls
    return [described(item) for item in batch.trajectories], batch.dropped, stalls, round(clock(), 6)


def asking(
    asks: str, kind: RolloutKind = RolloutKind.TRAINING, agent: str | None = None, run: Any = virtual_time.run
) -> Any:
    def observe(directory: Path, **keys: Any) -> Any:
        return run(sampled(keys, asks, kind, agent))

    return observe


def closed(directory: Path, **keys: Any) -> float:
    """How long closing takes with a session that does not end."""

    async def main() -> float:
        config, clock = configured(BASE, keys), asyncio.get_running_loop().time
        service = await RolloutService.start(config.rollout, config.model, None, RolloutParts(renderer=renderer()))
        running = asyncio.ensure_future(service.generate([task()], RolloutKind.TRAINING))
        await asyncio.sleep(1)
        began = clock()
        await service.close()
        took = clock() - began
        running.cancel()
        await asyncio.wait({running})
        return took

    return virtual_time.run(main())  # type: ignore[no-any-return]


def dueled(directory: Path, **keys: Any) -> Any:
    """Who played a game of two."""

    async def main() -> Any:
        config = configured(BASE, keys)
        service = await RolloutService.start(config.rollout, config.model, None, RolloutParts())
        try:
            batch = await service.generate([task()], RolloutKind.TRAINING)
        finally:
            await service.close()
        return [(item.outcome, item.extra) for item in batch.trajectories]

    return asyncio.run(main())


def in_processes(directory: Path, **keys: Any) -> Any:
    """Real workers: what they made, without times; or why they did not start."""

    async def main() -> Any:
        config = configured(BASE, keys)
        try:
            service = await RolloutService.start(config.rollout, config.model, None, RolloutParts(renderer=renderer()))
        except TreadleError as error:
            return str(error)
        try:
            batch = await service.generate([task()], RolloutKind.TRAINING)
        finally:
            await service.close()
        return [(item.outcome, item.messages, item.extra) for item in batch.trajectories]

    from tests.rollouts import save_model

    keys["model.path"] = save_model(directory / "model").path
    return asyncio.run(main())


SAMPLED = (
    *(("n", 1, 2), ("temperature", 0.5, 0.7), ("top_p", 1.0, 0.9), ("top_k", -1, 5), ("min_p", 0.0, 0.1)),
    *(("repetition_penalty", 1.0, 1.1), ("presence_penalty", 0.0, 0.5), ("frequency_penalty", 0.0, 0.5)),
    ("stop", [], ["x"]),
)
TOOLS = {"rollout.agent.default_agent_loop": "tool_agent"}
ECHO = {
    "rollout.agent.default_agent_loop": "environment_agent",
    "rollout.multi_turn.environment": f"{HERE}:echo",
}
DUEL = {
    "model.path": "treadle/tiny-calculator",
    "model.describe_tools": False,
    "rollout.agent.default_agent_loop": "environment_agent",
    "rollout.multi_turn.environment": f"{HERE}:Duel",
}
TWICE = {"rollout.agent.loops.*.path": f"{HERE}:Twice", "rollout.agent.default_agent_loop": "it"}
FAILING = {"rollout.scripted.failure_rate": 0.8, "rollout.scripted.latency_s": 3.0, "rollout.n": 4}
SLOW = {"rollout.scripted.latency_s": 50.0}
HANGING = {"rollout.scripted.hang_rate": 1.0, "rollout.failures.request_retries": 0}
DOWN = {**TOOLS, "rollout.multi_turn.tools": [f"{HERE}:unreachable"]}

EFFECTS: dict[str, Case] = {
    **config_cases("rollout", asking("sampling"), *SAMPLED, ("seed", 1, 2), ("ignore_eos", False, True)),
    **config_cases("rollout", asking("sampling"), ("response_length", 400, 450)),
    **config_cases("rollout.val_kwargs", asking("sampling", RolloutKind.VALIDATION), *SAMPLED),
    **config_cases(
        "rollout",
        asking("final"),
        ("prompt_length", 3, 100),
        ("overlong_prompts", "error", "drop", {"rollout.prompt_length": 3}),
        ("failures.request_retries", 0, 3, FAILING),
        ("failures.session_retries", 0, 2, FAILING),
        ("failures.max_failed_fraction", 0.1, 1.0, {**FAILING, "rollout.failures.min_finished": 2}),
        ("failures.min_finished", 2, 20, {**FAILING, "rollout.failures.max_failed_fraction": 0.1}),
        ("failures.min_group_size", 1, 4, {**FAILING, "rollout.failures.session_retries": 0}),
        ("limits.request_timeout_s", 10.0, 20.0, HANGING),
        ("limits.session_timeout_s", 30.0, 100.0, SLOW),
        ("limits.stall_report_s", 10.0, 40.0, SLOW),
        ("scripted.latency_s", 1.0, 2.0),
        ("scripted.latency_tail", 1.0, 5.0, SLOW),
        ("scripted.failure_rate", 0.0, 1.0),
        ("scripted.hang_rate", 0.0, 1.0),
        ("scripted.script", f"{HERE}:answer", f"{HERE}:shout"),
        ("agent.max_concurrent_sessions", 1, 2, SLOW),
        ("agent.default_agent_loop", "single_turn_agent", f"{HERE}:Twice"),
        ("agent.loops.*.path", f"{HERE}:Twice", f"{HERE}:Stubborn", TWICE),
        ("agent.loops.*.kwargs", {"doubt": "Sure?"}, {"doubt": "Really?"}, TWICE),
        ("multi_turn.environment", f"{HERE}:echo", f"{HERE}:silent", ECHO),
        ("multi_turn.environment_kwargs", {"word": "again"}, {"word": "more"}, ECHO),
        (
            *("multi_turn.environment_timeout_s", 5.0, 50.0),
            {**ECHO, "rollout.multi_turn.environment_kwargs": {"seconds": 20.0}},
        ),
        ("multi_turn.max_user_turns", 1, 2, ECHO),
    ),
    **config_cases("rollout.agent", asking("final", agent=f"{HERE}:Twice"), ("allow_imports_from_data", False, True)),
    **config_cases(
        "rollout",
        asking("wait wait final"),
        ("multi_turn.tools", [f"{HERE}:wait"], ["tests.rollouts:add"], TOOLS),
        ("multi_turn.format", "hermes", "mistral", TOOLS),
        ("multi_turn.max_assistant_turns", 1, 2, TOOLS),
        ("multi_turn.max_tool_response_length", 10, 20, TOOLS),
        (
            *("multi_turn.tool_response_truncate_side", "left", "right"),
            {**TOOLS, "rollout.multi_turn.max_tool_response_length": 15},
        ),
        ("multi_turn.tool_timeout_s", 10.0, 30.0, TOOLS),
        ("limits.session_tool_time_s", 30.0, 50.0, TOOLS),
    ),
    **config_cases("rollout.multi_turn", asking("twice final"), ("max_parallel_calls", 1, 2, TOOLS)),
    **config_cases("rollout.multi_turn", asking("broken"), ("max_invalid_calls", 1, 2, TOOLS)),
    **config_cases(
        "rollout.multi_turn",
        asking("down"),
        ("tool_retries", 0, 2, DOWN),
    ),
    **config_cases(
        "rollout.limits",
        closed,
        ("close_timeout_s", 1.0, 2.0, {"rollout.agent.default_agent_loop": f"{HERE}:Stubborn"}),
    ),
    **config_cases("rollout.agent", in_processes, ("num_workers", 0, 1, TWICE)),
    **config_cases(
        "rollout.multi_turn",
        in_processes,
        (
            *("environment_python", None, sys.executable),
            {**ECHO, "rollout.multi_turn.environment": "tests.effects.whereabouts:Whereabouts"},
        ),
    ),
    **config_cases(
        "rollout.multi_turn",
        dueled,
        ("opponents", [], ["treadle/tiny-calculator"], DUEL),
        ("opponent_share", 0.0, 1.0, {**DUEL, "rollout.multi_turn.opponents": ["treadle/tiny-calculator"]}),
    ),
    **config_cases(
        "rollout.limits", in_processes, ("launch_timeout_s", 0.001, 300.0, {"rollout.agent.num_workers": 1})
    ),
}
