"""Completion log: engine completions of open sessions, kept so that a killed run continues mid-trajectory.

    session ──► CompletionLog ──► router
                      └──► journal

A session calls it as it would call an engine. A completion that an earlier start of the run recorded is returned from
the log, as long as the session sends exactly the same requests; from the first difference on (a tool that answers
otherwise, for instance) requests go to the engines. So agent loops and tools are simply run again, and need no code
for it.

Owns the completions of open sessions until they are written: those that are `interval_s` old while their session is
still open, and all of them on `flush`. Most sessions end sooner and never touch the journal. Waits only for an engine.
Invariant: a completion is returned again only once, to a request with the same ids; memory is bounded by what open
sessions were sent within `interval_s`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

from treadle.engine.protocol import SupportsForget, TokenGenerator
from treadle.errors import Boundary, RunError
from treadle.journal import Journal
from treadle.types import Completion, Outcome, RecordedCompletion, Request, Trajectory

INTERVAL_S = 5.0
"""How much sampling a crash may cost a session, and how long one must live to touch the journal at all."""

_TICKS_PER_INTERVAL = 10
_PARTS_PER_RECORD = 256


@dataclass(frozen=True, slots=True)
class RecoveredTask:
    """What an earlier start of the run left of a task."""

    finished: tuple[Trajectory, ...] = ()
    """At most one for each sample."""
    parts: tuple[RecordedCompletion, ...] = ()
    """Of samples that are not finished."""
    attempt: int = 0
    """The first attempt number that no record has used."""
    redraws: Mapping[int, int] = field(default_factory=dict)
    """By sample: recorded attempts that failed otherwise than by an engine. The next one draws other noise."""


NOTHING_RECOVERED = RecoveredTask()


def needs_new_noise(outcome: Outcome) -> bool:
    """Whether the attempt after this one draws other noise: what an engine loses is drawn again as it was."""
    return not outcome.ok and outcome.boundary is not Boundary.ENGINE


def prompt_digest(ids: tuple[int, ...]) -> int:
    """Digest of a request's ids. Python salts the hashes of text but not those of numbers, so processes agree on it."""
    return hash(ids)


_LoggedCompletion = tuple[int, int, int, Completion, int]
"""The last five fields of a RecordedCompletion, which is made of it if it is ever written."""


