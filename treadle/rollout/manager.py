"""Agent loop manager: the public interface of a rollout.

Runs on an event loop of its own, in a thread of its own, from `create` to `close`. Every public call has an awaitable
and a blocking form, distinguished by name alone. A manager that exists is started.

    async with await AgentLoopManager.create(rollout=cfg.rollout, model=cfg.model, reward=cfg.reward) as manager:
        batch = await manager.generate_sequences(tasks)
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Container, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from treadle.aio import BoundedBuffer, describe_error
from treadle.config import ModelConfig, RewardConfig, RolloutConfig
from treadle.config.rollout import OnWeightUpdate
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.errors import MisuseError
from treadle.loop_thread import LoopThread
from treadle.rollout.completion_log import NOTHING_RECOVERED, RecoveredTask
from treadle.rollout.dispatch import FindUnscored, no_trajectory
from treadle.rollout.protocol import Dropped
from treadle.rollout.service import RolloutKind, RolloutParts, RolloutService
from treadle.types import Batch, Completion, Group, Task, Trajectory

log = logging.getLogger(__name__)

STREAM_BUFFER = 256
"""Trajectories a stream holds for a slow reader before sessions wait for it."""

FROM_CONFIG = RolloutParts()
"""Everything as the config says."""


class AgentLoopManager:
    """Public interface of a rollout, built by `create` or `create_blocking`."""

    def __init__(self, rollout: RolloutConfig, thread: LoopThread, service: RolloutService) -> None:
        self._rollout = rollout
        self._thread = thread
        self._service = service
        self._dispatcher = service.dispatcher
        self._unawaited: dict[int, str] = {}
        """Calls not yet awaited or iterated, by number."""
        self._calls = 0
        self._closed = False

    @classmethod
    async def create(
        cls,
        *,
        rollout: RolloutConfig,
        model: ModelConfig,
        reward: RewardConfig | None = None,
        parts: RolloutParts = FROM_CONFIG,
    ) -> Self:
        """A started manager, or an error. `parts` replace or add to what the config would build."""
        thread = LoopThread("treadle-rollout")
        try:
            service = await thread.run(RolloutService.start(rollout, model, reward, parts))
        except BaseException:
            thread.stop(rollout.limits.close_timeout_s)
            raise
        return cls(rollout, thread, service)

    @classmethod
    def create_blocking(
        cls,
        *,
        rollout: RolloutConfig,
        model: ModelConfig,
        reward: RewardConfig | None = None,
        parts: RolloutParts = FROM_CONFIG,
    ) -> Self:
        """As `create`, for code that does not await; correct inside a running loop too."""
        thread = LoopThread("treadle-rollout")
        try:
            service = thread.run_blocking(RolloutService.start(rollout, model, reward, parts), "create")
        except BaseException:
            thread.stop(rollout.limits.close_timeout_s)
            raise
        return cls(rollout, thread, service)

    def generate_sequences(
        self, tasks: Sequence[Task], *, kind: RolloutKind = RolloutKind.TRAINING, seed: int | None = None
    ) -> Coroutine[Any, Any, Batch]:
        """Sample every task; await it. `kind` says for what, `seed` replaces `rollout.seed`.

        A call that is never awaited does nothing; closing the manager then raises, so that it cannot pass unnoticed.
        """
        return self._generate(self._expect("generate_sequences"), tasks, kind, seed)

    async def _generate(self, call: int, tasks: Sequence[Task], kind: RolloutKind, seed: int | None) -> Batch:
        self._unawaited.pop(call, None)
        return await self._thread.run(self._service.generate(tasks, kind, seed))

    def generate_sequences_blocking(
        self, tasks: Sequence[Task], *, kind: RolloutKind = RolloutKind.TRAINING, seed: int | None = None
    ) -> Batch:
        """Sample every task and wait for it in this thread."""
        return self._thread.run_blocking(self._service.generate(tasks, kind, seed), "generate_sequences")

    def stream(
        self,
        tasks: Sequence[Task],
        *,
        kind: RolloutKind = RolloutKind.TRAINING,
        done: Container[tuple[str, int]] = (),
        unscored: FindUnscored = no_trajectory,
    ) -> AsyncIterator[Trajectory | Dropped]:
        """Trajectories as each one ends. `done` names samples, by uid and number, that are not drawn again; those that
        `unscored` finds are scored as they are.

        A stream that is not iterated does nothing; closing the manager then raises.
        """
        return self._stream(self._expect("stream"), tasks, kind, done, unscored)

    async def _stream(
        self,
        call: int,
        tasks: Sequence[Task],
        kind: RolloutKind,
        done: Container[tuple[str, int]],
        unscored: FindUnscored,
    ) -> AsyncIterator[Trajectory | Dropped]:
        self._unawaited.pop(call, None)
        buffer = BoundedBuffer[Trajectory | Dropped](STREAM_BUFFER)
        work = self._thread.submit(self._service.stream(tasks, kind, done, buffer, unscored))
        try:
            while ready := await self._thread.run(buffer.take()):
                for trajectory in ready:
                    yield trajectory
            await asyncio.wrap_future(work)
        finally:
            work.cancel()

    def stream_blocking(
        self,
        tasks: Sequence[Task],
        *,
        kind: RolloutKind = RolloutKind.TRAINING,
        done: Container[tuple[str, int]] = (),
        unscored: FindUnscored = no_trajectory,
    ) -> Iterator[Trajectory | Dropped]:
        """As `stream`, for code that does not await."""
        return self._stream_blocking(self._expect("stream_blocking"), tasks, kind, done, unscored)

    def _stream_blocking(
        self,
        call: int,
        tasks: Sequence[Task],
        kind: RolloutKind,
        done: Container[tuple[str, int]],
        unscored: FindUnscored,
    ) -> Iterator[Trajectory | Dropped]:
        self._unawaited.pop(call, None)
        buffer = BoundedBuffer[Trajectory | Dropped](STREAM_BUFFER)
        work = self._thread.submit(self._service.stream(tasks, kind, done, buffer, unscored))
        try:
            while ready := self._thread.run_blocking(buffer.take(), "stream"):
                yield from ready
            work.result()
        finally:
            work.cancel()

    def _expect(self, name: str) -> int:
        """Register a call that does nothing until it is awaited or iterated."""
        self._calls += 1
        self._unawaited[self._calls] = name
        return self._calls

    @property
    def name(self) -> str:
        return "rollout"

    async def generate_group(
        self, task: Task, *, kind: RolloutKind = RolloutKind.TRAINING, past: RecoveredTask = NOTHING_RECOVERED
    ) -> Group | Dropped:
        """Sample one task; `past` is what an earlier run recorded of it. `watch` must run meanwhile."""
        return await self._thread.run(self._dispatcher.group(task, self._service.request(kind), past))

    async def watch(self) -> None:
        """Report stalls and a journal that cannot be written, until cancelled; for callers of `generate_group`."""
        await self._thread.run(self._service.watch())

    async def keep(self) -> None:
        """Have what open sessions generated so far recorded, so that it survives; they go on after that."""
        await self._thread.run(self._service.keep())

    async def sleep(self) -> None:
        """Have the engines give their devices' memory back until the next weights. Nothing may be under way."""
        await self._thread.run(self._service.sleep())

    async def probe(self, num_tokens: int) -> tuple[tuple[int, ...], dict[str, Completion]]:
        """An arbitrary prompt of so many ids and each replica's answer of as many, of no session and in no record."""
        return await self._thread.run(self._service.probe(num_tokens))

    async def update_weights(self, update: WeightUpdate, *, running: OnWeightUpdate = "continue") -> ConfirmedWeights:
        """Hand new weights to every engine; the checksum they confirmed. `running`: what becomes of open sessions."""
        return await self._thread.run(self._service.update_weights(update, running))

    async def close(self) -> None:
        """End running sessions, release every part, stop the thread. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            try:
                await self._thread.run(self._service.close())
            finally:
                await asyncio.to_thread(self._thread.stop, self._rollout.limits.close_timeout_s)
        self._refuse_unawaited()

    def close_blocking(self) -> None:
        """As `close`, for code that does not await."""
        if not self._closed:
            self._closed = True
            try:
                self._thread.run_blocking(self._service.close(), "close")
            finally:
                self._thread.stop(self._rollout.limits.close_timeout_s)
        self._refuse_unawaited()

    def _refuse_unawaited(self) -> None:
        names, self._unawaited = Counter(self._unawaited.values()), {}
        for name, count in names.items():
            times = "once" if count == 1 else f"{count} times"
            if name == "generate_sequences":
                raise MisuseError(
                    f"generate_sequences was called {times} without await, and generated nothing: "
                    "await it, or call generate_sequences_blocking"
                )
            loop = "async for" if name == "stream" else "for"
            raise MisuseError(
                f"{name} was called {times} and never iterated, and generated nothing: "
                f"write `{loop} trajectory in manager.{name}(tasks)`"
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return await self.close()
        self._unawaited.clear()  # the error that is on its way matters more
        try:
            await self.close()
        except Exception as late:  # noqa: BLE001 - as above
            log.warning("the rollout did not close in order: %s", describe_error(late))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return self.close_blocking()
        self._unawaited.clear()
        try:
            self.close_blocking()
        except Exception as late:  # noqa: BLE001 - the error that is on its way matters more
            log.warning("the rollout did not close in order: %s", describe_error(late))
