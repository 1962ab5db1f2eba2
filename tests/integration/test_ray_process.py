"""A process on Ray is what its spec says: it ends in order, with all that it started, and does not stall for ever."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("ray")

from tests import ray_cluster
from tests.integration.test_process import refuse, spec
from tests.rollouts import rollout, save_model
from treadle.cluster.ray.launcher import RayLauncher, RayProcess
from treadle.process.channel import ChannelClosed

GONE_S = 60.0


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.ray_here():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def launched(model, serve: str, setup: object = None, **fields) -> AsyncIterator[RayProcess]:
    async with ray_cluster.reserved(rollout(), model) as reservation:
        launcher = RayLauncher(reservation.worker_slot(0))
        process = await launcher.launch(spec(serve, setup, kill_with_parent=False, **fields), refuse)
        try:
            yield process
        finally:
            await process.end()


def play(body: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(body, 240))


def test_it_has_time_to_end_in_order_and_what_it_left_running_ends_with_it(cluster, model, tmp_path):
    async def main() -> None:
        done = tmp_path / "done"
        async with launched(model, "serve_tidy", str(done), reap=True, end_timeout_s=60.0) as process:
            assert ray_cluster.alive(process.started)
            await process.end()
            assert done.read_text() == "closed in order"
            assert await asyncio.to_thread(ray_cluster.gone_within, [process.started], GONE_S) == []

    play(main())


def test_without_time_to_end_in_order_it_is_killed(cluster, model, tmp_path):
    async def main() -> None:
        done = tmp_path / "done"
        async with launched(model, "serve_tidy", str(done), reap=True) as process:
            await process.end()
            assert await asyncio.to_thread(ray_cluster.gone_within, [process.started, process.pid], GONE_S) == []
            assert not done.exists()

    play(main())


def test_what_a_killed_process_started_in_a_session_of_its_own_ends_with_it(cluster, model):
    async def main() -> None:
        async with launched(model, "serve_leaver", reap=True) as process:
            await process.gone()
            assert await asyncio.to_thread(ray_cluster.gone_within, [process.started], GONE_S) == []

    play(main())


def test_one_whose_interpreter_is_held_ends_by_itself(cluster, model):
    async def main() -> None:
        async with launched(model, "serve_echo", max_stall_s=5.0) as process:
            assert await process.peer.request("hello") == "hello"
            with pytest.raises(ChannelClosed):
                await process.peer.request("hold")
            assert await asyncio.to_thread(ray_cluster.gone_within, [process.pid], GONE_S) == []

    play(main())


def test_one_that_hangs_says_where(cluster, model):
    async def main() -> None:
        async with launched(model, "serve_echo", trace=True) as process:
            held = asyncio.ensure_future(process.peer.request("hold"))
            await asyncio.sleep(0)
            where = ""
            while "process_children.py" not in where:  # the request may be on its way yet
                process.probe()
                where = await process.traced()
            assert process.kill() == where
            with pytest.raises(ChannelClosed):
                await held

    play(main())
