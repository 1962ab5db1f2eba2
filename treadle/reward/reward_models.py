"""Reward models of a section: prepared, started together, asked side by side, closed together.

Owns their attempts and their names. Knows neither torch nor engines: a classifier and a judge are both something that
scores. What can be checked without loading a model is checked first, all of it; parsers are loaded where they run.
Invariant: a failure carries the name of its model; after `close` nothing a model started is left.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from treadle.aio import first_error
from treadle.config.reward import RewardConfig, reward_models_are_whole
from treadle.errors import ConfigError, Mistake
from treadle.reward.classifier.classifier import Classifier, ClassifierInput, start_classifier_head
from treadle.reward.context import RewardContext
from treadle.reward.judge import Judge, JudgeEncoding, ScoreExtractor, prepare_judge_encoding, start_judge_engine
from treadle.reward.judge_parser import JudgeParser
from treadle.reward.prompt import RewardPrompt
from treadle.reward.rate_limit import RateLimit
from treadle.reward.result import ScoreFailure, name_function
from treadle.types import Score, Task, Trajectory

T = TypeVar("T")


class RewardModel(Protocol):
    """Gives a trajectory a score."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PreparedModels:
    """What models need besides their weights, and every mistake found on the way."""

    classifier_inputs: dict[str, ClassifierInput] = field(default_factory=dict)
    judges: dict[str, tuple[RewardPrompt, ScoreExtractor, JudgeEncoding]] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    async def close(self) -> None:
        """End the workers of parsers, where no judge is started with them."""
        async with AsyncExitStack() as closing:
            for _, extractor, _ in self.judges.values():
                closing.push_async_callback(extractor.close)

    @property
    def any(self) -> bool:
        """Whether there is a model at all."""
        return bool(self.classifier_inputs or self.judges)


class RewardModels:
    """Reward models of a section, built by `start`."""

    def __init__(
        self,
        reward: RewardConfig,
        models: Mapping[str, RewardModel],
        of_groups: Mapping[str, Judge],
        started: AsyncExitStack,
    ) -> None:
        self._reward, self._models, self._of_groups, self._started = reward, models, of_groups, started

    @classmethod
    async def start(
        cls, reward: RewardConfig, prepared: PreparedModels, rate: RateLimit, context: RewardContext
    ) -> "RewardModels":
        """Start every model, or none. ConfigError or RunError says which could not."""
        models: dict[str, RewardModel] = {}
        of_groups: dict[str, Judge] = {}
        async with AsyncExitStack() as started:
            started.push_async_callback(prepared.close)
            for name, classifier_input in prepared.classifier_inputs.items():
                classifier = reward.classifiers[name]
                with _locate(reward, f"classifiers.{name}."):
                    head = await start_classifier_head(name, classifier, reward, context)
                models[name] = Classifier(name, classifier, classifier_input, head, rate)
                started.push_async_callback(models[name].close)
            for name, (prompt, extractor, encoding) in prepared.judges.items():
                judge = reward.judges[name]
                with _locate(reward, f"judges.{name}."):
                    judge_engine = await start_judge_engine(name, judge, reward, encoding, context)
                asked = Judge(name, judge, prompt, extractor, judge_engine, rate)
                if judge.scope == "group":
                    of_groups[name] = asked
                else:
                    models[name] = asked
                started.push_async_callback(asked.close)
            return cls(reward, models, of_groups, started.pop_all())

    async def score(self, task: Task, trajectory: Trajectory) -> dict[str, Score]:
        """The score of each model, all at the same time. The first that fails ends the others."""
        return await self._ask({name: partial(model.score, task, trajectory) for name, model in self._models.items()})

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> dict[str, tuple[Score, ...]]:
        """Scores of models that see all samples of a task at once: one for each sample."""
        judges = self._of_groups.items()
        return await self._ask({name: partial(judge.score_group, task, trajectories) for name, judge in judges})

    async def _ask(self, questions: Mapping[str, Callable[[], Coroutine[Any, Any, T]]]) -> dict[str, T]:
        with first_error():
            async with asyncio.TaskGroup() as group:
                asked = {name: group.create_task(self._attempt(name, ask)) for name, ask in questions.items()}
        return {name: answer.result() for name, answer in asked.items()}

    async def close(self) -> None:
        """Close every model, last started first."""
        await self._started.aclose()

    async def _attempt(self, name: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with name_function(name, "model"):
            for attempt in range(self._reward.retries + 1):
                try:
                    return await ask()
                except ScoreFailure as failure:
                    if attempt == self._reward.retries or not failure.may_pass:
                        raise
        raise AssertionError("every attempt returns or raises")


async def prepare_models(reward: RewardConfig, context: RewardContext) -> PreparedModels:
    """Read templates, patterns and tokenizers; loads no weights, and starts nothing but the workers of parsers."""
    prepared = PreparedModels()
    for key, problem, fix in reward_models_are_whole(reward):
        prepared.mistakes.append(_place(reward, "", Mistake(key.removeprefix("reward."), problem, fix=fix)))
    if prepared.mistakes:
        return prepared
    try:
        await _prepare(reward, context, prepared)
    except BaseException:
        await asyncio.shield(prepared.close())
        raise
    return prepared


async def _prepare(reward: RewardConfig, context: RewardContext, prepared: PreparedModels) -> None:
    for name, classifier in reward.classifiers.items():
        with _collect(prepared.mistakes), _locate(reward, f"classifiers.{name}."):
            prepared.classifier_inputs[name] = await ClassifierInput.create(classifier)
    for name, judge in reward.judges.items():
        with _collect(prepared.mistakes), _locate(reward, f"judges.{name}."):
            ScoreExtractor.create(judge)
            encoding = await prepare_judge_encoding(judge, context)
            prompt = RewardPrompt.create(judge.prompt, encoding.guard, judge.scope)
            parser = await JudgeParser.create(name, judge, reward, context.hidden)
            prepared.judges[name] = (prompt, ScoreExtractor.create(judge, parser), encoding)


@contextmanager
def _collect(mistakes: list[Mistake]) -> Iterator[None]:
    """Keep what is wrong here, and go on."""
    try:
        yield
    except ConfigError as error:
        mistakes.extend(error.mistakes)


@contextmanager
def _locate(reward: RewardConfig, place: str) -> Iterator[None]:
    """Mistakes inside have keys relative to `place`; outside they have whole keys and origins."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_place(reward, place, mistake) for mistake in error.mistakes]) from error


def _place(reward: RewardConfig, place: str, mistake: Mistake) -> Mistake:
    key = f"{place}{mistake.key}"
    try:
        origin = reward.origin(key)
    except KeyError:
        origin = None  # an engine's mistake in something that a judge has no key for
    return replace(mistake, key=f"reward.{key}", origin=origin)
