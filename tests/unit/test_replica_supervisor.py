"""An engine that dies is started again, and nobody is served by one without weights."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests import virtual_time
from treadle.cluster import local
from treadle.cluster.local import LocalReplicas
from treadle.config.rollout import FailureConfig, LimitsConfig
from treadle.engine.protocol import ConfirmedWeights, Engine, EngineGone, WeightUpdate
from treadle.engine.replica_set import RoutingOptions
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.engine.requests import continuation_of
from treadle.engine.restarting_engine import RestartingEngine
from treadle.engine.router import Router
from treadle.errors import DeadlineError, EngineFailure, EnginesLost, RunError
from treadle.loop_thread import LoopThread
from treadle.process.supervisor import Recovery, RestartPolicy
from treadle.types import Completion, Request, SamplingParams, StopReason
from treadle.weights.sync import WeightLock, WeightSync

POLICY = RestartPolicy(attempts=3, first_wait_s=0.001)
REQUEST = Request("s", 0, (1, 2), SamplingParams(4))


class Frail:
    """An engine that answers with the checksum of its weights' version, until it is killed."""

    def __init__(self, name: str = "e", version: int = 0) -> None:
        self.name, self.version = name, version
        self.paused = self.closed = False
        self.busy = asyncio.Event()
        """Cleared: requests wait, until it is set or the engine dies."""
        self.busy.set()
        self.frozen = False
        """It answers no health check."""
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        self._death.set_result("killed")

    async def gone(self) -> str:
        return await asyncio.shield(self._death)

    async def _alive(self) -> None:
        waiting = asyncio.ensure_future(self.busy.wait())
        await asyncio.wait({waiting, self._death}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._death.done():
            raise EngineGone("killed")

    async def generate(self, request: Request) -> Completion:
        await self._alive()
        return Completion((self.version,), (0.0,), (self.version,), StopReason.STOP, replica=self.name)

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        await self._alive()
        self.version = update.version
        return ConfirmedWeights(update.checksum)

    async def abort(self, session: str | None = None) -> None: ...

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def health(self) -> None:
        if self.frozen:
            await asyncio.shield(self._death)
            raise EngineGone("killed")

    async def close(self) -> None:
        self.closed = True


class Nursery:
    """Starts engines, and keeps them. Each start may be held up, or fail."""

    def __init__(self) -> None:
        self.born: list[Frail] = []
        self.problems: list[str] = []
        self.door = asyncio.Event()
        self.door.set()

    async def start(self) -> Frail:
        await self.door.wait()
        if self.born and self.problems:
            raise RunError(self.problems.pop(0))
        self.born.append(Frail())
        return self.born[-1]


class Scene:
    """A supervisor of `count` engines whose weights nobody restores, unless `restore` does."""

    def __init__(self, count: int = 1, restore: Any = None) -> None:
        self.told: list[Recovery] = []
        self.supervisor = ReplicaSupervisor(count, restore=restore, policy=POLICY, report=self.told.append)
        self.nurseries: list[Nursery] = []

    async def add(self) -> RestartingEngine:
        self.nurseries.append(Nursery())
        return await self.supervisor.add(f"e-{len(self.nurseries)}", self.nurseries[-1].start)


def play(body: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(within())


async def soon(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.001)


async def never(engine: Engine, wanted: Callable[[], bool]) -> int | None:
    await asyncio.Event().wait()
    return None


def test_a_request_of_the_only_engine_is_made_again_of_its_replacement() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        (nursery,) = scene.nurseries
        nursery.born[0].busy.clear()
        asked = asyncio.ensure_future(engine.generate(REQUEST))
        await asyncio.sleep(0.01)
        nursery.born[0].kill()
        assert (await asked).ids == (0,)
        await soon(lambda: bool(scene.told))
        assert len(nursery.born) == 2 and nursery.born[0].closed
        assert str(scene.told[0]).startswith("e-1 serves again after") and str(scene.told[0]).endswith("s: killed")
        await engine.close()
        assert nursery.born[1].closed

    play(body)


def test_requests_outlast_the_restart_of_the_only_engine_however_long_a_training_step_keeps_its_weights() -> None:
    """Their deadline counts again once it serves: then one that hangs is late as ever."""
    stepped = asyncio.Event()

    async def restore(engine: Engine, wanted: Callable[[], bool]) -> int | None:
        await stepped.wait()
        return 0

    async def body() -> None:
        scene = Scene(restore=restore)
        engine = await scene.add()
        limits = LimitsConfig(request_timeout_s=10)
        router = Router([engine], limits=limits, failures=FailureConfig(request_retries=0), rng=Random(0))
        scene.supervisor.connect(router)
        (nursery,) = scene.nurseries
        nursery.born[0].busy.clear()
        asked = asyncio.ensure_future(router.generate(REQUEST))
        await asyncio.sleep(1)
        nursery.born[0].kill()
        await asyncio.sleep(100)
        assert len(nursery.born) == 2 and not asked.done(), "started again at once; its weights are in training"
        stepped.set()
        assert (await asked).ids == (0,)
        nursery.born[1].busy.clear()
        with pytest.raises(EngineFailure, match="no answer in 10 s"):
            await router.generate(REQUEST)
        await scene.supervisor.close()
        await router.close()

    virtual_time.run(body())


def test_with_others_there_requests_fail_at_once_and_go_elsewhere() -> None:
    async def body() -> None:
        scene = Scene(2)
        first, second = await scene.add(), await scene.add()
        scene.nurseries[0].door.clear()
        scene.nurseries[0].born[0].kill()
        with pytest.raises(EngineFailure):
            await first.generate(REQUEST)
        with pytest.raises(EngineFailure, match="e-1 is being started again: killed"):
            await first.generate(REQUEST)
        with pytest.raises(EngineFailure, match="being started again"):
            await first.health()
        with pytest.raises(EngineFailure, match="being started again"):
            await first.update_weights(WeightUpdate(1, "a", {}))
        assert (await second.generate(REQUEST)).ids == (0,)
        scene.nurseries[0].door.set()
        await soon(lambda: bool(scene.told))
        assert (await first.generate(REQUEST)).ids == (0,)
        await first.close()
        await second.close()

    play(body)


def test_a_push_reaches_the_replacement_before_any_request_does() -> None:
    async def body() -> None:
        scene = Scene(restore=never)
        engine = await scene.add()
        scene.nurseries[0].born[0].kill()
        pushed = asyncio.ensure_future(engine.update_weights(WeightUpdate(5, "sum", {})))
        asked = asyncio.ensure_future(engine.generate(REQUEST))
        await soon(lambda: len(scene.nurseries[0].born) == 2)
        assert (await pushed).checksum == "sum"
        assert (await asked).ids == (5,) and engine.version == 5
        await engine.close()

    play(body)


def test_where_nobody_restores_a_replacement_does_not_serve_older_weights_than_were_pushed() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        await engine.update_weights(WeightUpdate(1, "sum", {}))
        scene.nurseries[0].born[0].kill()
        asked = asyncio.ensure_future(engine.generate(REQUEST))
        await soon(lambda: len(scene.nurseries[0].born) == 2)
        await asyncio.sleep(0.01)
        assert not asked.done() and not scene.told
        await engine.update_weights(WeightUpdate(2, "sum", {}))
        assert (await asked).ids == (2,)
        await engine.close()

    play(body)


def test_without_a_push_weights_are_restored_and_marked_as_synced() -> None:
    async def body() -> None:
        begin, synced = asyncio.Event(), []

        async def restore(engine: Engine, wanted: Callable[[], bool]) -> int | None:
            await begin.wait()
            assert wanted()
            await engine.update_weights(WeightUpdate(7, "sum", {}))
            return 7

        scene = Scene(restore=restore)
        scene.supervisor.mark_synced = lambda name, version: synced.append((name, version))  # type: ignore[method-assign]
        engine = await scene.add()
        scene.nurseries[0].born[0].kill()
        asked = asyncio.ensure_future(engine.generate(REQUEST))
        await soon(lambda: len(scene.nurseries[0].born) == 2)
        await asyncio.sleep(0.01)
        assert not asked.done(), "a replacement without weights serves nobody"
        begin.set()
        assert (await asked).ids == (7,) and synced == [("e-1", 7)]
        await engine.close()

    play(body)


def test_what_waits_can_be_aborted_and_a_paused_supervisor_gets_a_paused_replacement() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        scene.nurseries[0].door.clear()
        scene.nurseries[0].born[0].kill()
        asked = asyncio.ensure_future(engine.generate(REQUEST))
        await asyncio.sleep(0.01)
        await engine.abort("another")
        await asyncio.sleep(0.01)
        assert not asked.done()
        await engine.abort(REQUEST.session)
        assert (await asked).stop is StopReason.ABORT
        await engine.pause()
        scene.nurseries[0].door.set()
        await soon(lambda: bool(scene.told))
        assert scene.nurseries[0].born[1].paused
        await engine.close()

    play(body)


def test_a_replacement_that_is_paused_while_everything_resumes_is_resumed_too() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        (nursery,) = scene.nurseries
        nursery.door.clear()
        nursery.born[0].kill()
        await engine.pause()
        pausing, paused = asyncio.Event(), asyncio.Event()

        class Slow(Frail):
            async def pause(self) -> None:
                pausing.set()
                await paused.wait()
                self.paused = True

        replacement = Slow()

        async def start() -> Frail:
            return replacement

        engine._start = start
        nursery.door.set()
        await pausing.wait()
        await engine.resume()
        paused.set()
        await soon(lambda: bool(scene.told))
        assert not replacement.paused
        await engine.close()

    play(body)


def test_a_replacement_that_freezes_before_it_is_paused_is_succeeded() -> None:
    class Freezes(Frail):
        async def pause(self) -> None:
            await asyncio.Event().wait()

    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        (nursery,) = scene.nurseries
        frozen = Freezes()

        async def start() -> Frail:
            if len(nursery.born) > 1:
                return await Nursery.start(nursery)
            nursery.born.append(frozen)
            return frozen

        engine._start = start  # type: ignore[method-assign]
        await engine.pause()
        nursery.born[0].kill()
        await asyncio.wait_for(engine._arrived.wait(), 1000)
        assert frozen.closed and nursery.born[2].paused
        await engine.resume()
        assert (await engine.generate(REQUEST)).stop is StopReason.STOP
        await engine.close()

    virtual_time.run(body())


def test_a_replacement_that_is_to_sleep_and_does_not_is_ended() -> None:
    class Sleepless(Frail):
        async def sleep(self, level: int = 1) -> None:
            await asyncio.Event().wait()

        async def wake(self) -> None: ...

    async def body() -> None:
        made: list[Sleepless] = []

        async def start() -> Sleepless:
            made.append(Sleepless())
            return made[-1]

        weights = WeightSync(SimpleNamespace(), timeout_s=5)  # type: ignore[arg-type]
        apart = LocalReplicas({"e-1": start}, weights)
        with pytest.raises(DeadlineError, match=r"e did not sleep within rollout\.limits\.request_timeout_s = 5"):
            await apart._start_idle(asyncio.get_running_loop(), start, 5.0)
        assert [engine.closed for engine in made] == [True]

    virtual_time.run(body())


def test_a_replacement_that_dies_before_it_has_weights_is_succeeded() -> None:
    async def body() -> None:
        scene = Scene(restore=never)
        engine = await scene.add()
        born = scene.nurseries[0].born
        born[0].kill()
        await soon(lambda: len(born) == 2)
        await asyncio.sleep(0.01)
        born[1].kill()
        assert (await engine.update_weights(WeightUpdate(5, "sum", {}))).checksum == "sum"
        assert len(born) == 3 and (await engine.generate(REQUEST)).ids == (5,)
        await engine.close()

    play(body)


def test_an_engine_that_dies_while_it_is_told_something_is_no_failure() -> None:
    async def body() -> None:
        scene = Scene(restore=never)
        engine = await scene.add()
        born = scene.nurseries[0].born

        async def gone() -> None:
            raise EngineGone("killed")

        born[0].pause = born[0].abort = gone  # type: ignore[method-assign, assignment]
        await engine.pause()
        born[0].kill()
        await soon(lambda: len(born) == 2)
        await soon(lambda: born[1].paused)
        await engine.resume()
        assert not born[1].paused, "also where it has no weights yet"
        await engine.close()

    play(body)


def test_whoever_waits_at_a_dead_post_leaves_when_another_serves() -> None:
    async def body() -> None:
        scene = Scene(2)
        first, second = await scene.add(), await scene.add()
        for nursery in scene.nurseries:
            nursery.door.clear()
            nursery.born[0].kill()
        await soon(lambda: not first.serves and not second.serves)
        asked = asyncio.ensure_future(first.generate(REQUEST))
        await asyncio.sleep(0.01)
        assert not asked.done()
        scene.nurseries[1].door.set()
        assert (await asked).stop is StopReason.ABORT
        await first.close()
        await second.close()

    play(body)


def test_weights_are_restored_from_a_run_on_another_loop() -> None:
    """The step that waits meanwhile goes on by itself: nothing else happens on its loop."""

    async def body() -> None:
        given, release = [], asyncio.Event()
        rollout = LoopThread("rollout")

        class Sender:
            async def publish(self, version: int) -> WeightUpdate:
                await release.wait()
                return WeightUpdate(version, "sum", {})

            async def retire(self, version: int) -> None:
                given.append(version)

        weights = WeightSync(Sender(), timeout_s=5)
        nurseries: list[Nursery] = []

        async def start() -> Frail:
            if not nurseries:
                nurseries.append(Nursery())
            return await nurseries[0].start()

        apart = LocalReplicas({"e-1": start}, weights)
        apart.supervisor._report = lambda recovery: None
        (engine,) = await rollout.run(apart.start_all(shares_gpu=True, sleeps=False, timeout_s=5.0))
        weights.lock.mark_synced(4)
        await rollout.run(_kill(nurseries[0].born[0]))
        asked = asyncio.ensure_future(rollout.run(engine.generate(REQUEST)))
        await soon(lambda: len(nurseries[0].born) == 2)
        await asyncio.sleep(0.05)

        async def step() -> None:
            async with weights.lock.training():
                assert given == [4], "a step waits for what reads the weights"

        stepping = asyncio.ensure_future(step())
        await asyncio.sleep(0.05)
        assert not stepping.done()
        release.set()
        await stepping
        assert (await asked).ids == (4,)
        await rollout.run(engine.close())
        rollout.stop(5)

    play(body)


async def _kill(engine: Frail) -> None:
    engine.kill()


class Instant:
    """A sender of weights that are all the same."""

    async def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, "sum", {})

    async def retire(self, version: int) -> None: ...


@pytest.mark.parametrize("trained_on", [False, True])
def test_validation_goes_on_with_the_weights_it_had_or_is_ended_with_the_cause(
    trained_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        nursery, policy = Nursery(), SimpleNamespace(version=3)
        monkeypatch.setattr(local, "start_process_engine", lambda *_: nursery.start())
        weights = WeightSync(Instant(), timeout_s=5.0)
        plan = SimpleNamespace(validation=SimpleNamespace(gpus=()), replicas=1, rewards=None)
        backend = local.ValidationEngine(plan, weights, policy)  # type: ignore[arg-type]
        (engine,) = (await backend.start_engines(None, None, None, None)).engines  # type: ignore[arg-type]
        await weights.push_to(engine, 3)
        nursery.born[0].busy.clear()
        waiting = asyncio.ensure_future(engine.generate(REQUEST))
        watching = asyncio.ensure_future(backend.supervisor.watch())
        await asyncio.sleep(0)
        policy.version += trained_on
        nursery.born[0].kill()
        if not trained_on:
            assert (await waiting).versions == (3,)
            watching.cancel()
        else:
            with pytest.raises(EnginesLost, match="died while it sampled with version 3, and the policy has newer"):
                await watching
            assert not waiting.done(), "it is ended with the validation"
            waiting.cancel()
            await weights.push_to(engine, 4)
            assert (await engine.generate(REQUEST)).versions == (4,)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(backend.supervisor.watch(), 0.01)
        await backend.supervisor.close_engines()

    play(body)


def test_a_pause_ends_what_waits_for_a_replacement() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        scene.nurseries[0].door.clear()
        scene.nurseries[0].born[0].kill()
        asked = asyncio.ensure_future(engine.generate(REQUEST))
        await asyncio.sleep(0.01)
        await engine.pause()
        assert (await asked).stop is StopReason.ABORT
        await engine.close()

    play(body)


def test_whatever_breaks_in_the_supervision_no_request_waits_in_vain() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()

        async def fail() -> str:
            raise OSError("no more processes")

        engine._start = fail  # type: ignore[assignment]
        scene.nurseries[0].born[0].kill()
        with pytest.raises(EngineFailure, match="OSError: no more processes"):
            await engine.generate(REQUEST)
        with pytest.raises(RunError, match="no more processes"):
            await scene.supervisor.watch()
        await engine.close()

    play(body)


def test_a_start_that_fails_is_tried_again_and_one_that_always_fails_ends_the_rollout() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        (nursery,) = scene.nurseries
        nursery.problems = ["no memory"]
        nursery.born[0].kill()
        assert (await engine.generate(REQUEST)).ids == (0,)
        nursery.problems = ["no memory"] * 9
        nursery.born[1].kill()
        with pytest.raises(EngineFailure, match="e-1 could not be started again: no memory"):
            await engine.generate(REQUEST)
        with pytest.raises(RunError, match="no replica is left, and none could be started again: no memory"):
            await scene.supervisor.watch()
        with pytest.raises(EngineFailure, match="could not be started again"):
            await engine.update_weights(WeightUpdate(1, "a", {}))
        await engine.close()

    play(body)


def test_requests_of_a_watched_rollout_wait_for_its_end_instead_of_failing_one_by_one() -> None:
    """Else each would be recorded as a trajectory that failed, before the rollout ends."""

    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        (nursery,) = scene.nurseries
        watching = asyncio.ensure_future(scene.supervisor.watch())
        nursery.problems = ["no memory"] * 9
        nursery.born[0].busy.clear()
        open_one = asyncio.ensure_future(engine.generate(REQUEST))
        await asyncio.sleep(0)
        nursery.born[0].kill()
        with pytest.raises(RunError, match="no replica is left"):
            await watching
        late = asyncio.ensure_future(engine.generate(REQUEST))
        with pytest.raises(EngineFailure, match="could not be started again: no memory"):
            await engine.health()
        await asyncio.sleep(1)
        assert not open_one.done() and not late.done()
        await engine.close()
        assert isinstance(await asyncio.gather(open_one, late, return_exceptions=True), list)

    play(body)


def test_one_that_dies_young_again_and_again_is_given_up() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        (nursery,) = scene.nurseries
        for life in range(1, 5):
            await soon(lambda life=life: len(nursery.born) == life or engine.is_lost)  # type: ignore[misc]
            nursery.born[-1].kill() if not engine.is_lost else None
        await soon(lambda: engine.is_lost)
        assert "it died 4 times in a row, each time within 60 s" in str(scene.told[-1])
        await engine.close()

    play(body)


def test_weights_are_still_between_a_push_and_the_next_step() -> None:
    async def body() -> None:
        weight_lock, seen = WeightLock(), []

        async def look() -> None:
            async with weight_lock.synced() as version:
                seen.append(version)
                await asyncio.sleep(0.02)
                seen.append(version)

        looking = asyncio.ensure_future(look())
        async with weight_lock.training():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert not seen, "after a step the weights are nobody's until they were pushed"
        weight_lock.mark_synced(3)
        await soon(lambda: bool(seen))
        async with weight_lock.training():
            assert seen == [3, 3], "a step waits for whoever reads"
        await looking

    play(body)


def test_a_step_that_came_first_leaves_nothing_to_read_until_it_is_pushed() -> None:
    async def body() -> None:
        weight_lock, seen = WeightLock(), []
        weight_lock.mark_synced(3)

        async def step() -> None:
            async with weight_lock.training():
                pass

        async def look() -> None:
            async with weight_lock.synced() as version:
                seen.append(version)

        async with weight_lock.idle():
            stepping = asyncio.ensure_future(step())
            await asyncio.sleep(0)
            looking = asyncio.ensure_future(look())
            await asyncio.sleep(0)
        await stepping
        await asyncio.sleep(0.01)
        assert not seen
        weight_lock.mark_synced(4)
        await looking
        assert seen == [4]

    play(body)


class Typist(Frail):
    """Samples its position, then the next, one every 10 ms, until it is aborted or dies."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []
        self._aborted = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        self._aborted.clear()
        ids: list[int] = []
        while len(ids) < request.sampling.max_tokens and not self._aborted.is_set():
            await asyncio.sleep(0.01)
            if self._death.done():
                raise EngineGone("killed")
            ids.append(request.position + len(ids))
        stop = StopReason.ABORT if self._aborted.is_set() else StopReason.LENGTH
        return Completion(tuple(ids), (0.0,) * len(ids), (0,) * len(ids), stop, replica=self.name)

    async def abort(self, session: str | None = None) -> None:
        self._aborted.set()


def test_a_killed_engine_keeps_the_tokens_that_were_brought_to_safety() -> None:
    async def body() -> None:
        born: list[Typist] = []

        async def start() -> Typist:
            born.append(Typist())
            return born[-1]

        supervisor = ReplicaSupervisor(1, policy=POLICY, report=lambda recovery: None, save_s=0.05)
        engine = await supervisor.add("e-1", start)
        request = Request("s", 0, (1, 2), SamplingParams(100_000))
        running = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0.22)
        assert len(born[0].asked) > 2
        kept = born[0].asked[-1].position
        born[0].kill()
        part = await running
        assert part.stop is StopReason.ABORT
        assert part.ids == tuple(range(kept)) and kept > 0
        assert part.replica == "e-1" or part.replica == "e"
        rest = await engine.generate(continuation_of(replace(request, sampling=SamplingParams(kept + 3)), part))
        assert rest.ids == (kept, kept + 1, kept + 2)
        await supervisor.close_engines()

    virtual_time.run(body())


def test_a_long_answer_is_one_answer_and_an_abort_ends_it() -> None:
    async def body() -> None:
        typist = Typist()

        async def start() -> Typist:
            return typist

        supervisor = ReplicaSupervisor(1, policy=POLICY, report=lambda recovery: None, save_s=0.03)
        engine = await supervisor.add("e-1", start)
        whole = await engine.generate(Request("s", 0, (1, 2), SamplingParams(20)))
        assert whole.ids == tuple(range(20)) and whole.stop is StopReason.LENGTH
        assert len(typist.asked) > 1
        running = asyncio.ensure_future(engine.generate(Request("s", 0, (1, 2), SamplingParams(100_000))))
        await asyncio.sleep(0.1)
        await engine.abort("s/0")
        assert (await running).stop is StopReason.ABORT
        await supervisor.close_engines()

    virtual_time.run(body())


FAST = RoutingOptions(probe_timeout_s=0.01, first_probe_s=0.001)


def freeze(engine: Frail) -> None:
    engine.frozen = True
    engine.busy.clear()


def test_an_engine_that_answers_no_health_check_twice_in_a_row_is_replaced() -> None:
    async def body() -> None:
        scene = Scene(restore=lambda engine, wanted: asyncio.sleep(0, 0))
        engine = await scene.add()
        router = Router([engine], limits=LimitsConfig(), failures=FailureConfig(), rng=Random(0), routing=FAST)
        (nursery,) = scene.nurseries
        freeze(nursery.born[0])
        asked = asyncio.ensure_future(router.generate(REQUEST))
        with pytest.raises(EngineFailure, match="no answer to a health check"):
            await router.health()
        assert not nursery.born[0]._death.done(), "once is not enough"
        await router.health()
        assert (await asked).ids == (0,) and len(nursery.born) == 2
        assert "no answer to a health check in 0.01 s, 2 times in a row" in str(scene.told[0])
        await router.close()

    play(body)


def test_requests_that_find_only_a_frozen_engine_wait_for_its_replacement() -> None:
    async def body() -> None:
        scene = Scene(restore=lambda engine, wanted: asyncio.sleep(0, 0))
        engine = await scene.add()
        router = Router([engine], limits=LimitsConfig(), failures=FailureConfig(), rng=Random(0), routing=FAST)
        (nursery,) = scene.nurseries
        freeze(nursery.born[0])
        router._replicas.set_aside(router._replicas.all[0], "three requests had no answer")
        assert (await router.generate(REQUEST)).ids == (0,) and len(nursery.born) == 2
        await router.close()

    play(body)


@pytest.mark.parametrize("order", ["update", "pause"])
def test_a_frozen_engine_is_replaced_before_it_is_told_something_that_is_waited_for(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.engine.restarting_engine.PROBE_TIMEOUT_S", 0.01)

    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        (nursery,) = scene.nurseries
        freeze(nursery.born[0])
        if order == "update":
            assert (await engine.update_weights(WeightUpdate(1, "sum", {}))).checksum == "sum"
        else:
            await engine.pause()
        await soon(lambda: len(nursery.born) == 2)
        assert nursery.born[0]._death.done() and nursery.born[1].version == (order == "update")
        await soon(lambda: bool(scene.told))
        assert "2 times in a row" in str(scene.told[0])
        await engine.close()

    play(body)


def test_an_engine_that_takes_in_weights_is_not_replaced_however_long_it_is_silent() -> None:
    async def body() -> None:
        scene = Scene()
        engine = await scene.add()
        router = Router([engine], limits=LimitsConfig(), failures=FailureConfig(), rng=Random(0), routing=FAST)
        (first,) = scene.nurseries[0].born
        first.busy.clear()
        pushed = asyncio.ensure_future(router.update_weights(WeightUpdate(1, "sum", {})))
        await soon(lambda: bool(engine._updating))
        first.frozen = True
        for _ in range(4):
            with pytest.raises(EngineFailure):
                await router.health()
        assert not first._death.done()
        first.frozen = False
        first.busy.set()
        assert (await pushed).checksum == "sum"
        await router.close()

    play(body)
