"""Scripted engine: the one fake model, whose answers come from a script, with delays and faults drawn by seed.

Owns the timing of an engine with no model in it: tokens appear one by one in the loop's time, can be aborted in the
middle, and carry logprobs and versions. Refuses to know threads and the wall clock, so it runs in virtual time.
Invariant: answer, logprobs and delay depend on (seed, uid, sample, row, attempt, position) and never on what else is in
flight.

A request that goes on exactly where an aborted one stopped gets the rest of that answer, so an interrupted answer ends
as it would have without the interruption, as long as it stays on its replica.
"""

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Self

from treadle.config.plugin import load_object
from treadle.config.rollout import ScriptedConfig
from treadle.engine.in_flight import PauseGate
from treadle.engine.protocol import ConfirmedWeights, Decode, Encode, WeightUpdate
from treadle.engine.requests import StopStringFinder, trim_at_stop
from treadle.engine.rng import bits_at, stream_of, unit_at
from treadle.errors import ConfigError, EngineFailure, Mistake, RequestRefused
from treadle.types import Completion, Request, StopReason

Script = Callable[[Request, random.Random], str | tuple[int, ...]]
"""Writes the answer to a request, as text or as ids. Called in the loop: it must be quick and must not keep `rng`."""

Checksum = Callable[[Mapping[str, Any]], str]

_PERIOD = 4096
_LOGPROBS = tuple(math.log1p(-0.9 * unit_at(0, at)) for at in range(_PERIOD)) * 2
"""Logprobs of a stream are a slice of this: much cheaper than to draw each one."""

_MAX_REMEMBERED = 65_536
"""Aborted answers and failed requests that are remembered; the oldest are forgotten first."""


_Place = tuple[str, int, int]
"""Session, row and position."""


class _Fate(Enum):
    ANSWER = "answer"
    FAIL = "fail"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What will be said, before the token limit; `text` where the script gave it."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(slots=True, eq=False)
class _TimedAnswer:
    """An answer on its way out: `tokens` of them, evenly over `latency_s`."""

    session: str
    tokens: int
    started: float
    latency_s: float
    ended: asyncio.Future[int]
    updates: list[tuple[int, int]]
    """How many tokens were out when which version left."""

    def sampled(self, now: float) -> int:
        if not self.latency_s:
            return 0  # it hangs
        return min(self.tokens, int(self.tokens * (now - self.started) / self.latency_s + 1e-9))

    def end(self, tokens: int) -> None:
        if not self.ended.done():
            self.ended.set_result(tokens)


