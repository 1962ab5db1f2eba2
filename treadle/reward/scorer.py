"""Scorer: which reward functions run where, attempts, models after functions, and the weighted sum.

Owns the split between this process (built-ins that are pure and bounded or wait for boxes, or everything where
`reward.num_workers` is 0) and worker processes (all else), and the retries. What the limits do and do not cover: see
`treadle.reward`. Models run after all functions have returned, so a trajectory that functions cannot score costs no
model anything. What has scope group comes last, once all samples of a task have the score of everything else.
Functions that run what a model wrote, `code_tests` above all, compute next to nothing here: they start boxes, wait for
them and compare text. So these gradings overlap, at most `reward.max_gradings` at once, first come, first served, and
share the boxes that were started ahead. Each step in a box has a deadline of its own; `reward.timeout_s` is for
functions that run in workers. After `close` no grading runs and no box of one is left.
Invariant: a Score is what functions and models returned; anything that kept one from returning is a RewardFailure,
never a number.
"""

import asyncio
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from treadle.aio import in_own_task
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.cores import num_cores
from treadle.errors import ConfigError, Mistake, MisuseError
from treadle.reward.arguments import (
    CollectArguments,
    collect_arguments,
    collect_group_arguments,
    is_filled,
    read_columns,
)
from treadle.reward.builtin import BUILTINS
from treadle.reward.context import NO_CONTEXT, RewardContext
from treadle.reward.function import RewardFunction, load_function
from treadle.reward.rate_limit import RateLimit
from treadle.reward.result import (
    Fault,
    RewardResult,
    ScoreFailure,
    as_worker_results,
    blame_function,
    check_count,
    combine,
    extend,
    name_function,
    read_session,
)
from treadle.reward.reward_models import RewardModels, prepare_models
from treadle.reward.sandbox.process import locate
from treadle.reward.sandbox.protocol import FunctionNeeds, copy
from treadle.reward.unsafe_calls import fenced_by_default
from treadle.reward.worker_pool import RewardWorkerPool
from treadle.sandbox.confine import hide_where_needed
from treadle.sandbox.pool import close_boxes
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import check_provider
from treadle.terminal import warn
from treadle.types import Score, Task, Trajectory


class Gradings:
    """The gradings of one scorer. Built by `create`."""

    def __init__(self, reward: RewardConfig) -> None:
        self._places = asyncio.Semaphore(reward.max_gradings or num_cores())
        self._box = BoxSettings.of(reward.sandbox)
        self._running: set[asyncio.Task[RewardResult]] = set()
        self._closed = False

    @classmethod
    async def create(cls, reward: RewardConfig) -> "Gradings":
        """ConfigError where a function needs boxes that cannot be had here."""
        if reward.uses_sandbox():
            await asyncio.to_thread(check_provider, "reward.sandbox", reward.sandbox)
        return cls(reward)

    async def run(self, function: RewardFunction, values: Mapping[str, Any]) -> RewardResult:
        """What the function says. A cancelled caller ends its grading."""
        task = asyncio.ensure_future(self._grade(function, values))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise ScoreFailure(Fault.CLOSED, "was ended: the scorer is closed", function.name) from None
            raise

    async def _grade(self, function: RewardFunction, values: Mapping[str, Any]) -> RewardResult:
        async with self._places:
            result = function(values)
            return as_worker_results(function.read(await result if inspect.isawaitable(result) else result))

    async def close(self) -> None:
        """End what runs, and the boxes that wait."""
        self._closed = True
        ended = list(self._running)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        await close_boxes(self._box)


