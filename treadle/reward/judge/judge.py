"""A generative reward model at work: questions, answers, votes.

Owns what is asked of an engine for one score, and how often. Refuses to know which engine answers.
Invariant: every vote was read from a whole answer. One that was cut, or that nobody could read after all retries, is a
failure of the score.

Who waits for whom: a score waits for a place (`max_concurrency`, first come, first served); from then on `timeout_s`
runs, over all its votes. Each question waits for its turn under the rate limit, then for the engine.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from treadle.config.reward import JudgeConfig
from treadle.errors import EngineFailure, PromptFailure
from treadle.reward.failure import Fault, ScoreFailure
from treadle.reward.judge.reading import Reading, unreadable
from treadle.reward.judge.voice import Voice
from treadle.reward.prompt import Prompt, to_messages
from treadle.reward.rate import RateLimit
from treadle.reward.verdict import settle
from treadle.types import Message, Request, SamplingParams, Score, StopReason, Task, Trajectory

KEPT = 4000
"""Characters of an answer that a score keeps, from its end."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about one trajectory, or about all samples of a task."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    messages: tuple[Message, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vote:
    """One answer, read: a score for each trajectory it is about."""

    scores: tuple[Score, ...]
    text: str


class Judge:
    """Built whole from what `prompt`, `reading` and `voice` prepared."""

    def __init__(
        self, name: str, judge: JudgeConfig, prompt: Prompt, reading: Reading, voice: Voice, rate: RateLimit
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
        return tuple(_count([vote.scores[at] for vote in votes], answers, judge) for at in range(len(trajectories)))

    async def close(self) -> None:
        await self._voice.close()

    def _pose(self, task: Task, about: tuple[Trajectory, ...]) -> Question:
        judge, engine, prompt = self._judge, self._judge.engine, self._prompt
        text = prompt.render_group(task, about) if judge.scope == "group" else prompt.render(task, about[0])
        messages = to_messages(text, judge.system)
        if engine.name == "openai":
            return Question(task, about, messages, ())
        try:
            ids = self._voice.renderer.prompt(messages)
        except PromptFailure as failure:
            raise ScoreFailure(Fault.PROMPT, f"has a question that cannot be rendered: {failure}") from failure
        room = engine.max_model_len - judge.response_length
        if engine.name != "policy" and len(ids) > room:
            problem = f"has a question of {len(ids)} tokens; engine.max_model_len and response_length leave {room}"
            raise ScoreFailure(Fault.PROMPT, problem)
        return Question(task, about, messages, ids)

    async def _vote(self, question: Question, number: int) -> Vote:
        """One vote: answers drawn until one can be read, each with noise of its own."""
        judge = self._judge
        for attempt in range(judge.retries + 1):
            await self._rate.turn()
            try:
                text = await self._answer(question, number + judge.n * attempt)
                return Vote(await self._reading.read(text, question.task, question.trajectories), text)
            except ScoreFailure as failure:
                if failure.fault is not Fault.UNREADABLE or attempt == judge.retries:
                    raise
        raise AssertionError("every attempt returns or raises")

    async def _answer(self, question: Question, draw: int) -> str:
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

    def _session(self, question: Question) -> str:
        """The name under which engines know this judgement; no session of the policy has it."""
        about = "group" if self._judge.scope == "group" else question.trajectories[0].sample
        return f"judge {self._name}: {question.task.uid}/{about}"

    def _forget(self, question: Question) -> None:
        if self._voice.router is not None:
            for draw in range(self._judge.n * (self._judge.retries + 1)):
                self._voice.router.forget(f"{self._session(question)}/{draw}")


def _count(votes: Sequence[Score], answers: tuple[str, ...], judge: JudgeConfig) -> Score:
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
