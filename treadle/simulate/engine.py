"""Simulated engine: takes the time a real one would, and samples nothing.

Owns the performance model of a replica. With n sequences running, each gets a token every 1/s + (n-1)/S seconds, where
s is the speed of a sequence alone and S what all of them together approach: a fixed cost per step, and one for each
sequence in it. No more than `max_num_seqs` run; the rest wait in order. Prefill takes the replica's time from all
sequences. New weights take time to arrive; for a part of it, maybe none, the replica goes on. It keeps its prefix cache
until they are there.

Ids count tokens instead of being them: a request's one id is the length of its context, and a completion has one id for
each policy version that sampled a part of it, namely how many tokens that was.
Invariant: at any moment a replica does one thing (decode, prefill, take weights or nothing), and `ReplicaWork` adds up
to the time that has passed.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from treadle.config import RolloutConfig
from treadle.engine.in_flight import PauseGate
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.simulate.assumptions import Assumptions
from treadle.types import Completion, Request, StopReason

_DONE = 1e-6
"""Tokens that rounding may leave of an answer."""


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """How fast one replica is, in tokens per second."""

    sequence: float
    together: float
    prefill: float
    max_num_seqs: int
    prefix_caching: bool

    def token_s(self, running: int) -> float:
        """Seconds between two tokens of a sequence when this many run."""
        return 1 / self.sequence + (running - 1) / self.together

    @property
    def full(self) -> float:
        """Tokens per second with as many sequences as may run."""
        return self.max_num_seqs / self.token_s(self.max_num_seqs)


def replica_speed(assumptions: Assumptions, rollout: RolloutConfig) -> ReplicaSpeed:
    """The speed of one replica, on as many GPUs as it has."""
    gpus = rollout.tensor_model_parallel_size
    return ReplicaSpeed(
        sequence=assumptions.sequence_tokens_per_s,
        together=assumptions.engine_tokens_per_s * gpus,
        prefill=assumptions.prefill_tokens_per_s * gpus,
        max_num_seqs=rollout.max_num_seqs,
        prefix_caching=rollout.enable_prefix_caching,
    )


@dataclass(slots=True)
class ReplicaWork:
    """Where a replica's time went, in seconds, and what came of it."""

    decoding: float = 0.0
    prefilling: float = 0.0
    updating: float = 0.0
    idle: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: "ReplicaWork") -> "ReplicaWork":
        return ReplicaWork(
            self.decoding + other.decoding,
            self.prefilling + other.prefilling,
            self.updating + other.updating,
            self.idle + other.idle,
            self.tokens + other.tokens,
        )

    def __sub__(self, other: "ReplicaWork") -> "ReplicaWork":
        minus = ReplicaWork(-other.decoding, -other.prefilling, -other.updating, -other.idle, -other.tokens)
        return self + minus

    @property
    def seconds(self) -> float:
        return self.decoding + self.prefilling + self.updating + self.idle


@dataclass(slots=True, eq=False)
class _RunningSequence:
    """A request at a replica. `began` is the replica's token count when it started to run."""

    request: Request
    tokens: int
    ended: asyncio.Future[int]
    began: float = -1.0

    def end(self, tokens: int) -> None:
        if not self.ended.done():
            self.ended.set_result(tokens)


