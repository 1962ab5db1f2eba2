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
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from statistics import fmean
from typing import Any, TypeVar

from treadle.config.reward import JudgeConfig, RewardConfig
from treadle.config.rollout import FailureConfig
from treadle.data.renderer import Renderer
from treadle.engine.router import Router
from treadle.errors import ConfigError, EngineFailure, Mistake, PromptFailure, RunError
from treadle.model.tokenizer import load_tokenizer
from treadle.reward.context import JudgeGenerator, RewardContext
from treadle.reward.function import RewardFunction, gather, gather_group, load_function
from treadle.reward.prompt import RewardPrompt, SpecialTokenEscaper, to_messages
from treadle.reward.rate_limit import RateLimit
from treadle.reward.result import (
    UNBOUNDED,
    Fault,
    ScoreFailure,
    blame_function,
    check_count,
    read_number,
    settle,
    settle_answer,
)
from treadle.reward.sandbox.protocol import copy
from treadle.types import Message, Request, SamplingParams, Score, StopReason, Task, Trajectory

_PLACES = {"model.": "", "rollout.limits.": "engine.", "rollout.": "engine."}
"""Where a judge has the keys of the sections that engines know; the first that fits."""


@dataclass(frozen=True, slots=True)
class JudgeEngine:
    """An engine, and the renderer that turns messages into its ids. `router` is the judge's own, if it has one."""

    engine: JudgeGenerator
    renderer: Renderer
    router: Router | None = None

    async def close(self) -> None:
        """End the replicas that are the judge's own."""
        if self.router is not None:
            await self.router.close()


@dataclass(frozen=True, slots=True)
class JudgeEncoding:
    """How a judge's questions become ids, and what must not be spelled out in them."""

    renderer: Renderer
    guard: SpecialTokenEscaper


async def prepare_judge_encoding(judge: JudgeConfig, surroundings: RewardContext) -> JudgeEncoding:
    """The renderer of the judge's model, or the policy's where it has none of its own."""
    own = judge.path is not None
    model = judge.model() if own else surroundings.model
    if own and model is not None:
        with _judge_keys():
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            return JudgeEncoding(
                await asyncio.to_thread(Renderer.create, model, tokenizer), SpecialTokenEscaper.of(tokenizer)
            )
    if surroundings.renderer is None or model is None:
        fix = "give path, or build the scorer with Surroundings(model=…, renderer=…)"
        raise ConfigError([Mistake("path", "is needed: no rollout lends its tokenizer", fix=fix)])
    known = judge.engine.name == "policy"
    guard = (
        SpecialTokenEscaper.of(await asyncio.to_thread(load_tokenizer, model)) if known else SpecialTokenEscaper.usual()
    )
    return JudgeEncoding(surroundings.renderer, guard)


async def start_judge_engine(
    name: str, judge: JudgeConfig, reward: RewardConfig, speech: JudgeEncoding, surroundings: RewardContext
) -> JudgeEngine:
    """The engine of a judge, started; a ConfigError or RunError within the launch deadline."""
    engine = judge.engine
    if engine.name == "policy":
        if surroundings.policy is None:
            fix = "give the judge an engine of its own, or build the scorer with Surroundings(policy=…)"
            raise ConfigError([Mistake("engine.name", "policy, but no rollout lends its engine", "policy", fix=fix)])
        return JudgeEngine(surroundings.policy, speech.renderer)
    if surroundings.start_engines is None:
        fix = "build the scorer with Surroundings(start_engines=treadle.rollout.engines.start_engines)"
        raise ConfigError([Mistake("engine.name", "nothing here starts engines", engine.name, fix=fix)])
    rollout = judge.rollout(FailureConfig(request_retries=reward.retries))
    model = judge.model() if judge.path is not None else surroundings.model
    assert model is not None, "speech was prepared with it"
    api_key = surroundings.api_keys.get(engine.openai.api_key_env)
    gpus = surroundings.gpus.get(name)
    with _judge_keys():
        try:
            replicas = await surroundings.start_engines(rollout, model, speech.renderer, api_key, gpus)
        except (EngineFailure, RunError) as failure:
            raise RunError(f"the engine of reward.judges.{name} did not start: {failure}") from failure
    router = Router(
        replicas,
        limits=rollout.limits,
        failures=rollout.failures,
        rng=random.Random(judge.seed),
        name=f"router of judge {name}",
    )
    return JudgeEngine(router, speech.renderer, router)


@contextmanager
def _judge_keys() -> Iterator[None]:
    """Engines and tokenizers name keys of `model` and `rollout`; a judge's author knows other names."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_move(mistake) for mistake in error.mistakes]) from error


def _move(mistake: Mistake) -> Mistake:
    old = next((place for place in _PLACES if mistake.key.startswith(place)), "")
    key = _PLACES.get(old, "") + mistake.key.removeprefix(old)
    return replace(mistake, key=key, origin=None)


regex = import_module("regex")
"""Unlike the standard library's module, this one can give up."""

