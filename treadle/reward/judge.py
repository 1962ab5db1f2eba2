"""Judge: a generative reward model (LLM as a judge): questions to an engine, answers read as scores, votes counted.

Owns what is asked for one score, how often, what counts as a score in an answer (the match of a regular expression, or
what a function of the user's finds), and the start and end of a judge's own replicas, behind a router of their own.
With `engine: {name: policy}` it starts nothing, and does not close the policy's engine. An answer that holds no score
is a failure, never a number.
Waits: a score waits for a place (`max_concurrency`, first come, first served); from then on `timeout_s` runs, over all
its votes. Each question waits for its turn under the rate limit, then for the engine.
Invariant: every vote was read from a whole answer; one that was cut, or unreadable after all retries, is a failure of
the score. The last match decides, since judges reason first, and about n samples the last n matches, in the order of
the samples; an answer is read in bounded time. A mistake found while an engine starts is reported under the judge's
own keys.
"""

import asyncio
import inspect
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from statistics import fmean
from typing import Any

from treadle.aio import first_error, run_concurrently
from treadle.config.reward import JudgeConfig, RewardConfig
from treadle.config.rollout import FailureConfig
from treadle.data.renderer import Renderer
from treadle.engine.protocol import TokenGenerator
from treadle.engine.router import Router
from treadle.errors import ConfigError, EngineFailure, Mistake, PromptFailure, RunError
from treadle.model.tokenizer import load_tokenizer
from treadle.reward.arguments import collect_arguments, collect_group_arguments
from treadle.reward.context import RewardContext
from treadle.reward.function import RewardFunction, load_function
from treadle.reward.prompt import RewardPrompt, SpecialTokenEscaper, to_messages
from treadle.reward.rate_limit import RateLimit
from treadle.reward.result import (
    UNBOUNDED,
    Fault,
    ScoreFailure,
    as_worker_result,
    as_worker_results,
    blame_function,
    check_count,
    read_number,
)
from treadle.reward.sandbox.protocol import copy
from treadle.types import Message, Request, SamplingParams, Score, StopReason, Task, Trajectory

_PLACES = {"model.": "", "rollout.limits.": "engine.", "rollout.": "engine."}
"""Prefixes of keys in sections that engines know, and of a judge's own keys; the first that matches counts."""


@dataclass(frozen=True, slots=True)
class JudgeEngine:
    """An engine, and the renderer that turns messages into its ids. `router` is the judge's own, if it has one."""

    engine: TokenGenerator
    renderer: Renderer
    router: Router | None = None

    async def close(self) -> None:
        """End the replicas that are the judge's own."""
        if self.router is not None:
            await self.router.close()


@dataclass(frozen=True, slots=True)
class JudgeEncoding:
    """Encoding of a judge's questions: the renderer, and the escaper of special tokens."""

    renderer: Renderer
    guard: SpecialTokenEscaper


async def prepare_judge_encoding(judge: JudgeConfig, context: RewardContext) -> JudgeEncoding:
    """The renderer of the judge's model, or the policy's where it has none of its own."""
    own = judge.path is not None
    model = judge.model() if own else context.model
    if own and model is not None:
        with _judge_keys():
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            return JudgeEncoding(
                await asyncio.to_thread(Renderer.create, model, tokenizer), SpecialTokenEscaper.of(tokenizer)
            )
    if context.renderer is None or model is None:
        fix = "give path, or build the scorer with RewardContext(model=…, renderer=…)"
        raise ConfigError([Mistake("path", "is needed: no rollout lends its tokenizer", fix=fix)])
    known = judge.engine.name == "policy"
    guard = (
        SpecialTokenEscaper.of(await asyncio.to_thread(load_tokenizer, model)) if known else SpecialTokenEscaper.usual()
    )
    return JudgeEncoding(context.renderer, guard)