class Scorer:
    """The functions and models of one `reward` section, ready to score. Built by `create`, on the loop that uses it."""

    def __init__(
        self,
        reward: RewardConfig,
        inline: Mapping[str, RewardFunction],
        pools: tuple[RewardWorkerPool, ...],
        rate: RateLimit,
        gradings: Gradings,
        models: RewardModels | None = None,
    ) -> None:
        self._reward, self._inline, self._pools, self._rate, self._models = reward, inline, pools, rate, models
        self._gradings = gradings
        here = {name: FunctionNeeds(item.needs, item.required) for name, item in inline.items()}
        self.needs = here | {name: needs for pool in pools for name, needs in pool.needs.items()}
        """What each function takes of a task, its row and its trajectories."""
        self._weights = reward.weights() | reward.session_weights()
        self._of_samples = tuple(name for name, item in reward.functions.items() if item.effective_scope() == "sample")
        self._of_groups = tuple(name for name in reward.functions if name not in self._of_samples)
        self.runs_programs = any(item.boxed for item in inline.values())
        """Whether a function runs answers as programs."""
        self.scores_groups = reward.scores_groups()
        """Whether a sample has its whole score from `score_group` alone."""
        self._closed = False

    @classmethod
    async def create(cls, reward: RewardConfig, context: RewardContext = NO_CONTEXT) -> "Scorer":
        """A started scorer. ConfigError with every mistake, or RunError where workers or models cannot start.

        `context`: what judges use of a rollout.
        """
        apart = tuple(name for name in reward.functions if _needs_worker(reward, name))
        rate = RateLimit(reward.rate_limit_per_s, shared_by=_limited(reward))
        mistakes: list[Mistake] = []
        inline = _load_inline(reward, [name for name in reward.functions if name not in apart], mistakes)
        gradings = await Gradings.create(reward)
        prepared = await prepare_models(reward, context)
        mistakes += prepared.mistakes
        pools: tuple[RewardWorkerPool, ...] = ()
        try:
            pools = await _start_pools(reward, apart, rate, mistakes, context.hidden)
            if mistakes:
                raise ConfigError(mistakes)
            models = await RewardModels.start(reward, prepared, rate, context) if prepared.any else None
        except BaseException:
            await asyncio.shield(prepared.close())
            await asyncio.shield(_close_pools(pools))
            raise
        return cls(reward, inline, pools, rate, gradings, models)

    async def score(self, task: Task, trajectory: Trajectory) -> Score | None:
        """The score of a finished trajectory; None where nothing is configured to give one, and its session gave none.

        What has scope group is not part of it yet. Raises RewardFailure where a score cannot be had, whose text begins
        with why.
        """
        self._refuse_closed()
        self._require_columns(self._of_samples, task)
        answers = await self._run_functions(
            self._of_samples, partial(collect_arguments, task=task, trajectory=trajectory)
        )
        scores = {name: score for name, answer in answers.items() for score in check_count(answer, 1)}
        if self._models is not None:
            scores |= await self._models.score(task, trajectory)
        scores |= read_session(trajectory, always=self._reward.declared_parts())
        if not scores:
            return None
        ordered = {name: scores[name] for name in self._weights if name in scores}
        return combine(ordered, self._weights, self._reward.bounds, whole=not self.scores_groups)

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Score]:
        """The whole score of each sample of a task. The `reward` of each trajectory is what `score` gave it.

        Raises RewardFailure where what has scope group fails, for all of them.
        """
        self._refuse_closed()
        self._require_columns(self._of_groups, task)
        subject = partial(collect_group_arguments, task=task, trajectories=trajectories)
        answers = await self._run_functions(self._of_groups, subject, count=len(trajectories))
        columns: dict[str, tuple[Score, ...]] = {}
        for name, answer in answers.items():
            with name_function(name):
                columns[name] = check_count(answer, len(trajectories))
        if self._models is not None:
            columns |= await self._models.score_group(task, trajectories)
        return [
            extend(item.reward, {name: column[at] for name, column in columns.items()}, self._weights, bounds)
            for bounds in [self._reward.bounds]
            for at, item in enumerate(trajectories)
        ]

    def _refuse_closed(self) -> None:
        if self._closed:
            raise MisuseError("this scorer is closed; build another with Scorer.create")

    def _require_columns(self, names: Sequence[str], task: Task) -> None:
        """A failure of the first function that takes a column which the row does not have."""
        for name, needs in self.needs.items():
            missing = [item for item in needs.required if name in names and not is_filled(item, task)]
            if missing:
                columns = ", ".join(read_columns(task)) or "none"
                problem = f"takes {missing[0]!r}, and the row has no such column; its columns: {columns}"
                raise ScoreFailure(Fault.NO_COLUMN, problem, name)

    async def _run_functions(
        self, names: Sequence[str], collect: CollectArguments, count: int | None = None
    ) -> dict[str, RewardResult]:
        """Result of each function, for a sample or for a group of `count`.

        One that is past its deadline for good has `reward.on_timeout`, if that is set. The others are run
        again then, without it: a worker that is late is killed with all it had to do.
        """
        attempt, late = 0, dict[str, RewardResult]()
        while True:
            try:
                return late | await self._attempt([name for name in names if name not in late], collect)
            except ScoreFailure as failure:
                if attempt < self._reward.retries and failure.may_pass:
                    attempt += 1
                elif failure.past_deadline and self._reward.on_timeout is not None and failure.function not in late:
                    given = Score(self._reward.on_timeout, extra={"timed_out": True})
                    late[failure.function] = given if count is None else (given,) * count
                else:
                    raise

    async def _attempt(self, names: Sequence[str], collect: CollectArguments) -> dict[str, RewardResult]:
        answers: dict[str, RewardResult] = {}
        if names and not self._pools:
            await self._rate.turn()
        for name, function in self._inline.items():
            if name in names:
                answers[name] = await self._run_inline(function, collect)
        turn = True
        for pool in self._pools:
            if chosen := tuple(name for name in pool.names if name in names):
                answers |= await pool.run(chosen, collect, turn=turn)
                turn = False
        return answers

    async def _run_inline(self, function: RewardFunction, collect: CollectArguments) -> RewardResult:
        """Run in this process: a built-in on the records themselves, a user's function on a copy of them."""
        with blame_function(function.name):
            values = collect(function.needs)
            if function.pure:
                return function.read(function(values))
            if function.boxed:
                return await self._gradings.run(function, values)
            return await in_own_task(self._call(function, copy(values)))

    async def _call(self, function: RewardFunction, values: Mapping[str, Any]) -> RewardResult:
        """Call a user's function; async ones within `reward.timeout_s`. Runs in a task of its own."""
        result = function(values)
        if inspect.isawaitable(result):
            try:
                async with asyncio.timeout(self._reward.timeout_s) as deadline:
                    result = await result
            except TimeoutError as error:
                if deadline.expired():
                    problem = f"ran past reward.timeout_s={self._reward.timeout_s:g}"
                    raise ScoreFailure(Fault.TIMEOUT, problem, past_deadline=True) from error
                raise
        return as_worker_results(function.read(result))

    async def close(self) -> None:
        """End workers and models. Scores that run fail; later ones are a MisuseError. Closing twice is fine."""
        self._closed = True
        try:
            if self._models is not None:
                await asyncio.shield(self._models.close())
        finally:
            await asyncio.shield(_close_pools(self._pools))
            await asyncio.shield(self._gradings.close())

    async def __aenter__(self) -> "Scorer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _limited(reward: RewardConfig) -> tuple[str, ...]:
    """What a rate limit protects: the endpoints that are asked, or else the functions that are called."""
    judges = [judge.engine.openai.base_url for judge in reward.judges.values() if judge.engine.name == "openai"]
    servers = [model.endpoint.base_url for model in reward.classifiers.values() if model.placement == "endpoint"]
    endpoints = {url for url in (*judges, *servers) if url}
    return tuple(sorted(endpoints or {function.path for function in reward.functions.values()}))