class TimedEngine:
    """Simulated engine (see the module). Made on the event loop it runs on, virtual or not."""

    def __init__(self, name: str, speed: ReplicaSpeed, push_s: float, overlap: float = 0.0) -> None:
        """New weights take `push_s` to arrive; for the fraction `overlap` of it, the first, it goes on sampling."""
        self.name = name
        self.version = 0
        self._speed = speed
        self._overlap_s, self._stop_s = push_s * overlap, push_s * (1 - overlap)
        self._gate = PauseGate()
        self._running: list[tuple[float, int, _RunningSequence]] = []
        """A heap, by the token count at which each ends."""
        self._waiting: deque[_RunningSequence] = deque()
        self._num_running = 0
        """Sequences of the heap that are not cancelled."""
        self._number = 0
        self._count = 0.0
        """Tokens that a sequence would have which ran since the start."""
        self._unread_s = 0.0
        self._at = asyncio.get_running_loop().time()
        self._updating = False
        self._timer: asyncio.TimerHandle | None = None
        self._updates: tuple[list[float], list[int]] = ([], [])
        """The token counts at which weights changed, and the version that left each time."""
        self._known: dict[str, int] = {}
        """Prefix cache: tokens of each session's context that need no prefill."""
        self._work = ReplicaWork()

    async def generate(self, request: Request) -> Completion:
        if self._gate.shut and not await self._gate.admit(request.session):
            return Completion((), (), (), StopReason.ABORT, replica=self.name)
        loop = asyncio.get_running_loop()
        self._pass_time()
        sequence = _RunningSequence(request, request.sampling.max_tokens, loop.create_future())
        if self._num_running < self._speed.max_num_seqs:
            self._begin(sequence)
        else:
            self._waiting.append(sequence)
        self._set_timer(loop)
        try:
            tokens = await sequence.ended
        except asyncio.CancelledError:
            self._give_up(sequence)
            raise
        self._known[request.session] = request.ids[0] + tokens
        return self._complete(sequence, tokens)

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        self._interrupt(session)

    async def pause(self) -> None:
        self._gate.pause()
        self._interrupt()

    async def resume(self) -> None:
        self._gate.resume()

    async def health(self) -> None:
        """It can always serve."""

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        """Take as long as a push does, and decode nothing for a part of it; contexts need a prefill again then."""
        if self._overlap_s:
            await asyncio.sleep(self._overlap_s)
        self._pass_time()
        self._updating = True
        await asyncio.sleep(self._stop_s)
        self._pass_time()
        self._updating = False
        counts, versions = self._updates
        counts.append(self._count)
        versions.append(self.version)
        self.version = update.version
        self._known.clear()
        self._set_timer(asyncio.get_running_loop())
        return ConfirmedWeights(update.checksum, self._stop_s)

    async def close(self) -> None:
        self._gate.close(f"engine {self.name} is closed")
        self._interrupt()

    def work(self) -> ReplicaWork:
        """The work so far."""
        self._pass_time()
        return self._work + ReplicaWork()

    def _begin(self, sequence: _RunningSequence) -> None:
        request, speed = sequence.request, self._speed
        known = self._known.get(request.session, 0) if speed.prefix_caching else 0
        self._unread_s += max(0, request.ids[0] - known) / speed.prefill
        sequence.began = self._count
        self._number += 1
        self._num_running += 1
        heappush(self._running, (self._count + sequence.tokens, self._number, sequence))

    def _pass_time(self) -> None:
        """Account for the time since the last change."""
        now, work = asyncio.get_running_loop().time(), self._work
        passed, self._at = now - self._at, now
        if self._updating:
            work.updating += passed
            return
        reading = min(passed, self._unread_s)
        self._unread_s -= reading
        work.prefilling += reading
        passed -= reading
        if not self._num_running:
            work.idle += passed
            return
        tokens = passed / self._speed.token_s(self._num_running)
        self._count += tokens
        work.decoding += passed
        work.tokens += tokens * self._num_running

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake up when the next sequence ends. A timer that is early is left alone: it sets the next one."""
        while self._running and self._running[0][2].ended.done():
            heappop(self._running)
        if self._updating or not self._running:
            return
        left = max(0.0, self._running[0][0] - self._count)
        due = self._at + self._unread_s + left * self._speed.token_s(self._num_running)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._pass_time()
        while self._running and self._running[0][0] <= self._count + _DONE:
            _, _, sequence = heappop(self._running)
            if not sequence.ended.done():
                self._num_running -= 1
                sequence.end(sequence.tokens)
        self._fill()
        self._set_timer(asyncio.get_running_loop())

    def _fill(self) -> None:
        while self._waiting and self._num_running < self._speed.max_num_seqs:
            sequence = self._waiting.popleft()
            if not sequence.ended.done():
                self._begin(sequence)

    def _give_up(self, sequence: _RunningSequence) -> None:
        """The caller was cancelled: the sequence's future is too, and makes room."""
        self._pass_time()
        if sequence.began >= 0 and sequence.ended.cancelled():
            self._num_running -= 1
        self._fill()
        self._set_timer(asyncio.get_running_loop())

    def _interrupt(self, session: str | None = None) -> None:
        self._pass_time()
        for _, _, sequence in self._running:
            if not sequence.ended.done() and session in (None, sequence.request.session):
                self._num_running -= 1
                sequence.end(min(sequence.tokens, int(self._count - sequence.began + _DONE)))
        for sequence in self._waiting:
            if session in (None, sequence.request.session):
                sequence.end(0)
        self._fill()
        self._set_timer(asyncio.get_running_loop())

    def _complete(self, sequence: _RunningSequence, tokens: int) -> Completion:
        counts, left = self._updates
        first = bisect_right(counts, sequence.began) if sequence.began >= 0 else len(counts)
        parts, versions, before = [], [], 0
        for count, version in zip(counts[first:], left[first:], strict=True):
            sampled = min(tokens, int(count - sequence.began + _DONE))
            if sampled > before:
                parts.append(sampled - before)
                versions.append(version)
                before = sampled
        if tokens > before:
            parts.append(tokens - before)
            versions.append(self.version)
        stop = StopReason.STOP if tokens == sequence.tokens else StopReason.ABORT
        return Completion(tuple(parts), (0.0,) * len(parts), tuple(versions), stop, replica=self.name)
