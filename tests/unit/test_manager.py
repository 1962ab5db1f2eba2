"""One manager, every way to call it: awaited, blocking, streamed; with no loop, inside one, from many threads."""

import asyncio
import gc
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from tests.heartbeat import longest_stall_s
from tests.rollouts import CALL, FINAL, engine, renderer, rollout, say, task, tasks
from treadle.config import FailureConfig, LimitsConfig, ModelConfig, RewardConfig, RewardFunctionConfig
from treadle.errors import ConfigError, EngineFailure, MisuseError
from treadle.journal import Journal, JournalReader
from treadle.loop_thread import LoopThread
from treadle.rollout.agent_loop import AgentLoopBase
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutKind, RolloutParts
from treadle.rollout.session import Session
from treadle.types import Batch, Status, Trajectory

MODEL = ModelConfig(path="unused")
FORGIVING = FailureConfig(max_failed_fraction=1.0, session_retries=0, request_retries=0)
CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


def parts(script=None, **fields) -> RolloutParts:
    return RolloutParts(engines=[engine(script, **fields)], renderer=renderer())


def manager(config=None, script=None, reward=None, **fields) -> AgentLoopManager:
    return AgentLoopManager.create_blocking(
        rollout=config or rollout(), model=MODEL, reward=reward, parts=parts(script, **fields)
    )


def uids(batch: Batch) -> list[str]:
    return [group.task.uid for group in batch.groups]


def test_blocking_in_a_plain_script():
    with manager() as made:
        assert uids(made.generate_sequences_blocking(tasks(3))) == ["task0", "task1", "task2"]


def test_blocking_from_sync_code_inside_a_running_loop():
    async def main() -> list[str]:
        with manager() as made:
            return uids(made.generate_sequences_blocking(tasks(2)))

    assert asyncio.run(main()) == ["task0", "task1"]


def test_awaited():
    async def main() -> list[str]:
        async with await AgentLoopManager.create(rollout=rollout(), model=MODEL, parts=parts()) as made:
            return uids(await made.generate_sequences(tasks(2)))

    assert asyncio.run(main()) == ["task0", "task1"]


def test_in_comprehensions_and_generator_expressions_under_gather():
    async def main() -> None:
        async with await AgentLoopManager.create(rollout=rollout(), model=MODEL, parts=parts()) as made:
            batches = await asyncio.gather(*(made.generate_sequences([item]) for item in tasks(5)))
            assert [uids(batch)[0] for batch in batches] == [item.uid for item in tasks(5)]
            again = [await made.generate_sequences([item]) for item in tasks(2)]
            assert len(again) == 2

    asyncio.run(main())


def test_from_an_async_generator():
    async def main() -> list[str]:
        async def steps(made: AgentLoopManager):
            for item in tasks(3):
                yield await made.generate_sequences([item])

        async with await AgentLoopManager.create(rollout=rollout(), model=MODEL, parts=parts()) as made:
            return [uids(batch)[0] async for batch in steps(made)]

    assert asyncio.run(main()) == ["task0", "task1", "task2"]


def test_from_several_threads_and_several_loops_at_once():
    with manager(latency_s=0.01) as made, ThreadPoolExecutor(8) as pool:

        async def awaited(uid: str) -> list[str]:
            return uids(await made.generate_sequences([task(uid)]))

        blocking = [pool.submit(made.generate_sequences_blocking, [task(f"b{at}")]) for at in range(4)]
        loops = [pool.submit(asyncio.run, awaited(f"a{at}")) for at in range(4)]
        assert [uids(future.result()) for future in blocking] == [[f"b{at}"] for at in range(4)]
        assert [future.result() for future in loops] == [[f"a{at}"] for at in range(4)]