@dataclass(slots=True, eq=False)
class _SessionLog:
    """What is known of one open session."""

    uid: str
    sample: int
    asked: Counter[int] = field(default_factory=Counter)
    """Requests so far, by row."""
    recovered: dict[tuple[int, int], RecordedCompletion] = field(default_factory=dict)
    """By row and number; answered ones are taken out."""
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rows that go on from another recorded row: that row, and how much its numbers are ahead of theirs."""
    unwritten: list[_LoggedCompletion] = field(default_factory=list)
    since: float = 0.0
    """When the oldest of those came."""
    is_written: bool = False
    """Whether the journal has parts of it."""
    is_over: bool = False


class CompletionLog:
    """Completions of open sessions, recorded and returned again. One event loop; without a journal it only forwards."""

    def __init__(self, engine: TokenGenerator, journal: Journal | None, *, interval_s: float = INTERVAL_S) -> None:
        self._engine = engine
        self._forgetful = engine if isinstance(engine, SupportsForget) else None
        self._journal = journal
        self._interval_s = interval_s
        self._open: dict[str, _SessionLog] = {}
        self._unwritten: dict[_SessionLog, None] = {}
        """Oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self.num_recovered = 0
        """Tokens that were answered from an earlier start of the run."""

    async def generate(self, request: Request) -> Completion:
        """Answer from what an earlier start recorded, else from the engine."""
        if self._journal is None:
            return await self._engine.generate(request)
        session = request.session
        log = self._open.get(session)
        if log is None:
            log = self._open[session] = _SessionLog(request.uid, request.sample)
        number = log.asked[request.row]
        log.asked[request.row] += 1
        if log.recovered and (known := _match(log, number, request)) is not None:
            self.num_recovered += len(known.ids)
            return known
        completion = await self._engine.generate(request)
        if not log.is_over:
            self._log_completion(log, number, request, completion)
        return completion

    def begin_group(self, uid: str, n: int, parts: Iterable[RecordedCompletion] = ()) -> None:
        """The sessions of a task begin, with these parts: what a group that was cancelled had said is dropped."""
        for sample in range(n):
            self._drop(f"{uid}/{sample}")
        self.recover(parts)

    def recover(self, parts: Iterable[RecordedCompletion]) -> None:
        """Go on from these parts: for sessions that have not begun yet."""
        for part in parts:
            session = f"{part.uid}/{part.sample}"
            log = self._open.get(session)
            if log is None:
                log = self._open[session] = _SessionLog(part.uid, part.sample, is_written=True)
            assert not log.asked, f"session {session} has begun"
            log.recovered[part.row, part.number] = part

    def forget(self, session: str) -> None:
        """A session has ended, or begins anew: it is forgotten here and by its engine.

        Call it after the trajectory was given to the journal, not before.
        """
        if self._forgetful is not None:
            self._forgetful.forget(session)
        self._drop(session)

    def _drop(self, session: str) -> None:
        log = self._open.pop(session, None)
        if log is None:
            return
        log.is_over = True
        self._unwritten.pop(log, None)
        if log.is_written and self._journal is not None:
            self._journal.drop_parts(log.uid, log.sample)

    async def flush(self) -> None:
        """Return once every answer so far is in the journal."""
        if self._journal is not None:
            self._write(list(self._unwritten))
            await self._journal.flush()

    def close(self) -> None:
        """Hand what is left to the journal, which is closed after this. Sessions must have ended, or been cancelled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with suppress(RunError):  # a dead journal has ended the run already
            self._write(list(self._unwritten))

    def _log_completion(self, log: _SessionLog, number: int, request: Request, completion: Completion) -> None:
        if not log.unwritten:
            loop = asyncio.get_running_loop()
            log.since = loop.time()
            self._unwritten[log] = None
            if self._timer is None:
                self._timer = loop.call_later(self._interval_s, self._tick)
        log.unwritten.append((number, len(request.ids), prompt_digest(request.ids), completion, request.row))

    def _tick(self) -> None:
        """Write what is old enough, and come back for the rest; with a full journal, for everything."""
        assert self._journal is not None, "nothing is remembered without a journal"
        loop, pause_s = asyncio.get_running_loop(), self._interval_s / _TICKS_PER_INTERVAL
        old = loop.time() - self._interval_s + 1e-6
        if not self._journal.full:
            try:
                self._write(list(takewhile(lambda log: log.since <= old, self._unwritten)))
            except RunError:
                return  # the journal is dead, and `watch` ends the run
        oldest = next(iter(self._unwritten), None)
        wait_s = 0.0 if oldest is None else max(pause_s, oldest.since - old)
        self._timer = None if oldest is None else loop.call_later(wait_s, self._tick)

    def _write(self, logs: Sequence[_SessionLog]) -> None:
        if self._journal is None or not logs:
            return
        parts = [RecordedCompletion(log.uid, log.sample, *answer) for log in logs for answer in log.unwritten]
        for start in range(0, len(parts), _PARTS_PER_RECORD):
            self._journal.add_parts(parts[start : start + _PARTS_PER_RECORD])
        for log in logs:
            log.unwritten = []
            log.is_written = True
            del self._unwritten[log]


def _match(log: _SessionLog, number: int, request: Request) -> Completion | None:
    """The recovered answer to this request; if it was another request then, nothing that followed in its row counts.

    Requests that run side by side may come in another order than before, and so in other rows: a row goes on from any
    recorded row that asked the same.
    """
    row, ahead = log.moved.get(request.row, (request.row, 0))
    place = (row, number + ahead)
    part = log.recovered.get(place)
    if part is None or not _answers(part, request):
        expected = part is not None
        found = next((where for where, other in log.recovered.items() if _answers(other, request)), None)
        if found is None:
            if expected:
                log.recovered = {key: later for key, later in log.recovered.items() if key[0] != row}
            return None
        log.moved[request.row] = found[0], found[1] - number
        place = found
    return log.recovered.pop(place).completion


def _answers(part: RecordedCompletion, request: Request) -> bool:
    """Whether a recorded answer is one to this very request."""
    fits = len(part.completion.ids) <= request.sampling.max_tokens
    return fits and part.asked == len(request.ids) and part.digest == prompt_digest(request.ids)