class ScriptedEngine:
    """An engine whose answers, delays and faults are written down. See `create`."""

    def __init__(
        self,
        scripted: ScriptedConfig,
        script: Script,
        *,
        name: str,
        encode: Encode,
        decode: Decode | None,
        seed: int,
        version: int,
        checksum: Checksum | None,
    ) -> None:
        self.name = name
        self.version = version
        self._scripted = scripted
        self._script = script
        self._encode = lru_cache(1024)(lambda text: tuple(encode(text)))
        self._decode = decode
        self._seed = seed
        self._checksum = checksum
        self._instant = not (scripted.latency_s or scripted.failure_rate or scripted.hang_rate)
        self._rng = random.Random(0)
        self._gate = PauseGate()
        self._running: dict[_TimedAnswer, None] = {}
        self._rests: OrderedDict[_Place, tuple[int, _Answer]] = OrderedDict()
        self._faults: OrderedDict[_Place, int] = OrderedDict()

    @classmethod
    def create(
        cls,
        scripted: ScriptedConfig,
        *,
        name: str,
        encode: Encode,
        decode: Decode | None = None,
        seed: int = 0,
        version: int = 0,
        script: Script | None = None,
        checksum: Checksum | None = None,
    ) -> Self:
        """Build the engine. `script` replaces the one that `scripted` names; without either, the prompt is echoed.

        `decode` gives text to answers written as ids or cut short; without it their text is empty. `checksum` computes
        what `update_weights` confirms; without it the sender's own is confirmed. Replicas of one model share a seed.
        """
        if scripted.failure_rate + scripted.hang_rate > 1:
            problem = f"failure_rate {scripted.failure_rate} and hang_rate {scripted.hang_rate} add up to more than 1"
            raise ConfigError([Mistake("rollout.scripted", problem, fix="lower one of them")])
        script = script or (_load(scripted.script) if scripted.script else echo)
        return cls(
            scripted, script, name=name, encode=encode, decode=decode, seed=seed, version=version, checksum=checksum
        )

    async def generate(self, request: Request) -> Completion:
        if self._gate.shut and not await self._gate.admit(request.session):
            return Completion((), (), (), StopReason.ABORT, replica=self.name)
        stream = stream_of(request, self._seed)
        answer = self._write(request, stream)
        tokens = min(len(answer.ids), request.sampling.max_tokens)
        if self._instant:
            return self._complete(request, stream, answer, tokens, (self.version,) * tokens)
        return await self._perform(request, stream, answer, tokens)

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
        """There are no weights: the version moves on, and the checksum is confirmed."""
        now = asyncio.get_running_loop().time()
        for performance in self._running:
            performance.updates.append((performance.sampled(now), self.version))
        self.version = update.version
        return ConfirmedWeights(self._checksum(update.tensors) if self._checksum else update.checksum)

    async def close(self) -> None:
        self._gate.close(f"engine {self.name} is closed")
        self._interrupt()

    def _write(self, request: Request, stream: int) -> _Answer:
        if self._rests:
            spoken, rest = self._rests.pop((request.session, request.row, request.position), (0, None))
            if rest is not None and spoken == hash(request.ids):
                return rest
        self._rng.seed(bits_at(stream, request.position))
        written = self._script(request, self._rng)
        text = written if isinstance(written, str) else None
        whole = self._encode(written) if isinstance(written, str) else tuple(written)
        ids = _end(whole, request.sampling.stop_token_ids)
        if request.sampling.stop:
            ids = self._stop_at_string(request, ids)
        return _Answer(ids, text if len(ids) >= len(whole) and not request.sampling.stop else None)

    def _stop_at_string(self, request: Request, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The answer up to the token that completes a stop string; all of it where there is none."""
        if self._decode is None:
            raise RequestRefused(
                f"{self.name}: session {request.session}: stop strings need an engine with a tokenizer"
            )
        begun = request.ids[len(request.ids) - request.num_begun :]
        return ids[: StopStringFinder(request.sampling.stop, self._decode, begun).feed(ids)]

    async def _perform(self, request: Request, stream: int, answer: _Answer, tokens: int) -> Completion:
        """Let the tokens come out in time; an abort keeps those that are out."""
        loop = asyncio.get_running_loop()
        fate, latency_s = self._draw(request), self._latency(stream, request.position)
        if latency_s == 0 and fate is not _Fate.HANG:
            self._fail_if(fate, request)
            return self._complete(request, stream, answer, tokens, (self.version,) * tokens)
        hangs = fate is _Fate.HANG
        performance = _TimedAnswer(
            request.session, tokens, loop.time(), 0.0 if hangs else latency_s, loop.create_future(), []
        )
        self._running[performance] = None
        timer = None if hangs else loop.call_later(latency_s, performance.end, -1)
        try:
            kept = await performance.ended
        finally:
            del self._running[performance]
            if timer is not None:
                timer.cancel()
        if kept < 0:
            self._fail_if(fate, request)
            kept = tokens
        return self._complete(request, stream, answer, kept, self._versions(performance, kept))

    def _complete(
        self, request: Request, stream: int, answer: _Answer, kept: int, versions: tuple[int, ...]
    ) -> Completion:
        ids, text, stop = answer.ids, answer.text, StopReason.STOP
        if kept < len(ids):
            stop = StopReason.LENGTH if kept == request.sampling.max_tokens else StopReason.ABORT
            if stop is StopReason.ABORT:
                self._remember(request, answer, kept)
            ids, text = ids[:kept], None
        if text is None:
            text = trim_at_stop(self._text(ids, request.sampling.stop_token_ids), request.sampling.stop)
        start = (stream + request.position) % _PERIOD
        if kept <= _PERIOD:
            logprobs = _LOGPROBS[start : start + kept]
        else:
            logprobs = tuple(_LOGPROBS[(start + at) % _PERIOD] for at in range(kept))
        return Completion(ids, logprobs, versions, stop, text, self.name)

    def _text(self, ids: tuple[int, ...], stops: tuple[int, ...]) -> str:
        if self._decode is None:
            return ""
        return self._decode(ids[:-1] if ids and ids[-1] in stops else ids)

    def _interrupt(self, session: str | None = None) -> None:
        now = asyncio.get_running_loop().time()
        for performance in self._running:
            if session is None or performance.session == session:
                performance.end(performance.sampled(now))

    def _versions(self, performance: _TimedAnswer, kept: int) -> tuple[int, ...]:
        versions: tuple[int, ...] = ()
        for until, version in performance.updates:
            versions += (version,) * (until - len(versions))
        return versions[:kept] + (self.version,) * (kept - len(versions))

    def _latency(self, stream: int, position: int) -> float:
        """A long tail with the mean and the bound of the config: the mean of u^(tail - 1) is 1 / tail."""
        tail = self._scripted.latency_tail
        return self._scripted.latency_s * tail * math.pow(1 - unit_at(stream, position), tail - 1)

    def _draw(self, request: Request) -> _Fate:
        """Another replica, or the same one the next time, draws again: else no retry could help."""
        if not (self._scripted.failure_rate or self._scripted.hang_rate):
            return _Fate.ANSWER
        key = (request.session, request.row, request.position)
        tries = self._faults.pop(key, 0)
        luck = unit_at(stream_of(request, self._seed, self.name, tries), request.position)
        if luck >= self._scripted.failure_rate + self._scripted.hang_rate:
            return _Fate.ANSWER
        self._faults[key] = tries + 1
        _forget_oldest(self._faults)
        return _Fate.FAIL if luck < self._scripted.failure_rate else _Fate.HANG

    def _fail_if(self, fate: _Fate, request: Request) -> None:
        if fate is _Fate.FAIL:
            where = f"session {request.session}, position {request.position}"
            raise EngineFailure(f"{self.name}: {where}: drawn to fail (failure_rate {self._scripted.failure_rate})")

    def _remember(self, request: Request, answer: _Answer, kept: int) -> None:
        spoken = hash(request.ids + answer.ids[:kept])
        self._rests[request.session, request.row, request.position + kept] = (spoken, _Answer(answer.ids[kept:]))
        _forget_oldest(self._rests)


def _forget_oldest(memory: OrderedDict[_Place, Any]) -> None:
    if len(memory) > _MAX_REMEMBERED:
        memory.popitem(last=False)


def _end(ids: tuple[int, ...], stops: tuple[int, ...]) -> tuple[int, ...]:
    """The ids up to the first stop token, which is added where it is missing."""
    if not stops:
        return ids
    first = min((ids.index(stop) for stop in stops if stop in ids), default=None)
    return (*ids, stops[0]) if first is None else ids[: first + 1]


def echo(request: Request, rng: random.Random) -> str | tuple[int, ...]:
    """Say what the user said last; without a conversation, the prompt's ids."""
    for message in reversed(request.messages):
        if message["role"] == "user":
            return str(message["content"])
    return request.ids


def _load(path: str) -> Script:
    script = load_object(path, "rollout.scripted.script")
    if not callable(script):
        raise ConfigError([Mistake("rollout.scripted.script", f"{path!r} is not a function", path)])
    return script  # type: ignore[no-any-return]