def test_the_blocking_form_on_the_managers_own_loop_is_refused_at_once():
    class Recursive(AgentLoopBase):
        made: AgentLoopManager

        async def run(self, session: Session) -> None:
            Recursive.made.generate_sequences_blocking([task("inner")])

    globals()["Recursive"] = Recursive
    config = rollout(default_agent_loop=f"{__name__}:Recursive")
    with manager(config) as Recursive.made:
        (trajectory,) = Recursive.made.generate_sequences_blocking([task()]).trajectories
    assert "await generate_sequences instead" in trajectory.outcome.detail


def test_context_variables_arrive_in_both_colours():
    seen = []

    def script(request, rng):
        seen.append(CALLER.get())
        return FINAL

    async def awaited(made: AgentLoopManager) -> None:
        CALLER.set("awaiting")
        await made.generate_sequences([task("a")])

    with manager(script=script) as made:
        CALLER.set("blocking")
        made.generate_sequences_blocking([task("b")])
        asyncio.run(awaited(made))
    assert seen == ["blocking", "awaiting"]


def hold_the_interpreter(request, rng):
    """Longer in one call than a caller may be kept waiting."""
    sum(range(20_000_000)) if request.uid == "task1" else None
    return FINAL


@pytest.mark.parametrize(
    ("script", "num_tasks", "stalls"), [(say(CALL, CALL, FINAL), 300, False), (hold_the_interpreter, 3, True)]
)
def test_a_heartbeat_on_the_callers_loop_does_not_stall(script, num_tasks, stalls):
    async def main() -> float:
        async with await AgentLoopManager.create(
            rollout=rollout(tools=("tests.rollouts:add",), default_agent_loop="tool_agent"),
            model=MODEL,
            parts=parts(script),
        ) as made:
            await made.generate_sequences([task("warm")])
            gc.collect()
            return await longest_stall_s(lambda: made.generate_sequences(tasks(num_tasks)))

    found = [asyncio.run(main())]
    while found[-1] > 0.05 and len(found) < 3:  # once without a stall is enough
        found.append(asyncio.run(main()))
    assert (found[-1] > 0.05) is stalls, f"{min(found):.3f} s of CPU between two beats"


def test_streaming_delivers_each_trajectory_as_it_ends():
    def script(request, rng):
        return "x" * (1 if request.uid == "task1" else 40)

    async def main() -> list[str]:
        async with await AgentLoopManager.create(
            rollout=rollout(), model=MODEL, parts=parts(script, latency_s=0.02)
        ) as made:
            return [item.uid async for item in made.stream(tasks(3)) if isinstance(item, Trajectory)]

    assert sorted(asyncio.run(main())) == ["task0", "task1", "task2"]


def test_a_stream_left_early_stops_its_sessions():
    with manager(latency_s=0.05) as made:
        for _ in made.stream_blocking(tasks(50)):
            break
        assert len(made.generate_sequences_blocking([task("after")]).groups) == 1


def test_a_slow_reader_holds_sessions_back_and_loses_nothing():
    with manager() as made:
        seen = 0
        for _ in made.stream_blocking(tasks(600)):
            if seen == 0:
                time.sleep(0.2)
            seen += 1
    assert seen == 600


def test_a_call_nobody_awaited_cannot_pass_unnoticed():
    made = manager()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.generate_sequences(tasks(1))  # type: ignore[unused-coroutine]
        gc.collect()
    with pytest.raises(MisuseError, match="without await"):
        made.close_blocking()


@pytest.mark.parametrize("name", ["stream", "stream_blocking"])
def test_a_stream_nobody_iterates_cannot_pass_unnoticed(name):
    made = manager()
    getattr(made, name)(tasks(1))
    with pytest.raises(MisuseError, match=f"{name} was called once and never iterated"):
        made.close_blocking()


def hanging(made: AgentLoopManager) -> bool:
    """Whether a request is with the engine."""
    return any(state.in_flight for state in made._service.router.snapshot())


