"""How many calls lie between a task and the queue of the engine that samples for it, and between a step and its push.

A call is one function of treadle called by another. A coroutine is called where its arguments are given, whichever
task, event loop or thread runs it then: a helper that is handed a coroutine to run is no call on the way, nor is a
comprehension. A request to another process counts once, whatever the RPC is made of. The way begins where the buffer
takes a task from its source, or where a schedule pushes; it ends where the engine has the request, or the weights.
"""

import asyncio
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CoroutineType, FrameType, SimpleNamespace
from typing import Any

import pytest

import treadle
from tests.rollouts import engine as scripted_engine
from tests.rollouts import renderer, rollout, save_model, task
from tests.schedules import Trial
from tests.tiny import tiny
from treadle.config import FailureConfig, FilterGroupsConfig, ModelConfig, RolloutConfig, ScriptedConfig
from treadle.config.rollout import LimitsConfig
from treadle.data.task_feed import TaskFeed
from treadle.data.task_source import TaskSource
from treadle.engine.native.engine import NativeEngine
from treadle.engine.native.engine_thread import EngineThread
from treadle.engine.protocol import ConfirmedWeights, Engine, WeightUpdate
from treadle.engine.remote import EngineServer, RemoteEngine
from treadle.engine.replica_supervisor import ReplicaSupervisor, StartedEngines
from treadle.engine.scripted import ScriptedEngine
from treadle.journal import Journal
from treadle.process.child_handle import ProcessSpec
from treadle.process.rpc import Handler
from treadle.rollout import AgentLoopManager, RolloutParts, worker_process
from treadle.rollout.engines import RolloutBackend
from treadle.rollout.remote_worker import RemoteAgentWorker
from treadle.rollout.worker import AgentLoopWorker
from treadle.rollout.worker_process import UpstreamEngine
from treadle.trainer.buffer import BufferLimits, RolloutBuffer
from treadle.types import Request, SamplingParams

OURS = str(Path(treadle.__file__).parent) + "/"
SYNTAX = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
DEPTH = 100
Place = tuple[str, str]
"""A file and a function in it."""

REQUEST = "a request to another process"
"""Stands for the RPC, in a chain."""
REQUESTS = ("request", "request_job", "request_tokens")
"""Functions of this file that stand for it: to an engine, to an agent worker, from an agent worker."""


@pytest.fixture(autouse=True)
def tracked() -> Iterator[None]:
    """Every coroutine remembers the stack that called it."""
    sys.set_coroutine_origin_tracking_depth(DEPTH)
    yield
    sys.set_coroutine_origin_tracking_depth(0)


def call_chain(first: str) -> list[str]:
    """The calls from `first`, which is not among them, to the caller of this; each as `file:function`."""
    open_: dict[Place, CoroutineType[Any, Any, Any]] = {
        (one.cr_code.co_filename, one.cr_code.co_name): one
        for one in gc.get_objects()
        if type(one) is CoroutineType and one.cr_frame is not None
    }
    found: list[Place] = []
    stack = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in _frames(sys._getframe(1))]
    while stack and not stack[0][0].endswith("asyncio/events.py"):
        place, *stack = stack
        found.append(place)
        if place in open_:  # its caller is what gave it its arguments, not what awaits it
            stack = [(file, function) for file, _, function in open_.pop(place).cr_origin or ()]
    named = [_name(file, function) for file, function in reversed(found)]
    chain = [name for name in named if name]
    return chain[chain.index(first) + 1 :]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name(file: str, function: str) -> str:
    if file == __file__ and function in REQUESTS:
        return REQUEST
    return f"{file.removeprefix(OURS)}:{function}" if file.startswith(OURS) and function not in SYNTAX else ""


class PeerHere:
    """The RPC to an engine of this process: what `treadle.process` does between two."""

    def __init__(self, engine: Engine) -> None:
        self._server = EngineServer(engine)

    async def request(self, call: Any) -> Any:
        return await self._server.handle(call)

    def notify(self, call: Any) -> None: ...


