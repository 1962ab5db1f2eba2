"""The socket between driver and actor: only for the process that has the key. No actor is started here."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable
from dataclasses import replace

import pytest

pytest.importorskip("ray")

from treadle.cluster.ray.actor import Listener, connect
from treadle.cluster.ray.reaper import descendants, reaping
from treadle.errors import DeadlineError
from treadle.process.channel import Channel, ChannelClosed


def run(main: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def test_a_process_without_the_key_is_turned_away_and_the_right_one_admitted():
    async def main() -> None:
        listener = Listener("127.0.0.1")
        accepting = asyncio.ensure_future(listener.accept(10))
        stranger = await Channel.open(await connect(replace(listener.address, key=bytes(32))))
        with pytest.raises(ChannelClosed):
            await stranger.receive()
        stranger.close()
        ours = await Channel.open(await connect(listener.address))
        theirs = await Channel.open(await accepting)
        theirs.send("welcome")
        assert await ours.receive() == "welcome"
        ours.close()
        with pytest.raises(ChannelClosed):
            await theirs.receive()
        theirs.close()

    run(main())


def test_a_listener_nobody_comes_to_says_so_and_closes():
    async def main() -> None:
        listener = Listener("127.0.0.1")
        with pytest.raises(DeadlineError, match=r"no process connected to 127[.]0[.]0[.]1"):
            await listener.accept(0.05)
        with pytest.raises(ConnectionRefusedError):
            await connect(listener.address)

    run(main())


def test_the_key_is_in_no_log():
    listener = Listener("127.0.0.1")
    assert str(listener.address.key) not in repr(listener.address)
    run(_shut(listener))


async def _shut(listener: Listener) -> None:
    with pytest.raises(DeadlineError):
        await listener.accept(0.01)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the guard is for Linux")
def test_a_guard_ends_those_it_was_given_and_no_others():
    def sleeper() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    with sleeper() as mine, sleeper() as other:
        try:
            assert {mine.pid, other.pid} <= set(descendants(os.getpid()))
            with reaping([mine.pid]):
                assert mine.poll() is None
            assert mine.wait(10) == -9
            assert other.poll() is None
        finally:
            other.kill()
            mine.kill()
