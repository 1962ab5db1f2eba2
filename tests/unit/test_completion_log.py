import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import rollouts
from tests.chatter import STOPS, chatting, speaking
from tests.letters import ask, go_on
from tests.virtual_time import run
from treadle.engine.protocol import WeightUpdate
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import EngineFailure, MisuseError, RunError
from treadle.journal import Journal, JournalReader
from treadle.rollout.completion_log import CompletionLog, prompt_digest
from treadle.rollout.protocol import Job
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import Completion, RecordedCompletion, Request, SamplingParams, StopReason, Trajectory

INTERVAL_S = 5.0


class Engine:
    """Answers with the length of the request, after a while; remembers what it was asked."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.asked: list[Request] = []
        self.latency_s = latency_s

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        await asyncio.sleep(self.latency_s)
        return answer(len(request.ids))


def answer(*ids: int, stop: StopReason = StopReason.STOP) -> Completion:
    return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), stop, replica="engine")


def part_of(request: Request, number: int, completion: Completion) -> RecordedCompletion:
    return RecordedCompletion(
        request.uid, request.sample, number, len(request.ids), prompt_digest(request.ids), completion
    )


@contextmanager
def opened(run_dir: Path) -> Iterator[Journal]:
    with Journal.open(run_dir, max_mb=16) as journal:
        yield journal


def in_journal(run_dir: Path, main: Callable[[Journal], Coroutine[Any, Any, None]]) -> None:
    """Run `main` in virtual time, with a journal of its own."""
    with opened(run_dir) as journal:
        run(main(journal))


def kept(journal: Journal, uid: str = "task") -> list[RecordedCompletion]:
    journal.flush_blocking()
    with JournalReader.open(journal.run_dir) as reader:
        return [entry.part for entry in reader.parts(uid)]


def counted(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> list[str]:
    """The calls that reach the journal."""
    calls: list[str] = []
    for name in ("add_parts", "drop_parts"):
        real = getattr(journal, name)
        monkeypatch.setattr(journal, name, lambda *given, n=name, r=real: (calls.append(n), r(*given))[1])
    return calls


def test_without_a_journal_requests_are_passed_on() -> None:
    async def main() -> None:
        engine = Engine()
        completion_log = CompletionLog(engine, None)
        assert await completion_log.generate(ask("hello")) == answer(5)
        completion_log.forget("task/0")
        await completion_log.flush()
        completion_log.close()
        assert len(engine.asked) == 1

    asyncio.run(main())


def test_a_session_shorter_than_the_interval_never_touches_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(0.9 * INTERVAL_S), journal)
        for sample in range(3):
            await completion_log.generate(ask(sample=sample))
            await asyncio.sleep(0.9 * INTERVAL_S)
            completion_log.forget(f"task/{sample}")
        await asyncio.sleep(10 * INTERVAL_S)
        completion_log.close()

    with opened(tmp_path) as journal:
        calls = counted(monkeypatch, journal)
        run(main(journal))
        assert calls == []


def test_the_parts_of_an_open_session_are_written_when_they_are_old_enough(tmp_path: Path) -> None:
    first, second = ask("a"), ask("ab")

    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(), journal)
        await completion_log.generate(first)
        await asyncio.sleep(0.6 * INTERVAL_S)
        await completion_log.generate(second)
        await completion_log.generate(ask("x", sample=1))
        assert kept(journal) == []
        await asyncio.sleep(0.5 * INTERVAL_S)
        assert kept(journal) == [part_of(first, 0, answer(1)), part_of(second, 1, answer(2))]
        await asyncio.sleep(INTERVAL_S)
        assert [(part.sample, part.number) for part in kept(journal)] == [(0, 0), (0, 1), (1, 0)]
        completion_log.forget("task/0")
        assert [(part.sample, part.number) for part in kept(journal)] == [(1, 0)]
        await completion_log.generate(ask("y"))
        completion_log.close()
        assert [(part.sample, part.number) for part in kept(journal)] == [(0, 0), (1, 0)]

    in_journal(tmp_path, main)


def test_nothing_runs_while_nothing_is_unwritten(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(), journal)
        await completion_log.generate(ask())
        await asyncio.sleep(2 * INTERVAL_S)
        assert completion_log._timer is None and not completion_log._unwritten

    in_journal(tmp_path, main)


def test_a_flush_writes_at_once(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(), journal)
        for sample in range(600):
            await completion_log.generate(ask(sample=sample))
        await completion_log.flush()
        with JournalReader.open(tmp_path) as reader:
            assert len(reader.parts("task")) == 600
        completion_log.close()

    in_journal(tmp_path, main)


def test_recovered_parts_are_answered_without_the_engine_until_they_end(tmp_path: Path) -> None:
    first = ask("hello")
    half, rest = answer(1, 2, stop=StopReason.ABORT), answer(3)
    second = go_on(first, half.ids)

    async def main(journal: Journal) -> None:
        engine = Engine()
        completion_log = CompletionLog(engine, journal)
        journal.add_parts(parts := [part_of(first, 0, half), part_of(second, 1, rest)])
        completion_log.recover(parts)
        assert await completion_log.generate(first) == half
        assert await completion_log.generate(second) == rest
        assert (engine.asked, completion_log.num_recovered) == ([], 3)
        third = ask("hello again")
        await completion_log.generate(third)
        assert engine.asked == [third]
        await completion_log.flush()
        assert kept(journal) == [*parts, part_of(third, 2, answer(11))]
        completion_log.forget("task/0")
        assert kept(journal) == []
        completion_log.close()

    in_journal(tmp_path, main)


def test_recovered_parts_leave_the_journal_with_their_session(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(), journal)
        journal.add_parts(parts := [part_of(ask(), 0, answer(1))])
        completion_log.recover(parts)
        await completion_log.generate(ask())
        assert kept(journal) == parts
        completion_log.forget("task/0")
        assert kept(journal) == []

    in_journal(tmp_path, main)


@pytest.mark.parametrize(
    "request_",
    [ask("hellu"), ask("hello "), ask("hello", max_tokens=1)],
    ids=["other ids", "more ids", "no room for the answer"],
)
def test_from_the_first_difference_on_the_engine_is_asked(tmp_path: Path, request_: Request) -> None:
    first, second = ask("hello"), ask("hello, and so on")
    parts = [part_of(first, 0, answer(1, 2)), part_of(second, 1, answer(3))]

    async def main(journal: Journal) -> None:
        engine = Engine()
        completion_log = CompletionLog(engine, journal)
        completion_log.recover(parts)
        await completion_log.generate(request_)
        await completion_log.generate(second)
        assert engine.asked == [request_, second]
        assert completion_log.num_recovered == 0
        await completion_log.flush()
        assert [part.completion for part in kept(journal)] == [answer(len(request_.ids)), answer(len(second.ids))]
        completion_log.close()

    in_journal(tmp_path, main)


def test_parts_of_one_session_are_no_answer_for_another(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        engine = Engine()
        completion_log = CompletionLog(engine, journal)
        completion_log.recover([part_of(ask(), 0, answer(9))])
        assert await completion_log.generate(ask(sample=1)) == answer(5)
        assert await completion_log.generate(ask(uid="other")) == answer(5)
        assert await completion_log.generate(ask()) == answer(9)
        assert len(engine.asked) == 2
        completion_log.close()

    in_journal(tmp_path, main)


def test_forks_that_ask_side_by_side_are_told_apart_by_the_order_they_asked_in(tmp_path: Path) -> None:
    slow, fast = ask("slow one"), ask("fast")

    class Uneven(Engine):
        async def generate(self, request: Request) -> Completion:
            await asyncio.sleep(100.0 if request is slow else 1.0)
            return await super().generate(request)

    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Uneven(), journal)
        asking = asyncio.gather(completion_log.generate(slow), completion_log.generate(fast))
        await asyncio.sleep(2 * INTERVAL_S)
        parts = kept(journal)
        assert parts == [part_of(fast, 1, answer(4))]
        asking.cancel()
        completion_log.close()

        engine = Engine()
        after = CompletionLog(engine, journal)
        after.recover(parts)
        await asyncio.gather(after.generate(slow), after.generate(fast))
        assert engine.asked == [slow]
        after.close()

    in_journal(tmp_path, main)


def test_forks_that_come_in_another_order_get_their_own_answers(tmp_path: Path) -> None:
    first, second = replace(ask("draft"), row=1), replace(ask("draft"), row=2)

    async def main(journal: Journal) -> None:
        engine = Engine()
        completion_log = CompletionLog(engine, journal)
        completion_log.recover(
            [replace(part_of(first, 0, answer(1)), row=1), replace(part_of(second, 0, answer(2)), row=2)]
        )
        assert (await completion_log.generate(second)).ids == (2,)
        assert (await completion_log.generate(first)).ids == (1,)
        assert not engine.asked
        completion_log.close()

    in_journal(tmp_path, main)


def test_rows_that_come_in_another_order_go_on_from_the_row_that_asked_the_same(tmp_path: Path) -> None:
    one, other = ask("one"), replace(ask("other"), row=1)
    later = replace(go_on(other, (2,)), row=0)

    async def main(journal: Journal) -> None:
        engine = Engine()
        completion_log = CompletionLog(engine, journal)
        parts = [part_of(one, 0, answer(1)), part_of(other, 0, answer(2)), part_of(later, 1, answer(3))]
        completion_log.recover([parts[0], replace(parts[1], row=1), replace(parts[2], row=1)])
        assert (await completion_log.generate(replace(other, row=0))).ids == (2,)
        assert (await completion_log.generate(later)).ids == (3,)
        assert (await completion_log.generate(replace(one, row=1))).ids == (1,)
        assert not engine.asked
        completion_log.close()

    in_journal(tmp_path, main)


def test_a_session_that_is_forgotten_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(1.0), journal)
        waiting = asyncio.ensure_future(completion_log.generate(ask()))
        await asyncio.sleep(0.5)
        completion_log.forget("task/0")
        await waiting
        await completion_log.flush()
        assert kept(journal) == []
        assert not completion_log._open and not completion_log._unwritten

    in_journal(tmp_path, main)


def test_memory_is_what_open_sessions_hold(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(), journal)
        completion_log.recover([part_of(ask(sample=7), 0, answer(1))])
        for sample in range(50):
            await completion_log.generate(ask(sample=sample))
        await asyncio.sleep(2 * INTERVAL_S)
        assert all(not memory.unwritten for memory in completion_log._open.values())
        for sample in range(50):
            completion_log.forget(f"task/{sample}")
            completion_log.forget(f"task/{sample}")
        assert not completion_log._open and not completion_log._unwritten
        assert kept(journal) == []

    in_journal(tmp_path, main)


def test_an_engine_that_fails_leaves_no_part(tmp_path: Path) -> None:
    class Broken(Engine):
        async def generate(self, request: Request) -> Completion:
            if not self.asked:
                self.asked.append(request)
                raise EngineFailure("gone")
            return await super().generate(request)

    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Broken(), journal)
        with pytest.raises(EngineFailure):
            await completion_log.generate(ask())
        await completion_log.generate(ask())
        await completion_log.flush()
        assert [part.number for part in kept(journal)] == [1]
        completion_log.close()

    in_journal(tmp_path, main)


def test_while_the_journal_is_full_parts_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(), journal)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "full", True)
            await completion_log.generate(ask())
            await asyncio.sleep(3 * INTERVAL_S)
            assert kept(journal) == []
        await asyncio.sleep(INTERVAL_S)
        assert len(kept(journal)) == 1
        completion_log.close()

    in_journal(tmp_path, main)


def test_a_dead_journal_is_heard_of_from_those_who_watch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(), journal)
        monkeypatch.setattr(journal._writer, "error", RunError("the disk is full"))
        await completion_log.generate(ask())
        await asyncio.sleep(3 * INTERVAL_S)
        with pytest.raises(RunError, match="the disk is full"):
            await completion_log.flush()
        completion_log.close()
        monkeypatch.undo()

    with caplog.at_level(logging.ERROR), opened(tmp_path) as journal:
        run(main(journal))
    assert not caplog.records


def test_a_session_that_began_cannot_be_recovered(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        completion_log = CompletionLog(Engine(), journal)
        await completion_log.generate(ask())
        with pytest.raises(AssertionError, match="task/0 has begun"):
            completion_log.recover([part_of(ask(), 0, answer(1))])
        completion_log.close()

    in_journal(tmp_path, main)


def test_a_closed_journal_that_lacks_parts_is_misuse(tmp_path: Path) -> None:
    async def main() -> None:
        with opened(tmp_path) as journal:
            completion_log = CompletionLog(Engine(), journal)
            await completion_log.generate(ask())
        with pytest.raises(MisuseError, match="is closed"):
            completion_log.close()

    run(main())


# Whatever the moment of death: what was kept, continued, is what would have been.


class Life:
    """Parts of one process: engine, completion log and worker."""

    def __init__(self, engine: ScriptedEngine, completion_log: CompletionLog, worker: AgentLoopWorker) -> None:
        self.engine = engine
        self.completion_log = completion_log
        self.worker = worker

    @classmethod
    async def begin(cls, journal: Journal | None, interval_s: float) -> "Life":
        made = rollouts.renderer()
        engine = rollouts.engine(speaking(12), latency_s=4.0, latency_tail=3.0)
        completion_log = CompletionLog(engine, journal, interval_s=interval_s)
        rollout = chatting(400, turns=4, pause_s=0.5)
        model: Any = None
        worker = await AgentLoopWorker.create(rollout=rollout, model=model, engine=completion_log, renderer=made)
        return cls(engine, completion_log, worker)

    async def sample(self, sample: int) -> Trajectory:
        sampling = SamplingParams(400, stop_token_ids=STOPS, seed=5)
        result = await self.worker.run(Job(rollouts.task("chat"), sample, sampling))
        assert isinstance(result, Trajectory)
        return result

    async def interrupt_at(self, moments: list[float]) -> None:
        """Weights come in at these moments: everything is aborted and goes on."""
        clock = asyncio.get_running_loop().time
        for version, moment in enumerate(sorted(moments), start=1):
            await asyncio.sleep(max(0.0, moment - clock()))
            await self.engine.pause()
            await self.engine.update_weights(WeightUpdate(version, "", {}))
            await self.engine.resume()


def tokens(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    return [(row.prompt_ids, row.ids, row.mask, row.logprobs) for row in trajectory.rows]


def spoken_parts(run_dir: Path) -> tuple[RecordedCompletion, ...]:
    with JournalReader.open(run_dir) as reader:
        return tuple(entry.part for entry in reader.parts("chat"))


@cache
def uninterrupted(sample: int) -> list[tuple[Any, ...]]:
    async def main() -> Trajectory:
        life = await Life.begin(None, 1.0)
        return await life.sample(sample)

    return tokens(run(main()))


async def killed(run_dir: Path, dies_at: float, updates: list[float], interval_s: float) -> None:
    with opened(run_dir) as journal:
        life = await Life.begin(journal, interval_s)
        life.completion_log.recover(spoken_parts(run_dir))
        work: list[Coroutine[Any, Any, Any]] = [life.sample(0), life.sample(1), life.interrupt_at(updates)]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*work), dies_at)


async def finished(run_dir: Path, interval_s: float) -> tuple[list[Trajectory], int]:
    with opened(run_dir) as journal:
        life = await Life.begin(journal, interval_s)
        life.completion_log.recover(spoken_parts(run_dir))
        done = [await life.sample(0), await life.sample(1)]
        return done, life.completion_log.num_recovered


MOMENTS = st.floats(0.0, 40.0)


@settings(max_examples=8, deadline=None)
@given(
    deaths=st.lists(MOMENTS, min_size=1, max_size=2),
    updates=st.lists(MOMENTS, max_size=3),
    interval_s=st.sampled_from([0.5, 5.0]),
)
def test_whenever_a_run_dies_what_is_recovered_and_continued_equals_the_uninterrupted(
    deaths: list[float], updates: list[float], interval_s: float
) -> None:
    with TemporaryDirectory() as name:
        run_dir = Path(name)
        for dies_at in deaths:
            run(killed(run_dir, dies_at, updates, interval_s))
        recorded = sum(len(part.completion.ids) for part in spoken_parts(run_dir))
        done, num_recovered = run(finished(run_dir, interval_s))
        assert [tokens(trajectory) for trajectory in done] == [uninterrupted(0), uninterrupted(1)]
        assert num_recovered == recorded


def test_tokens_that_are_recovered_keep_the_version_that_sampled_them(tmp_path: Path) -> None:
    run(killed(tmp_path, 30.0, [3.0, 9.0, 14.0], 0.5))
    parts = spoken_parts(tmp_path)
    assert any(part.completion.stop is StopReason.ABORT for part in parts)
    done, num_recovered = run(finished(tmp_path, 0.5))
    for trajectory in done:
        (row,) = trajectory.rows
        sampled = [version for version, mask in zip(row.versions, row.mask, strict=True) if mask]
        kept = [part.completion.versions for part in parts if part.sample == trajectory.sample]
        recovered = [version for versions in kept for version in versions]
        assert len(set(recovered)) > 1
        assert sampled == recovered + [0] * (len(sampled) - len(recovered))
    assert num_recovered == sum(len(part.completion.ids) for part in parts)


def test_a_tool_that_answers_otherwise_costs_only_what_came_after_it(tmp_path: Path) -> None:
    run(killed(tmp_path, 30.0, [], 0.5))
    parts = spoken_parts(tmp_path)
    spoilt = [replace(part, digest=part.digest + (part.number == 1)) for part in parts]
    assert any(part.number > 1 for part in parts)
    expected = uninterrupted(0)

    async def main() -> int:
        with opened(tmp_path) as journal:
            life = await Life.begin(journal, 0.5)
            life.completion_log.recover(spoilt)
            assert tokens(await life.sample(0)) == expected
            return life.completion_log.num_recovered

    assert run(main()) == len(parts[0].completion.ids)
