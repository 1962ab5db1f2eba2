"""A judge's answer, read as a score: by a regular expression, or by a function of the user's.

Owns what counts as a score. Refuses to guess: an answer that holds none is a failure, never a number.
Invariant: the last match decides, since judges think before they speak, and about n samples the last n matches, in the
order of the samples; an answer is read in bounded time.
"""

import inspect
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from treadle.config.reward import JudgeConfig
from treadle.errors import ConfigError, Mistake
from treadle.reward.argument import gather, gather_group
from treadle.reward.failure import Fault, ScoreFailure, blame_function
from treadle.reward.function import Function, load_function
from treadle.reward.sandbox.protocol import copy
from treadle.reward.verdict import UNBOUNDED, check_count, read_number, settle_answer
from treadle.types import Score, Task, Trajectory

regex = import_module("regex")
"""Unlike the standard library's module, this one can give up."""

TIMEOUT_S = 0.1
SHOWN = 200
"""Characters of an answer that a failure quotes, from its end."""


class Reading:
    """How one judge's answers are read. Built by `create`."""

    def __init__(self, judge: JudgeConfig, pattern: Any, parser: Function | None) -> None:
        self._judge, self._pattern, self._parser = judge, pattern, parser
        self._words: Mapping[str, float] = {word.casefold(): score for word, score in judge.words.items()}

    @classmethod
    def create(cls, judge: JudgeConfig) -> "Reading":
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

    async def _ask(self, parser: Function, text: str, task: Task, about: tuple[Trajectory, ...]) -> tuple[Score, ...]:
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


def _load_parser(path: str, scope: str) -> Function:
    """A parser takes `text`, and any of the names that reward functions take."""
    try:
        return load_function(path, path, {"text": ""}, scope)
    except ConfigError as error:
        mistakes = (Mistake("parser", mistake.problem, path, fix=mistake.fix) for mistake in error.mistakes)
        raise ConfigError(mistakes) from error