TIMEOUT_S = 0.1
SHOWN = 200
"""Characters of an answer that a failure quotes, from its end."""


class ScoreExtractor:
    """How one judge's answers are read. Built by `create`."""

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
            values = gather_group(parser.needs, task, about) if grouped else gather(parser.needs, task, about[0])
            result = replace(parser, kwargs={"text": text})(copy(values))
            if inspect.isawaitable(result):
                result = await result
            if result is None:
                raise unreadable("has a parser that found no score", text)
            return check_count(settle_answer(parser.read(result)), len(about))


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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """What is asked about one trajectory, or about all samples of a task."""

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
    """Built whole from what `prompt`, `reading` and `voice` prepared."""

    def __init__(
        self,
        name: str,
        judge: JudgeConfig,
        prompt: RewardPrompt,
        reading: ScoreExtractor,
        voice: JudgeEngine,
        rate: RateLimit,
    ) -> None:
        self._name, self._judge = name, judge
        self._prompt, self._reading, self._voice, self._rate = prompt, reading, voice, rate
        self._places = asyncio.Semaphore(judge.max_concurrency)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """The judge's score, with its words in `extra`. Raises ScoreFailure."""
        (score,) = await self.score_group(task, [trajectory])
        return score

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> tuple[Score, ...]:
        """The judge's score of each; several where its scope is group."""
        judge = self._judge
        async with self._places:
            question = self._pose(task, tuple(trajectories))
            try:
                async with asyncio.timeout(judge.timeout_s) as deadline:
                    votes = await _together([self._vote(question, number) for number in range(judge.n)])
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
        await self._voice.close()

    def _pose(self, task: Task, about: tuple[Trajectory, ...]) -> JudgeQuestion:
        judge, engine, prompt = self._judge, self._judge.engine, self._prompt
        text = prompt.render_group(task, about) if judge.scope == "group" else prompt.render(task, about[0])
        messages = to_messages(text, judge.system)
        if engine.name == "openai":
            return JudgeQuestion(task, about, messages, ())
        try:
            ids = self._voice.renderer.prompt(messages)
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
                return JudgeVote(await self._reading.read(text, question.task, question.trajectories), text)
            except ScoreFailure as failure:
                if failure.fault is not Fault.UNREADABLE or attempt == judge.retries:
                    raise
        raise AssertionError("every attempt returns or raises")

    async def _answer(self, question: JudgeQuestion, draw: int) -> str:
        """The text of one whole answer."""
        judge, said = self._judge, tuple[int, ...]()
        stops = self._voice.renderer.stop_token_ids
        sampling = SamplingParams(judge.response_length, judge.temperature, judge.top_p, -1, stops, judge.seed)
        request = Request(self._session(question), draw, question.ids, sampling, 0, question.messages)
        while True:
            try:
                completion = await self._voice.engine.generate(request)
            except EngineFailure as failure:
                raise ScoreFailure(Fault.ENGINE, f"has an engine that did not answer: {failure}") from failure
            said += completion.ids
            text = completion.text if judge.engine.name == "openai" else self._voice.renderer.decode(said)
            room = judge.response_length - len(said)
            if completion.stop is StopReason.STOP:
                return text
            if completion.stop is StopReason.LENGTH or room < 1:
                raise unreadable(f"was cut at response_length={judge.response_length}", text)
            # Interrupted, as new weights do to the policy's engine: it goes on after what it has said.
            await asyncio.sleep(0)  # an engine that interrupts without waiting must not keep the deadline from firing
            request = replace(
                request,
                ids=(*question.ids, *said),
                sampling=replace(sampling, max_tokens=room),
                position=len(said),
            )

    def _session(self, question: JudgeQuestion) -> str:
        """The name under which engines know this judgement; no session of the policy has it."""
        about = "group" if self._judge.scope == "group" else question.trajectories[0].sample
        return f"judge {self._name}: {question.task.uid}/{about}"

    def _forget(self, question: JudgeQuestion) -> None:
        if self._voice.router is not None:
            for draw in range(self._judge.n * (self._judge.retries + 1)):
                self._voice.router.forget(f"{self._session(question)}/{draw}")


def _count_votes(votes: Sequence[Score], answers: tuple[str, ...], judge: JudgeConfig) -> Score:
    """What votes come to. Among scores that equally many gave, a majority is their mean."""
    first, values = votes[0], [score.value for score in votes]
    if len(votes) == 1:
        return settle(Score(first.value, first.parts, {**first.extra, "answers": answers}))
    counts = Counter(values)
    chosen = values if judge.vote == "mean" else [value for value in counts if counts[value] == max(counts.values())]
    return settle(Score(fmean(chosen), extra={"votes": values, "answers": answers}))


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side; the first that fails ends the others, and its error is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(item) for item in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]