async def start_judge_engine(
    name: str, judge: JudgeConfig, reward: RewardConfig, encoding: JudgeEncoding, context: RewardContext
) -> JudgeEngine:
    """The engine of a judge, started; a ConfigError or RunError within the launch deadline."""
    engine = judge.engine
    if engine.name == "policy":
        if context.policy is None:
            fix = "give the judge an engine of its own, or build the scorer with RewardContext(policy=…)"
            raise ConfigError([Mistake("engine.name", "policy, but no rollout lends its engine", "policy", fix=fix)])
        return JudgeEngine(context.policy, encoding.renderer)
    if context.start_engines is None:
        fix = "build the scorer with RewardContext(start_engines=treadle.rollout.engines.start_engines)"
        raise ConfigError([Mistake("engine.name", "nothing here starts engines", engine.name, fix=fix)])
    rollout = judge.rollout(FailureConfig(request_retries=reward.retries))
    model = judge.model() if judge.path is not None else context.model
    assert model is not None, "the encoding was prepared with it"
    api_key = context.api_keys.get(engine.openai.api_key_env)
    gpus = context.gpus.get(name)
    with _judge_keys():
        try:
            replicas = await context.start_engines(rollout, model, encoding.renderer, api_key, gpus)
        except (EngineFailure, RunError) as failure:
            raise RunError(f"the engine of reward.judges.{name} did not start: {failure}") from failure
    router = Router(
        replicas.engines,
        limits=rollout.limits,
        failures=rollout.failures,
        rng=random.Random(judge.seed),
        name=f"router of judge {name}",
    )
    if replicas.supervisor is not None:
        replicas.supervisor.connect(router)
    return JudgeEngine(router, encoding.renderer, router)


@contextmanager
def _judge_keys() -> Iterator[None]:
    """Report mistakes in keys of `model` and `rollout` under the judge's own keys."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_move(mistake) for mistake in error.mistakes]) from error


def _move(mistake: Mistake) -> Mistake:
    old = next((place for place in _PLACES if mistake.key.startswith(place)), "")
    key = _PLACES.get(old, "") + mistake.key.removeprefix(old)
    return replace(mistake, key=key, origin=None)


regex = import_module("regex")
"""Unlike the standard library's module, this one has a timeout."""

TIMEOUT_S = 0.1
SHOWN = 200
"""Characters of an answer that a failure quotes, from its end."""


class ScoreExtractor:
    """Score extractor: reads the answers of one judge. Built by `create`."""

    def __init__(self, judge: JudgeConfig, pattern: Any, parser: RewardFunction | None) -> None:
        self._judge, self._pattern, self._parser = judge, pattern, parser
        self._words: Mapping[str, float] = {word.casefold(): score for word, score in judge.words.items()}

    @classmethod
    def create(cls, judge: JudgeConfig) -> "ScoreExtractor":
        """A ConfigError of `pattern` or `parser` where answers cannot be read with them."""
        try:
            pattern = regex.compile(judge.pattern)
        except regex.error as error:
            raise ConfigError([Mistake("pattern", f"{judge.pattern!r}: {error}", judge.pattern)]) from error
        return cls(judge, pattern, None if judge.parser is None else _load_parser(judge.parser, judge.scope))

    async def read(self, text: str, task: Task, about: tuple[Trajectory, ...]) -> tuple[Score, ...]:
        """The score of each trajectory in an answer, or a ScoreFailure that quotes the answer's end."""
        if self._parser is None:
            scores = tuple(map(Score, self._search(text, len(about))))
        else:
            scores = await self._ask(self._parser, text, task, about)
        low, high = self._judge.bounds or UNBOUNDED
        for score in scores:
            if not low <= score.value <= high:
                raise unreadable(f"says {score.value:g}, outside bounds {low:g} to {high:g}", text)
        return scores

    def _search(self, text: str, count: int) -> list[float]:
        """The last `count` scores."""
        found = deque[Any](maxlen=count)
        try:
            for match in self._pattern.finditer(text, timeout=TIMEOUT_S, concurrent=False):
                found.append(match)
        except TimeoutError as error:
            problem = f"has a pattern that is not done with an answer after {TIMEOUT_S:g} s"
            raise ScoreFailure(Fault.TIMEOUT, problem) from error
        if not found:
            raise unreadable("has no match for its pattern", text)
        if len(found) < count:
            raise unreadable(f"has {len(found)} matches for its pattern and is about {count} samples", text)
        group: str | int = "score" if "score" in self._pattern.groupindex else min(1, self._pattern.groups)
        return [self._to_number(match[group] or "", text) for match in found]

    def _to_number(self, word: str, text: str) -> float:
        if self._words:
            score = self._words.get(word.strip().casefold())
            if score is None:
                raise unreadable(f"says {word!r:.80}, which is none of its words", text)
            return score
        try:
            return read_number(float(word))
        except ValueError as error:
            raise unreadable(f"says {word!r:.80}, which is no number", text) from error

    async def _ask(
        self, parser: RewardFunction, text: str, task: Task, about: tuple[Trajectory, ...]
    ) -> tuple[Score, ...]:
        grouped = parser.scope == "group"
        with blame_function(parser.name):
            values = (
                collect_group_arguments(parser.needs, task, about)
                if grouped
                else collect_arguments(parser.needs, task, about[0])
            )
            result = replace(parser, kwargs={"text": text})(copy(values))
            if inspect.isawaitable(result):
                result = await result
            if result is None:
                raise unreadable("has a parser that found no score", text)
            return check_count(as_worker_results(parser.read(result)), len(about))