def test_cancelling_the_caller_cancels_the_work():
    async def main() -> None:
        async with await AgentLoopManager.create(rollout=rollout(), model=MODEL, parts=parts(hang_rate=1.0)) as made:
            call = asyncio.ensure_future(made.generate_sequences(tasks(3)))
            while not hanging(made):  # noqa: ASYNC110  it is the engine that knows
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_manager_that_cannot_start_is_never_reached_and_leaves_no_thread():
    before = threading.active_count()
    config = rollout(tools=("no.such.module:tool",))
    with pytest.raises(ConfigError, match=r"no\.such"):
        AgentLoopManager.create_blocking(rollout=config, model=MODEL, parts=parts())
    assert threading.active_count() == before


def test_closing_twice_is_fine_and_calls_after_it_are_refused():
    made = manager()
    made.close_blocking()
    made.close_blocking()
    with pytest.raises(MisuseError, match="closed"):
        made.generate_sequences_blocking(tasks(1))


@pytest.mark.parametrize("colour", ["awaited", "blocking"])
def test_an_error_of_closing_is_logged_and_does_not_replace_the_runs_own(caplog, colour):
    lent = parts()
    (own,) = lent.engines
    closed = own.close

    async def break_down() -> None:
        await closed()
        raise EngineFailure("did not end")

    own.close = break_down

    async def main() -> None:
        async with await AgentLoopManager.create(rollout=rollout(), model=MODEL, parts=lent):
            raise LookupError("the cause")

    with pytest.raises(LookupError, match="the cause"):
        if colour == "awaited":
            asyncio.run(main())
        with AgentLoopManager.create_blocking(rollout=rollout(), model=MODEL, parts=lent):
            raise LookupError("the cause")
    assert "the rollout did not close in order: EngineFailure: " in caplog.text and "did not end" in caplog.text


def test_closing_ends_sessions_that_hang():
    made = manager(hang_rate=1.0)
    running = ThreadPoolExecutor(1).submit(made.generate_sequences_blocking, tasks(2))
    while not hanging(made):
        time.sleep(0.01)
    made.close_blocking()
    assert running.exception() is not None


def test_validation_samples_as_val_kwargs_say():
    seen = set()

    def script(request, rng):
        seen.add((request.sampling.temperature, request.sample))
        return FINAL

    with manager(rollout(n=2), script) as made:
        made.generate_sequences_blocking([task()])
        assert seen == {(1.0, 0), (1.0, 1)}
        seen.clear()
        made.generate_sequences_blocking([task()], kind=RolloutKind.VALIDATION)
        assert seen == {(0.0, 0)}


def test_rewards_arrive_with_the_batch_and_a_wrong_answer_is_not_a_failure():
    reward = RewardConfig(functions={"match": RewardFunctionConfig(path="exact_match")}, num_workers=0)
    with manager(script=say("3"), reward=reward) as made:
        right, wrong = (
            made.generate_sequences_blocking([task(uid, ground_truth=truth)]).trajectories[0]
            for uid, truth in (("right", "3"), ("wrong", "4"))
        )
    assert right.reward.value == 1.0
    assert wrong.reward.value == 0.0
    assert wrong.outcome.status is Status.COMPLETED


def test_tasks_with_equal_uids_are_refused():
    with manager() as made, pytest.raises(MisuseError, match="share a uid"):
        made.generate_sequences_blocking([task("same"), task("same")])


def test_a_wait_that_takes_too_long_is_reported_by_name():
    reports = []
    config = rollout(limits=LimitsConfig(stall_report_s=0.05, session_timeout_s=0.3), failures=FORGIVING)
    stuck = RolloutParts(engines=[engine(hang_rate=1.0)], renderer=renderer(), on_stall=reports.append)
    with AgentLoopManager.create_blocking(rollout=config, model=MODEL, parts=stuck) as made:
        made.generate_sequences_blocking([task("the-stuck-one")])
    wait = reports[0].waits[0]
    assert (wait.uid, wait.stage, wait.server) == ("the-stuck-one", "generate", "scripted-0")
    assert "the-stuck-one/0" in reports[0].text()


