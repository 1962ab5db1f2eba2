"""Engines and plug-ins that actors start by name. Light, and without Ray: each is imported in a process of its own."""

import os
import random
import signal
from typing import TYPE_CHECKING, Any

from tests.letters import decode, encode
from treadle.config.rollout import RolloutConfig, ScriptedConfig
from treadle.engine.protocol import Engine
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import EngineFailure
from treadle.rollout.agent_loop import AgentLoopBase
from treadle.rollout.session import Session
from treadle.types import Completion, Request

if TYPE_CHECKING:
    from treadle.cluster.ray.replicas import ReplicaSetup


def letters(request: Request, rng: random.Random) -> str:
    """Short answers to short requests, long ones to long."""
    length = 12 if request.sampling.max_tokens < 100 else 200
    return "".join(rng.choice("abcdefgh") for _ in range(length))


class LettersEngine(ScriptedEngine):
    """Answers short requests at once. Keeps the rest of an answer also when it is interrupted before its next token."""

    _slow = True

    async def generate(self, request: Request) -> Completion:
        self._slow = request.sampling.max_tokens >= 100
        return await super().generate(request)

    def _latency(self, stream: int, position: int) -> float:
        return super()._latency(stream, position) if self._slow else 0.0

    def _remember(self, request: Request, answer: Any, kept: int) -> None:
        super()._remember(request, answer, kept)
        if not kept:
            self._rests[request.session, request.position] = (hash(request.ids), answer)


async def start_letters(setup: "ReplicaSetup") -> Engine:
    """A scripted engine that writes letters; a long request takes a second or two."""
    scripted = ScriptedConfig(latency_s=1.5)
    return LettersEngine.create(scripted, name=setup.name, encode=encode, decode=decode, seed=7, script=letters)


async def start_dying(setup: "ReplicaSetup") -> Engine:
    """Serves the first time, and dies at every other start."""
    try:
        os.mkdir(os.path.join(setup.model.path, "has_started"))
    except FileExistsError:
        os.kill(os.getpid(), signal.SIGKILL)
    return await start_letters(setup)


class FailingEngine(LettersEngine):
    """An engine that breaks for good at a certain request, in a process that lives on."""

    broken = False

    async def generate(self, request: Request) -> Completion:
        if request.uid == "poison":
            self.broken = True
        if self.broken:
            raise EngineFailure("CUDA error: an illegal memory access was encountered")
        return await super().generate(request)

    async def health(self) -> None:
        if self.broken:
            raise EngineFailure("CUDA error: an illegal memory access was encountered")


async def start_failing(setup: "ReplicaSetup") -> Engine:
    return FailingEngine.create(setup.rollout.scripted, name=setup.name, encode=encode, decode=decode)


async def start_tiny(setup: "ReplicaSetup") -> Engine:
    """The embedded engine with a small random model."""
    from tests.tiny import tiny
    from treadle.engine.native.engine import NativeEngine

    return await NativeEngine.create(setup.rollout, tiny("llama", seed=1), name=setup.name)


async def start_native_letters(setup: "ReplicaSetup") -> Engine:
    """The embedded engine with a model that takes its time."""
    from tests.contract.test_engine import slow_letters
    from treadle.engine.native.engine import NativeEngine

    rollout = RolloutConfig(prompt_length=32, response_length=512, max_num_seqs=48)
    return await NativeEngine.create(
        rollout, slow_letters(), name=setup.name, decode=decode, checksum=lambda tensors: "checksum"
    )


class Dead(AgentLoopBase):
    """Kills its process."""

    async def run(self, session: Session) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def count_letters(response: str, broken: bool = False) -> float:
    """A reward function of the user's own."""
    if broken:
        raise RuntimeError("told to break")
    return float(len(response))


def answer(request: Request, rng: random.Random) -> str:
    """A script: one call of a tool, then the answer."""
    spoken = sum(message["role"] == "assistant" for message in request.messages)
    return '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' if spoken == 0 else "It is 3."


def rate(request: Request, rng: random.Random) -> str:
    """A judge's answer."""
    return "Score: 2"