class ProcessHere:
    name, started, over = "scripted-0", 0, False

    def __init__(self, engine: Engine) -> None:
        self.peer = PeerHere(engine)

    async def gone(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def end(self, timeout_s: float | None = None) -> None: ...


class PeersHere:
    """The RPC to an agent worker of this process, and back."""

    def __init__(self, worker: AgentLoopWorker, handle: Handler) -> None:
        self._worker, self._handle = worker, handle

    async def request_job(self, sent: Any) -> Any:
        return await worker_process._run_sent(self._worker, sent)

    async def request_tokens(self, request: Request) -> Any:
        return await self._handle(request)


class LauncherHere:
    """Launches agent workers of this process."""

    async def launch(self, spec: ProcessSpec, handle: Handler, expected: type[Exception]) -> Any:
        setup, upstream = spec.setup, UpstreamEngine()
        worker = await AgentLoopWorker.create(rollout=setup.rollout, model=setup.model, engine=upstream)
        peers = PeersHere(worker, handle)
        upstream.peer = SimpleNamespace(request=peers.request_tokens)  # type: ignore[assignment]
        process = ProcessHere(scripted_engine())
        process.peer = SimpleNamespace(request=peers.request_job)  # type: ignore[assignment]
        return process


async def restarting(engine: Engine) -> Engine:
    """The engine as it is with one_step_off, fully_async and on Ray: in another process, restarted when it dies."""

    async def start() -> RemoteEngine:
        return RemoteEngine(ProcessHere(engine), LimitsConfig(), sends_text=True)  # type: ignore[arg-type]

    return await ReplicaSupervisor(1).add("scripted-0", start)


def calls_to_engine(directory: Path, *, in_process: bool, workers: int = 0) -> list[str]:
    """The calls from the buffer's admission of a task to `Engine.generate`, with a journal, as in training.

    With `workers`, sessions are in agent workers, in processes of their own.
    """
    chains: list[list[str]] = []

    def script(request: Request, rng: object) -> str:
        chains.append(call_chain("trainer/buffer.py:_admit"))
        return "It is 3."

    class Backend(RolloutBackend):
        async def start_engines(self, *sections: Any) -> StartedEngines:
            sys.set_coroutine_origin_tracking_depth(DEPTH)  # in the rollout's thread
            made = scripted_engine(script)
            return StartedEngines([made if in_process else await restarting(made)])

        async def start_workers(self, rollout: RolloutConfig, model: ModelConfig, *parts: Any) -> Sequence[Any]:
            if not workers:
                return await super().start_workers(rollout, model, *parts)
            named = {"rollout": rollout, "model": model, "engine": parts[-1], "launcher": LauncherHere}
            return [await RemoteAgentWorker.create(name=f"agent worker {at}", **named) for at in range(workers)]

    async def main() -> None:
        config, journal = rollout(n=2, num_workers=workers), Journal.open(directory / "run", max_mb=10)
        parts = RolloutParts(Backend(), renderer=renderer(), journal=journal)
        model = save_model(directory / "model")
        async with journal, await AgentLoopManager.create(rollout=config, model=model, parts=parts) as manager:
            buffer = RolloutBuffer(
                manager,
                TaskFeed(TaskSource([task("a")], shuffle=False, seed=0)),
                journal,
                BufferLimits(batch_size=1, max_staleness=0, drop_stale=False, group_timeout_s=20.0),
                filter_groups=FilterGroupsConfig(),
                failures=FailureConfig(),
            )
            async with asyncio.TaskGroup() as work:
                buffer.start(work, 0)
                buffer.allow(1)
                await buffer.take(0)

    asyncio.run(asyncio.wait_for(main(), 60))
    chain = chains[0]
    at = max(index for index, name in enumerate(chain) if name == "engine/scripted.py:generate")
    return chain[: at + 1]


def calls_to_queue(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls from `NativeEngine.generate` to the engine's queue, that one included."""
    chains, post = list[list[str]](), EngineThread.post

    def posted(thread: EngineThread, call: Any) -> None:
        chains.append(call_chain("engine/native/engine.py:generate"))
        post(thread, call)

    async def main() -> None:
        made = await NativeEngine.create(RolloutConfig(prompt_length=20, response_length=30), tiny())
        await made.generate(Request("a", 0, (5, 6, 7), SamplingParams(2)))
        await made.close()

    monkeypatch.setattr(EngineThread, "post", posted)
    asyncio.run(asyncio.wait_for(main(), 60))
    return [*chains[0], "engine/native/engine_thread.py:post"]


def test_a_task_reaches_the_queue_of_an_engine_in_this_process_in_12_calls(tmp_path, monkeypatch):
    chain = calls_to_engine(tmp_path, in_process=True) + calls_to_queue(monkeypatch)
    assert len(chain) <= 12, "\n".join(chain)


def test_a_task_reaches_the_queue_of_an_engine_in_another_process_in_16_calls(tmp_path, monkeypatch):
    """As with fully_async; on Ray the classes are the same."""
    chain = calls_to_engine(tmp_path, in_process=False) + calls_to_queue(monkeypatch)
    assert REQUEST in chain
    assert len(chain) <= 16, "\n".join(chain)


@pytest.mark.parametrize(("in_process", "calls"), [(True, 18), (False, 22)], ids=["this process", "another process"])
def test_with_agent_workers_a_task_reaches_the_queue_of_an_engine_in_so_many_calls(
    tmp_path, monkeypatch, in_process, calls
):
    """The default for loops and tools of the user's own: a session in another process asks back for its tokens."""
    chain = calls_to_engine(tmp_path, in_process=in_process, workers=1) + calls_to_queue(monkeypatch)
    assert chain.count(REQUEST) == (2 if in_process else 3)
    assert len(chain) <= calls, "\n".join(chain)


def test_new_weights_reach_the_engine_in_6_calls(tmp_path):
    """A schedule calls `Trainer.push`; then the weight sync, the rollout and the router, with no tensor on the way."""
    chains: list[list[str]] = []

    class Watched(ScriptedEngine):
        async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
            chains.append(["Trainer.push", *call_chain("trainer/trainer.py:push"), "Engine.update_weights"])
            return await super().update_weights(update)

    class Backend(RolloutBackend):
        async def start_engines(self, *sections: Any) -> StartedEngines:
            sys.set_coroutine_origin_tracking_depth(DEPTH)
            text = renderer()
            return StartedEngines([Watched.create(ScriptedConfig(), name="e", encode=text.encode, decode=text.decode)])

    async def main() -> None:
        model, parts = save_model(tmp_path / "model"), RolloutParts(Backend(), renderer=renderer())
        async with await AgentLoopManager.create(rollout=rollout(n=2), model=model, parts=parts) as manager:
            trial = Trial(tmp_path / "run", manager)  # type: ignore[arg-type]
            with trial.assembled() as trainer:
                await trainer.push()

    asyncio.run(asyncio.wait_for(main(), 60))
    (chain,) = chains
    assert len(chain) <= 6, "\n".join(chain)
