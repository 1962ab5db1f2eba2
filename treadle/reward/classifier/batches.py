"""Texts that arrive one by one, computed many at a time, in a thread of their own.

Owns the hand-over between an event loop and the thread. The thread takes what has come while it computed, oldest first,
as many tokens as a batch may have; it waits when there is nothing. Nobody waits for a batch to fill.
Bounded by its callers: whoever asks has a place (`max_concurrency`) and a deadline.
Invariant: every text is answered once, with a number or a failure, also when the thread dies.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.errors import DeadlineError
from treadle.reward.failure import Fault, ScoreFailure, describe

Ids = tuple[int, ...]

CLOSE_TIMEOUT_S = 30.0
"""How long a batch that computes may take to end when its classifier closes."""


class Backend(Protocol):
    """What computes. Loaded, used and closed in the thread; `interrupt` comes from outside it."""

    def load(self) -> None: ...

    def score(self, texts: Sequence[Ids]) -> list[float]: ...

    def interrupt(self) -> None:
        """End what computes, if that is possible."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Item:
    ids: Ids
    answer: "asyncio.Future[float]"


class Batches:
    """One backend and the texts on their way to it. All methods are for the event loop that made it."""

    def __init__(self, name: str, backend: Backend, max_tokens: int) -> None:
        self._name, self._backend, self._max_tokens = name, backend, max_tokens
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._waiting: list[_Item] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    async def start(self, timeout_s: float) -> None:
        """Start the thread and load the backend in it; raise what went wrong in there, or that it takes too long."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=self._name, daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                await ready
        except TimeoutError as error:
            raise DeadlineError(f"{self._name} was not loaded within launch_timeout_s={timeout_s:g}") from error

    async def score(self, ids: Ids) -> float:
        """The score of one text. Cancelling leaves the others of its batch alone."""
        item = _Item(ids, self._loop.create_future())
        with self._wake:
            if self._closing:
                raise ScoreFailure(Fault.CLOSED, "is closed")
            self._waiting.append(item)
            self._wake.notify()
        return await item.answer

    async def close(self) -> None:
        """End the thread and wait for it. Texts that wait fail as closed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._backend.interrupt()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise DeadlineError(f"{self._name} still computes {CLOSE_TIMEOUT_S:g} s after it was closed")

    def _run(self, ready: "asyncio.Future[None]") -> None:
        try:
            self._backend.load()
        except BaseException as error:  # noqa: BLE001 - it is raised where `start` waits
            self._backend.close()
            self._tell(_fail, ready, error)
            return
        self._tell(_settle, ready, None)
        try:
            while batch := self._take():
                self._tell(_answer, batch, self._compute(batch))
        finally:
            self._backend.close()
            with self._wake:
                self._closing = True
                left, self._waiting = self._waiting, []
            self._tell(_answer, left, ScoreFailure(Fault.CLOSED, "was closed"))

    def _take(self) -> list[_Item]:
        """The next batch; empty when it is time to end."""
        with self._wake:
            while not self._closing:
                self._waiting = [item for item in self._waiting if not item.answer.done()]
                if self._waiting:
                    batch, room = [self._waiting.pop(0)], self._max_tokens
                    room -= len(batch[0].ids)
                    while self._waiting and len(self._waiting[0].ids) <= room:
                        batch.append(self._waiting.pop(0))
                        room -= len(batch[-1].ids)
                    return batch
                self._wake.wait()
        return []

    def _compute(self, batch: Sequence[_Item]) -> "list[float] | ScoreFailure":
        try:
            return self._backend.score([item.ids for item in batch])
        except ScoreFailure as failure:
            return ScoreFailure(Fault.CLOSED, "was closed") if self._closing else failure
        except Exception as error:  # noqa: BLE001 - it is raised where `score` waits
            return ScoreFailure(Fault.EXCEPTION, f"raised {describe(error)}")

    def _tell(self, act: Callable[..., None], *arguments: Any) -> None:
        """Hand something back to the loop, which may be gone when the process ends in disorder."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act, *arguments)


def _answer(batch: Sequence[_Item], answers: "list[float] | ScoreFailure") -> None:
    for at, item in enumerate(batch):
        if isinstance(answers, ScoreFailure):
            _fail(item.answer, answers)
        else:
            _settle(item.answer, answers[at])


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
