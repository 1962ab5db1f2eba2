"""Reward worker pool: the processes that run reward functions, sandboxed or plain.

Owns a fixed number of places. A score holds one place from start to end, and starts a worker where its place has no
live one. So there is no background task, and nothing waits but the callers.

    caller    waits for a place (first come, first served), then for its turn under the rate limit, then for its score
    place     freed by its caller: score, failure or cancellation

Invariant: at most `num_workers` processes run scores; a failure or cancellation ends only the process that ran it.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from treadle.config.reward import RewardConfig
from treadle.context_vars import capture
from treadle.errors import ConfigError, DeadlineError, RunError
from treadle.process.supervisor import RestartPolicy, Supervisor
from treadle.reward.arguments import CollectArguments
from treadle.reward.rate_limit import RateLimit
from treadle.reward.result import Fault, RewardResult, ScoreFailure, blame_function
from treadle.reward.sandbox.process import END_TIMEOUT_S, WorkerProcess
from treadle.reward.sandbox.protocol import FunctionNeeds, pack

RESTART = RestartPolicy(attempts=1)
"""A start that fails fails its score, which is tried again as scores are (`reward.retries`)."""


class RewardWorkerPool:
    """Workers that have all loaded the same functions, sandboxed or not."""

    def __init__(
        self, reward: RewardConfig, names: tuple[str, ...], rate: RateLimit, sandbox: bool, hidden: tuple[str, ...]
    ) -> None:
        self.names = names
        self.needs: Mapping[str, FunctionNeeds] = {}
        self.missing: tuple[str, ...] = ()
        """Restrictions that the sandbox lacks on this machine, in words."""
        self._reward, self._rate, self._sandbox, self._hidden = reward, rate, sandbox, hidden
        self._places = asyncio.Semaphore(reward.num_workers)
        self._workers: set[WorkerProcess] = set()
        supervisors = (Supervisor(self._start, RESTART) for _ in range(reward.num_workers))
        self._idle: list[Supervisor[WorkerProcess]] = list(supervisors)
        """Of the places that no score holds."""
        self._closed = False

    @classmethod
    async def create(
        cls,
        reward: RewardConfig,
        names: tuple[str, ...],
        rate: RateLimit,
        sandbox: bool = False,
        hidden: tuple[str, ...] = (),
    ) -> "RewardWorkerPool":
        """A pool whose workers are all up; ConfigError or RunError, and no process left, otherwise.

        `hidden`: what code of a model cannot read in them.
        """
        pool = cls(reward, names, rate, sandbox, hidden)
        try:
            starts = (supervisor.current() for supervisor in pool._idle)
            started = await asyncio.gather(*starts, return_exceptions=True)
            for worker in started:
                if isinstance(worker, BaseException):
                    raise worker
                pool.needs, pool.missing = worker.report.needs, worker.report.missing
        except BaseException as error:
            await asyncio.shield(pool.close())
            if isinstance(error, ScoreFailure | OSError):
                raise RunError(
                    f"reward workers (reward.memory_mb={reward.memory_mb}) did not start: {error}"
                ) from error
            raise
        return pool

    async def run(
        self, names: tuple[str, ...], collect: CollectArguments, *, turn: bool = True
    ) -> dict[str, RewardResult]:
        """Result of each of these functions, from one worker. Nothing is packed before there is a place.

        `turn`: it counts for the rate limit. A score that needs two pools counts once.
        """
        async with self._places:
            with self._explain_close():
                supervisor = self._idle.pop()
                try:
                    worker = await self._current(supervisor)
                    if turn:
                        await self._rate.turn()
                    return await worker.ask(self._pack_arguments(collect), names)
                finally:
                    self._idle.append(supervisor)

    def _pack_arguments(self, collect: CollectArguments) -> bytes:
        with blame_function(", ".join(self.names)):
            needed = {name for needs in self.needs.values() for name in needs.filled}
            return pack((collect(sorted(needed)), capture()))

    async def _current(self, supervisor: Supervisor[WorkerProcess]) -> WorkerProcess:
        """A place's worker, started if it has to be: that its functions now cannot be loaded is no mistake of the
        config."""
        try:
            return await supervisor.current()
        except (ConfigError, OSError) as error:
            names = ", ".join(self.names)
            raise ScoreFailure(Fault.CRASH, f"could not be loaded again: {error}", names) from error

    async def _start(self) -> WorkerProcess:
        worker = await WorkerProcess.start(self._reward, self.names, self._sandbox, self._hidden)
        self._workers.add(worker)
        worker.gone.add_done_callback(lambda _: self._workers.discard(worker))
        if self._closed:
            await asyncio.shield(worker.end())
        return worker

    @contextmanager
    def _explain_close(self) -> Iterator[None]:
        """A worker that `close` killed under its score did not crash."""
        closed = ScoreFailure(Fault.CLOSED, "was ended: the scorer is closed", ", ".join(self.names))
        if self._closed:
            raise closed
        try:
            yield
        except ScoreFailure:
            if self._closed:
                raise closed from None
            raise

    async def close(self) -> None:
        """Kill every worker and wait until they are gone. Scores that run fail as closed."""
        self._closed = True
        leaving = {worker.gone: worker for worker in self._workers}
        for worker in leaving.values():
            worker.kill()
        if leaving:
            _, late = await asyncio.wait(leaving, timeout=END_TIMEOUT_S)
            if late:
                raise DeadlineError(f"{len(late)} reward workers were killed but not gone after {END_TIMEOUT_S:g} s")
