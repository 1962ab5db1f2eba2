"""Judge parser: a function of the user's that reads a judge's answers, in workers of its own.

A reward function in all but its name: it takes `text`, the answer, beside what those take, and runs under the same
limits, in `reward.num_workers` processes; fenced off where it would evaluate text, as the answer is a model's. With
`num_workers: 0` it runs in this process, in a task of its own.
Invariant: what it does to its task, its process or the interpreter is a failure of that score. Its deadline is the
judge's, and with workers `reward.timeout_s` too.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from treadle.aio import in_own_task
from treadle.config.reward import JudgeConfig, RewardConfig
from treadle.errors import ConfigError, Mistake
from treadle.reward.arguments import ALL_COLUMNS, CollectArguments, collect_arguments, collect_group_arguments
from treadle.reward.function import RewardFunction, load_function
from treadle.reward.rate_limit import RateLimit
from treadle.reward.result import RewardResult, ScoreFailure, as_worker_results, blame_function, check_count
from treadle.reward.sandbox.protocol import copy
from treadle.reward.unsafe_calls import fenced_by_default
from treadle.reward.worker_pool import RewardWorkerPool
from treadle.types import Score, Task, Trajectory


class JudgeParser:
    """The parser of one judge, loaded where it runs. Built by `create`."""

    def __init__(self, name: str, scope: str, runs: RewardWorkerPool | RewardFunction) -> None:
        self._name, self._scope, self._runs = name, scope, runs

    @classmethod
    async def create(
        cls, name: str, judge: JudgeConfig, reward: RewardConfig, hidden: tuple[str, ...] = ()
    ) -> "JudgeParser | None":
        """None where the judge has no parser; a ConfigError of `parser` where it cannot be used."""
        function = judge.parser_function()
        if function is None:
            return None
        alone = RewardConfig(**{**reward.values(), "functions": {name: function}, "judges": {}, "classifiers": {}})
        try:
            runs: RewardWorkerPool | RewardFunction
            if reward.num_workers == 0:
                runs = load_function(name, function.path, function.kwargs, judge.scope)
            else:
                fenced = fenced_by_default(alone, function) is not None
                runs = await RewardWorkerPool.create(alone, (name,), RateLimit(None), fenced, hidden)
            parser = cls(name, judge.scope, runs)
            if not {"text", ALL_COLUMNS} & set(parser.needs):
                await parser.close()
                raise ConfigError([Mistake("path", "takes no `text`, the answer that it is to read")])
        except ConfigError as error:
            mistakes = [Mistake("parser", item.problem, function.path, fix=item.fix) for item in error.mistakes]
            raise ConfigError(mistakes) from error
        return parser

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of what it takes."""
        return self._runs.needs[self._name].filled if isinstance(self._runs, RewardWorkerPool) else self._runs.needs

    async def read(self, text: str, task: Task, about: tuple[Trajectory, ...]) -> tuple[Score, ...]:
        """The score of each trajectory; a ScoreFailure of kind NO_RESULT where it found none."""

        def collect(names: Iterable[str]) -> dict[str, Any]:
            is_group = self._scope == "group"
            found = (
                collect_group_arguments(names, task, about) if is_group else collect_arguments(names, task, about[0])
            )
            if ALL_COLUMNS in found:
                found[ALL_COLUMNS] = {**found[ALL_COLUMNS], "text": text}
            return {**found, "text": text}

        try:
            return check_count(await self._run(collect), len(about))
        except ScoreFailure as failure:
            problem = f"has a parser that {failure.problem}"
            raise ScoreFailure(
                failure.fault, problem, past_deadline=failure.past_deadline, computed=failure.computed
            ) from failure.__cause__

    async def _run(self, collect: CollectArguments) -> RewardResult:
        if isinstance(self._runs, RewardWorkerPool):
            return (await self._runs.run((self._name,), collect, turn=False))[self._name]
        with blame_function(self._name):
            return await in_own_task(_call(self._runs, copy(collect(self._runs.needs))))

    async def close(self) -> None:
        """End the workers."""
        if isinstance(self._runs, RewardWorkerPool):
            await self._runs.close()


async def _call(function: RewardFunction, values: Mapping[str, Any]) -> RewardResult:
    result = function(values)
    if inspect.isawaitable(result):
        result = await result
    return as_worker_results(function.read(result))