async def slow_score(response):
    await asyncio.sleep(0.5)
    return 1.0


def test_a_wait_for_a_score_that_takes_too_long_is_reported_by_name():
    reports = []
    config = rollout(limits=LimitsConfig(stall_report_s=0.05))
    reward = RewardConfig(functions={"slow": RewardFunctionConfig(path=f"{__name__}:slow_score")}, num_workers=0)
    slow = RolloutParts(engines=[engine(say(FINAL))], renderer=renderer(), on_stall=reports.append)
    with AgentLoopManager.create_blocking(rollout=config, model=MODEL, reward=reward, parts=slow) as made:
        made.generate_sequences_blocking([task("unscored")])
    wait = reports[0].waits[0]
    assert (wait.uid, wait.stage, wait.server) == ("unscored", "score", "the scorer")


def test_every_attempt_is_in_the_journal_and_the_last_one_counts(tmp_path):
    failing = iter([True, False])

    def script(request, rng):
        if next(failing):
            raise EngineFailure("once")
        return FINAL

    config = rollout(failures=FailureConfig(request_retries=0, session_retries=1))
    with Journal.open(tmp_path, max_mb=10) as journal:
        parts = RolloutParts(engines=[engine(script)], renderer=renderer(), journal=journal)
        with AgentLoopManager.create_blocking(rollout=config, model=MODEL, parts=parts) as made:
            made.generate_sequences_blocking([task()])
    with JournalReader.open(tmp_path) as reader:
        assert reader.finished() == {("one", 0)}
        assert reader.counts().superseded == 1
        entry = reader.trajectory("one", 0)
    assert entry.trajectory.messages[-1]["content"] == FINAL


def test_how_turns_are_rendered_is_in_the_journal(tmp_path):
    with Journal.open(tmp_path, max_mb=10) as journal:
        parts = RolloutParts(engines=[engine()], renderer=renderer(), journal=journal)
        AgentLoopManager.create_blocking(rollout=rollout(), model=MODEL, parts=parts).close_blocking()
    with JournalReader.open(tmp_path) as reader:
        (event,) = reader.events(kind="rendering")
    assert "agree at" in event.fields["parity"]


class Patient(AgentLoopBase):
    """Ends at once for the first task, and never for the others."""

    async def run(self, session: Session) -> None:
        await session.generate()
        if session.task.uid != "task0":
            await asyncio.sleep(600)


def wait_until_idle(made: AgentLoopManager) -> None:
    deadline = time.monotonic() + 5
    while made._service._running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not made._service._running


@pytest.mark.parametrize("colour", ["awaited", "blocking"])
def test_a_stream_that_is_closed_early_cancels_what_it_started(colour):
    with manager(rollout(default_agent_loop=f"{__name__}:Patient")) as made:

        async def first() -> None:
            stream = made.stream(tasks(20))
            async for _ in stream:
                break
            await stream.aclose()

        if colour == "awaited":
            asyncio.run(first())
        else:
            stream = made.stream_blocking(tasks(20))
            next(stream)
            stream.close()
        wait_until_idle(made)


def test_an_interrupt_while_waiting_cancels_the_work():
    class Enough(Exception):
        pass

    def ring(*_: object) -> None:
        raise Enough

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with manager(hang_rate=1.0) as made:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Enough):
                made.generate_sequences_blocking(tasks(3))
            wait_until_idle(made)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_is_cancelled_when_the_thread_stops_cleans_up_first():
    cleaned: list[str] = []

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            cleaned.append("up")

    async def main() -> None:
        thread = LoopThread("test")
        work = asyncio.ensure_future(thread.run(slow_to_end()))
        await asyncio.sleep(0.02)
        work.cancel()
        await asyncio.wait({work})
        thread.stop(10)

    asyncio.run(main())
    assert cleaned == ["up"]
