"""What every way of the weights promises with real engines in processes of their own.

To add a way, add it to `TRANSPORTS`; to add an engine, add it to `ENGINES`. vLLM takes part where it is installed.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.halting import Halting
from tests.loop import Loop
from treadle.config import FailureConfig, LimitsConfig, ModelConfig, RolloutConfig
from treadle.engine.protocol import ConfirmedWeights, Engine, WeightUpdate
from treadle.engine.remote import RemoteEngine, start_native_engine
from treadle.engine.router import Router
from treadle.engine.vllm.engine import VLLMEngine
from treadle.errors import RunError
from treadle.model.checksum import checksum
from treadle.model.load import load_causal_model
from treadle.types import Request, SamplingParams
from treadle.weights import PolicySender, Transport, WeightSync
from treadle.weights.collective import CollectiveTransport
from treadle.weights.disk import DiskTransport
from treadle.weights.shared_memory import SharedMemoryTransport
from treadle.weights.transfer import CastTensors

BUCKET = 1 << 18
MODEL = ModelConfig(path="treadle/tiny-calculator")
LIMITS = LimitsConfig(launch_timeout_s=240, request_timeout_s=60, close_timeout_s=40)
ROLLOUT = RolloutConfig(prompt_length=32, response_length=64, max_num_seqs=8, limits=LIMITS)

TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "shared": lambda folder: SharedMemoryTransport(timeout_s=20, bucket_bytes=BUCKET),
    "collective": lambda folder: CollectiveTransport(host="127.0.0.1", receivers=2, timeout_s=20, bucket_bytes=BUCKET),
    "disk": lambda folder: DiskTransport(folder, bucket_bytes=BUCKET),
}


async def start_native(name: str, kind: type[RemoteEngine] = RemoteEngine) -> RemoteEngine:
    return await kind.create(partial(start_native_engine, ROLLOUT, MODEL, name, "cpu", 1), name=name, limits=LIMITS)


async def start_vllm(name: str) -> Engine:
    rollout = RolloutConfig(**{**ROLLOUT.values(), "name": "vllm"})
    return await VLLMEngine.create(rollout, MODEL, name=name, environment={"OMP_NUM_THREADS": "1"})


ENGINES: dict[str, Callable[[str], Coroutine[Any, Any, Engine]]] = {"native": start_native, "vllm": start_vllm}


class Weights:
    """A policy that is nothing but its weights, which differ from those that engines start with."""

    def __init__(self) -> None:
        self.module = load_causal_model(MODEL, dtype=torch.float32, device=torch.device("cpu"))
        self.change()

    def change(self) -> None:
        with torch.no_grad():
            next(self.module.parameters()).mul_(1.01)

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


class Damaging:
    """A transport that changes one number after the checksum was taken."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def publish(self, version: int, tensors: CastTensors) -> Any:
        damaged = {name: tensor.clone() for name, tensor in tensors.items()}
        list(damaged.values())[-1].view(-1)[7] += 1
        return self._transport.publish(version, CastTensors(damaged, None))

    def retire(self, version: int) -> None:
        self._transport.retire(version)

    def close(self) -> None:
        self._transport.close()


class Victim(RemoteEngine):
    """Stops in the middle of an update, and says so by a file."""

    flag: Path

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        return await super().update_weights(replace(update, tensors=Halting(update.tensors, self.flag)))


@pytest.fixture(scope="module", params=ENGINES)
def engine(loop: Loop, request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed in this environment")
    made = loop.run(ENGINES[request.param](f"{request.param}-0"))
    yield made
    loop.run(made.close())


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    made = TRANSPORTS[request.param](tmp_path / "weights")
    yield made
    made.close()


@pytest.fixture
def weights() -> Weights:
    return Weights()


def sender_of(weights: Weights, transport: Transport) -> PolicySender:
    return PolicySender(weights, transport=transport)  # type: ignore[arg-type]


def test_an_engine_holds_what_was_sent_and_samples_from_it(
    loop: Loop, engine: Engine, transport: Transport, weights: Weights, tmp_path: Path
) -> None:
    sender = sender_of(weights, transport)

    async def main() -> None:
        for version in (3, 4):
            weights.change()
            report = await WeightSync(sender, timeout_s=60).push_to(engine, version)
            assert report.checksum == checksum(weights.tensors()) and report.num_bytes > 4 * BUCKET
            completion = await engine.generate(Request("t", 0, (5, 6, 7), SamplingParams(4)))
            assert set(completion.versions) == {version} == {engine.version}

    loop.run(main())
    assert not list((tmp_path / "weights").glob("*"))


def test_damage_on_the_way_is_found_and_the_next_push_mends_it(
    loop: Loop, engine: Engine, transport: Transport, weights: Weights
) -> None:
    async def main() -> None:
        sent = checksum(weights.tensors())
        with pytest.raises(RunError, match=rf"version 5 has checksum {sent}, the engine confirms [0-9a-f]{{16}}"):
            await WeightSync(sender_of(weights, Damaging(transport)), timeout_s=60).push_to(engine, 5)
        assert (await WeightSync(sender_of(weights, transport), timeout_s=60).push_to(engine, 6)).checksum == sent

    loop.run(main())


def test_a_replica_killed_in_the_middle_fails_alone_and_the_next_push_works(
    loop: Loop, engine: Engine, transport: Transport, weights: Weights, tmp_path: Path
) -> None:
    sender = sender_of(weights, transport)

    async def main() -> None:
        victim = await start_native("victim", Victim)
        assert isinstance(victim, Victim)
        victim.flag = tmp_path / "halted"
        router = Router([victim, engine], limits=LIMITS, failures=FailureConfig(), rng=random.Random(0))
        pushing = asyncio.ensure_future(WeightSync(sender, timeout_s=60).push_to(router, 7))
        await asyncio.to_thread(wait_for, victim.flag)
        os.kill(victim.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        assert (await pushing).checksum == checksum(weights.tensors())
        assert time.monotonic() - killed_at < 10, "its death was noticed, not waited for"
        states = {state.name: state.healthy for state in router.snapshot()}
        assert states == {"victim": False, engine.name: True} and engine.version == 7
        weights.change()
        assert (await WeightSync(sender, timeout_s=60).push_to(router, 8)).checksum == checksum(weights.tensors())
        await router.remove(engine.name)
        await router.close()

    loop.run(main())


def wait_for(flag: Path) -> None:
    limit = time.monotonic() + 30
    while not flag.exists():
        assert time.monotonic() < limit, "the victim never got so far"
        time.sleep(0.01)
