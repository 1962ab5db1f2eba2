"""A replica in a Ray actor keeps every promise that an engine in this process keeps.

Runs the tests of `test_engine` once more. Tokens are brought to safety every few tenths of a second here, so that long
requests are interrupted several times without anybody noticing.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

pytest.importorskip("ray")

from tests import ray_cluster, ray_engines
from tests.contract import test_engine
from tests.contract.test_engine import Stage
from tests.rollouts import rollout, save_model
from treadle.cluster.ray.replicas import RayReplicas, ReplicaSetup
from treadle.engine.protocol import Engine

Start = Callable[[ReplicaSetup], Awaitable[Engine]]

NATIVE_TOO = (
    "test_an_interrupted_answer_goes_on_as_if_nothing_had_happened",
    "test_each_token_carries_the_version_that_sampled_it",
)
"""What the embedded engine is asked for as well: an actor that imports torch takes seconds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster.ray_here():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> object:
    return save_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def open_replica(model: object, start: Start, save_s: float) -> AsyncIterator[Engine]:
    config = rollout()
    async with ray_cluster.reserved(config, model) as reservation:
        replicas = RayReplicas(config, model, reservation.replica_slots(), name="remote", save_s=save_s, start=start)
        (engine,) = await replicas.start()
        yield engine


@pytest.fixture(params=["scripted", "native"])
def stage(request: pytest.FixtureRequest, cluster: None, model: object) -> Stage:
    if request.param == "scripted":
        return Stage(partial(open_replica, model, ray_engines.start_letters, 0.6), asyncio.run, settle_s=0.4)
    if request.node.originalname not in NATIVE_TOO:
        pytest.skip("shown with the scripted engine")
    return Stage(
        partial(open_replica, model, ray_engines.start_native_letters, 0.1), asyncio.run, settle_s=0.12, has_model=True
    )


globals().update({name: test for name, test in vars(test_engine).items() if name.startswith("test_")})