def _needs_worker(reward: RewardConfig, name: str) -> bool:
    builtin = BUILTINS.get(reward.functions[name].path)
    elsewhere = builtin is None or _is_sandboxed(reward, reward.functions[name])
    return reward.num_workers > 0 and elsewhere


def _is_sandboxed(reward: RewardConfig, function: RewardFunctionConfig) -> bool:
    builtin = BUILTINS.get(function.path)
    if builtin is not None and (builtin.boxed or builtin.evaluates_text):
        return not builtin.boxed
    return bool(function.sandbox) or fenced_by_default(reward, function) is not None


def refuse_unfenced(reward: RewardConfig, missing: Iterable[str]) -> Iterator[Mistake]:
    """Functions whose key asks for a sandbox, on a machine that lacks one of the two fences that all others rely on."""
    lacking = [item for item in missing if item.startswith(("no seccomp", "no Landlock"))]
    for name, function in reward.functions.items() if lacking else ():
        if function.sandbox:
            problem = f"is true, and cannot be had here: {'; '.join(lacking)}"
            fix = "run it on Linux 5.13 or later, or set it to null, which fences as far as this machine can"
            yield locate(reward, name, Mistake("sandbox", problem, True, fix=fix, missing="sandbox"))


async def _start_pools(
    reward: RewardConfig, names: tuple[str, ...], rate: RateLimit, mistakes: list[Mistake], hidden: tuple[str, ...]
) -> tuple[RewardWorkerPool, ...]:
    """Workers for plain functions, and others for sandboxed ones; what is wrong with them is added to `mistakes`."""
    pools: list[RewardWorkerPool] = []
    try:
        for sandbox in (False, True):
            chosen = tuple(name for name in names if _is_sandboxed(reward, reward.functions[name]) is sandbox)
            try:
                if chosen:
                    pools.append(await RewardWorkerPool.create(reward, chosen, rate, sandbox, hidden))
            except ConfigError as error:
                mistakes += error.mistakes
    except BaseException:
        await asyncio.shield(_close_pools(pools))
        raise
    missing = dict.fromkeys(item for pool in pools for item in pool.missing)
    mistakes += refuse_unfenced(reward, missing)
    for item in missing:
        warn(f"reward sandbox: {item}")
    if hide_where_needed(missing):
        warn("reward sandbox: so this process is hidden from others of its user: no core dump, no profiler")
    return tuple(pools)


async def _close_pools(pools: Sequence[RewardWorkerPool]) -> None:
    """Close all of them, also where one fails."""
    found = await asyncio.gather(*(pool.close() for pool in pools), return_exceptions=True)
    for error in found:
        if error is not None:
            raise error


def _load_inline(reward: RewardConfig, names: list[str], mistakes: list[Mistake]) -> dict[str, RewardFunction]:
    """The functions that run here; what is wrong with the others is added to `mistakes`."""
    loaded: dict[str, RewardFunction] = {}
    for name in names:
        function = reward.functions[name]
        if _is_sandboxed(reward, function):
            problem = f"{function.path!r} evaluates model text and runs only in a worker process"
            mistakes.append(locate(reward, name, Mistake("path", problem, fix="set reward.num_workers to 1 or more")))
            continue
        try:
            box = BoxSettings.of(reward.sandbox)
            loaded[name] = load_function(name, function.path, function.kwargs, function.effective_scope(), box)
        except ConfigError as error:
            mistakes += (locate(reward, name, mistake) for mistake in error.mistakes)
    return loaded
