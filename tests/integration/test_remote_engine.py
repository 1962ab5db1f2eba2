"""An engine in another process, seen from its own end: what it does when the engine breaks, and when it is closed."""

import asyncio
import os
import signal
from functools import partial
from random import Random

import pytest

from tests.letters import ask, decode, encode
from tests.ray_engines import FailingEngine, LettersEngine, letters
from treadle.config.rollout import FailureConfig, LimitsConfig, ScriptedConfig
from treadle.engine.protocol import Engine, EngineGone
from treadle.engine.remote import RemoteEngine
from treadle.engine.router import Router
from treadle.errors import ConfigError, EngineFailure, Mistake, RunError
from treadle.types import StopReason

LIMITS = LimitsConfig(launch_timeout_s=60.0)


async def start(kind: type, latency_s: float = 0.5) -> Engine:
    scripted = ScriptedConfig(latency_s=latency_s)
    return kind.create(scripted, name="r", encode=encode, decode=decode, seed=7, script=letters)


async def refuse_config() -> Engine:
    raise ConfigError([Mistake("rollout.name", "is wrong", "x", fix="mend it")])


async def refuse_with_a_bug() -> Engine:
    raise ZeroDivisionError("a bug")


def play(body) -> None:
    asyncio.run(asyncio.wait_for(body, 120))


def test_an_engine_that_can_serve_no_more_ends_its_process_with_the_cause():
    async def main() -> None:
        engine = await RemoteEngine.create(partial(start, FailingEngine), name="native-0", limits=LIMITS)
        with pytest.raises(EngineFailure, match="illegal memory access"):
            await engine.generate(ask(uid="poison"))
        cause = await engine.gone()
        assert "exit status 1" in cause and "the engine can serve no more" in cause
        with pytest.raises(EngineGone, match="the process of native-0 died: exit status 1"):
            await engine.health()
        await engine.close()

    play(main())


async def arrived(engine: RemoteEngine) -> None:
    """Until the process has every request made before this: its socket keeps them in order."""
    await asyncio.sleep(0)
    await engine.health()


def test_requests_that_run_are_answered_before_the_engine_is_closed():
    async def main() -> None:
        engine = await RemoteEngine.create(partial(start, LettersEngine, 3.0), name="native-0", limits=LIMITS)
        asked = [asyncio.ensure_future(engine.generate(ask(uid=f"t{at}", max_tokens=500))) for at in range(8)]
        await arrived(engine)
        await engine.close()
        assert {(await one).stop for one in asked} == {StopReason.ABORT}
        with pytest.raises(ProcessLookupError):
            os.kill(engine.pid, 0)
        with pytest.raises(EngineFailure, match="native-0 is closed"):
            await engine.generate(ask())

    play(main())


def test_a_frozen_process_is_killed_when_its_engine_is_closed_and_that_is_no_failure():
    async def main() -> None:
        limits = LimitsConfig(launch_timeout_s=60.0, close_timeout_s=10.0)
        engine = await RemoteEngine.create(partial(start, LettersEngine), name="native-0", limits=limits)
        router = Router([engine], limits=limits, failures=FailureConfig(), rng=Random(0))
        os.kill(engine.pid, signal.SIGSTOP)
        await router.close()
        with pytest.raises(ProcessLookupError):
            os.kill(engine.pid, 0)

    play(main())


def test_a_killed_process_fails_its_requests_with_the_signal():
    async def main() -> None:
        engine = await RemoteEngine.create(partial(start, LettersEngine, 30.0), name="native-0", limits=LIMITS)
        asked = asyncio.ensure_future(engine.generate(ask(max_tokens=500)))
        await arrived(engine)
        engine.forget("task/0")
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineGone, match="killed by SIGKILL"):
            await asked
        engine.forget("task/0")  # nobody is there, and that is no error
        await engine.close()

    play(main())


def test_why_an_engine_did_not_start_is_raised_as_what_it_is():
    with pytest.raises(ConfigError, match=r"rollout.name: is wrong\n    mend it"):
        play(RemoteEngine.create(refuse_config, name="native-0", limits=LIMITS))
    with pytest.raises(RunError, match="native-0: ZeroDivisionError: a bug"):
        play(RemoteEngine.create(refuse_with_a_bug, name="native-0", limits=LIMITS))