def unreadable(problem: str, text: str) -> ScoreFailure:
    """An answer without a score. `problem` completes the sentence "its answer …"."""
    return ScoreFailure(Fault.UNREADABLE, f"{problem}; its answer ends: {text[-SHOWN:]!r}")


def _load_parser(path: str, scope: str) -> RewardFunction:
    """A parser takes `text`, and any of the names that reward functions take."""
    try:
        return load_function(path, path, {"text": ""}, scope)
    except ConfigError as error:
        mistakes = (Mistake("parser", mistake.problem, path, fix=mistake.fix) for mistake in error.mistakes)
        raise ConfigError(mistakes) from error


KEPT = 4000
"""Characters of an answer that a score keeps, from its end."""


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """A question about one trajectory, or about all samples of a task."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    messages: tuple[Message, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JudgeVote:
    """One answer, read: a score for each trajectory it is about."""

    scores: tuple[Score, ...]
    text: str


class Judge:
    """A judge, built from prompt, extractor and engine."""

    def __init__(
        self,
        name: str,
        judge: JudgeConfig,
        prompt: RewardPrompt,
        extractor: ScoreExtractor,
        judge_engine: JudgeEngine,
        rate: RateLimit,
    ) -> None:
        self._name, self._judge = name, judge
        self._prompt, self._extractor, self._judge_engine, self._rate = prompt, extractor, judge_engine, rate
        self._places = asyncio.Semaphore(judge.max_concurrency)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """The judge's score, with its answers in `extra`. Raises ScoreFailure."""
        (score,) = await self.score_group(task, [trajectory])
        return score

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> tuple[Score, ...]:
        """The judge's score of each; several where its scope is group."""
        judge = self._judge
        async with self._places:
            question = self._pose(task, tuple(trajectories))
            try:
                async with asyncio.timeout(judge.timeout_s) as deadline:
                    with first_error():
                        votes = await run_concurrently([self._vote(question, number) for number in range(judge.n)])
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                problem = f"gave no score within reward.judges.{self._name}.timeout_s={judge.timeout_s:g}"
                raise ScoreFailure(Fault.TIMEOUT, problem) from error
            finally:
                self._forget(question)
        answers = tuple(vote.text[-KEPT:] for vote in votes)
        return tuple(
            _count_votes([vote.scores[at] for vote in votes], answers, judge) for at in range(len(trajectories))
        )

    async def close(self) -> None:
        await self._judge_engine.close()

    def _pose(self, task: Task, about: tuple[Trajectory, ...]) -> JudgeQuestion:
        judge, engine, prompt = self._judge, self._judge.engine, self._prompt
        text = prompt.render_group(task, about) if judge.scope == "group" else prompt.render(task, about[0])
        messages = to_messages(text, judge.system)
        if engine.name == "openai":
            return JudgeQuestion(task, about, messages, ())
        try:
            ids = self._judge_engine.renderer.prompt(messages)
        except PromptFailure as failure:
            raise ScoreFailure(Fault.PROMPT, f"has a question that cannot be rendered: {failure}") from failure
        room = engine.max_model_len - judge.response_length
        if engine.name != "policy" and len(ids) > room:
            problem = f"has a question of {len(ids)} tokens; engine.max_model_len and response_length leave {room}"
            raise ScoreFailure(Fault.PROMPT, problem)
        return JudgeQuestion(task, about, messages, ids)

    async def _vote(self, question: JudgeQuestion, number: int) -> JudgeVote:
        """One vote: answers drawn until one can be read, each with noise of its own."""
        judge = self._judge
        for attempt in range(judge.retries + 1):
            await self._rate.turn()
            try:
                text = await self._answer(question, number + judge.n * attempt)
                return JudgeVote(await self._extractor.read(text, question.task, question.trajectories), text)
            except ScoreFailure as failure:
                if failure.fault is not Fault.UNREADABLE or attempt == judge.retries:
                    raise
        raise AssertionError("every attempt returns or raises")

    async def _answer(self, question: JudgeQuestion, draw: int) -> str:
        """The text of one whole answer."""
        judge, answer_ids = self._judge, tuple[int, ...]()
        stops = self._judge_engine.renderer.stop_token_ids
        sampling = SamplingParams(judge.response_length, judge.temperature, judge.top_p, -1, stops, judge.seed)
        request = Request(self._session(question), draw, question.ids, sampling, 0, question.messages)
        while True:
            try:
                completion = await self._judge_engine.engine.generate(request)
            except EngineFailure as failure:
                raise ScoreFailure(Fault.ENGINE, f"has an engine that did not answer: {failure}") from failure
            answer_ids += completion.ids
            text = completion.text if judge.engine.name == "openai" else self._judge_engine.renderer.decode(answer_ids)
            room = judge.response_length - len(answer_ids)
            if completion.stop is StopReason.STOP:
                return text
            if completion.stop is StopReason.LENGTH or room < 1:
                raise unreadable(f"was cut at response_length={judge.response_length}", text)
            # Interrupted, as new weights do to the policy's engine: it continues after the tokens so far.
            await asyncio.sleep(0)  # an engine that interrupts without waiting must not keep the deadline from firing
            request = replace(
                request,
                ids=(*question.ids, *answer_ids),
                sampling=replace(sampling, max_tokens=room),
                position=len(answer_ids),
            )

    def _session(self, question: JudgeQuestion) -> str:
        """Session name of this judgement at engines; no session of the policy has it."""
        about = "group" if self._judge.scope == "group" else question.trajectories[0].sample
        return f"judge {self._name}: {question.task.uid}/{about}"

    def _forget(self, question: JudgeQuestion) -> None:
        if self._judge_engine.router is not None:
            for draw in range(self._judge.n * (self._judge.retries + 1)):
                self._judge_engine.router.forget(f"{self._session(question)}/{draw}")


def _count_votes(votes: Sequence[Score], answers: tuple[str, ...], judge: JudgeConfig) -> Score:
    """Score of the votes. Among scores that equally many gave, a majority is their mean."""
    first, values = votes[0], [score.value for score in votes]
    if len(votes) == 1:
        return as_worker_result(Score(first.value, first.parts, {**first.extra, "answers": answers}))
    counts = Counter(values)
    chosen = values if judge.vote == "mean" else [value for value in counts if counts[value] == max(counts.values())]
    return as_worker_result(Score(fmean(chosen), extra={"votes": values, "answers": answers}))
