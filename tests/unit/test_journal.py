import asyncio
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.virtual_time import run as run_in_virtual_time
from treadle.errors import Boundary, DeadlineError, EngineFailure, MisuseError, RewardFailure, RunError
from treadle.journal import Filter, Journal, JournalReader, RunStatus, read_starts
from treadle.journal.run_directory import RunFile, RunLock
from treadle.journal.store import JournalStore
from treadle.journal.writer import JournalWriter
from treadle.types import Outcome, Row, Score, Status, StopReason, Trajectory

DONE = Outcome.ended(StopReason.STOP)
CUT = Outcome.ended(StopReason.LENGTH)
ABORTED = Outcome.ended(StopReason.ABORT)
DEAD = Outcome.failed(EngineFailure("replica-0 does not answer"))


def make(
    uid: str = "task", sample: int = 0, outcome: Outcome = DONE, reward: float | None = None, source: str = ""
) -> Trajectory:
    row = Row((1, 2, 3), (4, 5), (1, 0), (-0.5, 0.0), (0, -1))
    score = None if reward is None else Score(reward, {"exact": reward})
    return Trajectory(uid, sample, (row,), outcome, score, ({"role": "user", "content": uid},), data_source=source)


def written(run_dir: Path, *trajectories: Trajectory) -> JournalReader:
    with Journal.open(run_dir, max_mb=16) as journal:
        for trajectory in trajectories:
            journal.add(trajectory)
    return JournalReader.open(run_dir)


def names(reader: JournalReader, wanted: Filter) -> list[str]:
    found = [f"{headline.uid}/{headline.sample}" for headline in reader.headlines(wanted)]
    assert found == [f"{e.trajectory.uid}/{e.trajectory.sample}" for e in reader.trajectories(wanted)]
    return found


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keep the journal from writing, as a stuck disk would."""
    other = sqlite3.connect(run_dir / "journal.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def assemble(run_dir: Path, *, max_pending: int = 4096, max_pages: int | None = None) -> Journal:
    """A journal from its parts, with a queue or a disk of a chosen size."""
    run_dir.mkdir(exist_ok=True)
    store = JournalStore.open(run_dir, 16 << 20)
    if max_pages is not None:
        store._connection.execute(f"PRAGMA max_page_count = {max_pages}")
    writer = JournalWriter(store, run_dir / "journal.sqlite", max_pending)
    writer.start()
    return Journal(run_dir, RunLock.take(run_dir, 0.0), RunFile.open(run_dir, (), 0.0), writer)


def test_a_run_directory_holds_config_versions_command_and_status(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    journal = Journal.open(
        run_dir, max_mb=16, config_yaml="rollout: {n: 2}  # default\n", command=("treadle", "rollout")
    )
    assert json.loads((run_dir / "run.json").read_text())["status"] == "running"
    journal.close_blocking()
    assert (run_dir / "config.yaml").read_text() == "rollout: {n: 2}  # default\n"
    (start,) = read_starts(run_dir)
    assert start.command == ("treadle", "rollout")
    assert start.status is RunStatus.FINISHED
    assert start.ended_at is not None and start.ended_at >= start.started_at
    assert {"python", "treadle"} <= start.versions.keys()
    assert not (run_dir / "journal.sqlite-wal").exists()


def test_opening_again_continues_and_keeps_an_earlier_config_that_differs(tmp_path: Path) -> None:
    for text in ("a: 1\n", "a: 1\n", "a: 2\n"):
        with Journal.open(tmp_path, max_mb=16, config_yaml=text) as journal:
            journal.add(make(text))
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"
    assert (tmp_path / "config.2.yaml").read_text() == "a: 1\n"
    assert not (tmp_path / "config.1.yaml").exists()
    assert len(read_starts(tmp_path)) == 3
    with JournalReader.open(tmp_path) as reader:
        assert [headline.id for headline in reader.headlines(Filter(superseded=True))] == [1, 2, 3]


def test_the_status_says_how_the_run_ended(tmp_path: Path) -> None:
    for number, error in enumerate((KeyboardInterrupt(), asyncio.CancelledError(), ZeroDivisionError())):
        with pytest.raises(type(error)), Journal.open(tmp_path, max_mb=16):
            raise error
        status = RunStatus.FAILED if number == 2 else RunStatus.INTERRUPTED
        assert read_starts(tmp_path)[number].status is status


def test_a_start_that_never_said_it_ended_is_marked_as_crashed(tmp_path: Path) -> None:
    RunFile.open(tmp_path, (), 0.0)
    with Journal.open(tmp_path, max_mb=16):
        assert [start.status for start in read_starts(tmp_path)] == [RunStatus.CRASHED, RunStatus.RUNNING]


def test_a_second_run_in_the_directory_is_refused_with_pid_and_host(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=16), pytest.raises(RunError) as refused:
        Journal.open(tmp_path, max_mb=16)
    assert f"pid {os.getpid()} on {socket.gethostname()}" in str(refused.value)
    assert "logging.run_dir" in str(refused.value)
    Journal.open(tmp_path, max_mb=16).close_blocking()


def test_a_lock_file_left_by_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text('{"pid": 4194304, "host": "elsewhere", "since": 0.0}')
    Journal.open(tmp_path, max_mb=16).close_blocking()


def test_a_failed_open_leaves_the_directory_free(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        Journal.open(tmp_path, max_mb=16)
    (tmp_path / "run.json").unlink()
    Journal.open(tmp_path, max_mb=16).close_blocking()


@pytest.mark.parametrize("place", ["/proc/treadle", "{tmp}/file/run"])
def test_a_directory_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to logging\.run_dir .*(run|treadle): "):
        Journal.open(Path(place.format(tmp=tmp_path)), max_mb=16)


def test_a_journal_of_a_newer_version_is_refused_by_writer_and_reader(tmp_path: Path) -> None:
    Journal.open(tmp_path, max_mb=16).close_blocking()
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    for open_again in (lambda: Journal.open(tmp_path, max_mb=16), lambda: JournalReader.open(tmp_path)):
        with pytest.raises(RunError, match=r"newer treadle \(journal version 7, this one knows 3\)"):
            open_again()


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(RunError, match="not a database"):
        Journal.open(tmp_path, max_mb=16)
    with pytest.raises(RunError, match="not a database"):
        JournalReader.open(tmp_path)
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (a)")
    connection.close()
    with pytest.raises(RunError, match="not a treadle journal"):
        Journal.open(tmp_path, max_mb=16)


def test_a_directory_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is .* a run directory"):
        JournalReader.open(tmp_path)


def test_a_later_attempt_supersedes_the_earlier_one_and_both_can_be_seen(tmp_path: Path) -> None:
    with written(tmp_path, make(outcome=DEAD), make(sample=1), replace(make(), attempt=1)) as reader:
        assert names(reader, Filter()) == ["task/1", "task/0"]
        assert names(reader, Filter(superseded=True)) == ["task/0", "task/1", "task/0"]
        latest, first = reader.trajectory("task", 0), reader.trajectory("task", 0, attempt=0)
        assert latest is not None and latest.trajectory.outcome == DONE
        assert first is not None and first.trajectory.outcome == DEAD
        assert reader.trajectory("task", 2) is None
        assert reader.counts().superseded == 1


def test_failed_and_aborted_trajectories_are_not_finished(tmp_path: Path) -> None:
    trajectories = [
        *(make("retried", 0, DEAD), make("retried", 0, DONE)),
        *(make("lost", 0, DEAD), make("cut", 1, CUT), make("aborted", 0, ABORTED)),
        *(make("redone", 0, DONE), make("redone", 0, DEAD)),
    ]
    with written(tmp_path, *trajectories) as reader:
        assert reader.finished() == {("retried", 0), ("cut", 1)}


def test_a_reader_filters(tmp_path: Path) -> None:
    unscored = Outcome.failed(RewardFailure("no number"))
    trajectories = [
        make("a", 0, DONE, 1.0, "sums"),
        make("a", 1, CUT, 0.0, "sums"),
        make("b", 0, DEAD, None, "words"),
        make("b", 1, unscored, None, "words"),
    ]
    with written(tmp_path, *trajectories) as reader:
        assert names(reader, Filter(uid="a")) == ["a/0", "a/1"]
        assert names(reader, Filter(data_source="words")) == ["b/0", "b/1"]
        assert names(reader, Filter(status=Status.FAILED)) == ["b/0", "b/1"]
        assert names(reader, Filter(reason=StopReason.LENGTH)) == ["a/1"]
        assert names(reader, Filter(boundary=Boundary.REWARD)) == ["b/1"]
        assert names(reader, Filter(min_reward=0.5)) == ["a/0"]
        assert names(reader, Filter(max_reward=0.5)) == ["a/1"]
        assert names(reader, Filter(min_reward=0.0, data_source="words")) == []
        assert [headline.uid for headline in reader.headlines(after=2)] == ["b", "b"]
        counts = reader.counts()
        assert counts.trajectories == 4
        assert counts.by_reason == {StopReason.STOP: 1, StopReason.LENGTH: 1, StopReason.FAILURE: 2}
        assert counts.by_boundary == {Boundary.ENGINE: 1, Boundary.REWARD: 1}
        assert counts.by_source == {"sums": 2, "words": 2}


def test_reading_goes_through_more_than_one_page_and_batch(tmp_path: Path) -> None:
    sent = [make(f"task-{number // 4}", number % 4, reward=float(number)) for number in range(700)]
    with written(tmp_path, *sent) as reader:
        assert [entry.trajectory for entry in reader.trajectories()] == sent
        headlines = list(reader.headlines())
        assert [headline.id for headline in headlines] == list(range(1, 701))
        assert {(h.num_sampled, h.num_turns, h.prompt_tokens, h.response_tokens) for h in headlines} == {(1, 0, 3, 2)}


def test_the_prompt_of_a_group_is_stored_once(tmp_path: Path) -> None:
    written(tmp_path, *(make("a", sample) for sample in range(8)), make("b")).close()
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    assert connection.execute("SELECT uid FROM prompts").fetchall() == [("a",), ("b",)]
    connection.close()


def test_events_and_metrics_are_read_from_where_one_left_off(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.add_event("stall", uid="a", age_s=61.5)
        journal.add_event("retry", kind="engine", waits=[1, 2])
        journal.add_metrics(1, {"loss": 0.5})
        journal.add_metrics(2, {"loss": float("nan")})
    with JournalReader.open(tmp_path) as reader:
        first, second = reader.events()
        assert (first.kind, dict(first.fields)) == ("stall", {"uid": "a", "age_s": 61.5})
        assert reader.events(after=first.id) == (second,)
        assert reader.events(kind="retry") == (second,)
        assert reader.events(limit=1) == (first,)
        assert [(found.step, found.values["loss"] == 0.5) for found in reader.metrics()] == [(1, True), (2, False)]
        assert len(reader.metrics(after=1)) == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == 0.5


def test_a_metrics_line_that_a_crash_cut_short_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n{"step":2' + "x" * 70_000)
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.add_metrics(2, {})
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_a_reader_sees_what_was_flushed_while_the_run_goes_on(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=16) as journal, JournalReader.open(tmp_path) as reader:
        for number in range(3):
            journal.add(make(f"task-{number}"))
            journal.flush_blocking()
            assert len(list(reader.trajectories())) == number + 1


def test_a_reader_held_mid_way_does_not_keep_a_snapshot(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=16) as journal, JournalReader.open(tmp_path) as reader:
        for number in range(100):
            journal.add(make(f"task-{number}"))
        journal.flush_blocking()
        entries = reader.trajectories()
        next(entries)
        journal.add(make("later"))
        journal.flush_blocking()
        assert len(list(reader.headlines())) == 101
        assert len(list(entries)) == 100


def test_what_is_added_reaches_the_disk_soon_without_a_flush(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=16) as journal, JournalReader.open(tmp_path) as reader:
        journal.add(make())
        deadline = time.monotonic() + 30.0
        while not reader.finished():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_adding_after_the_end_is_an_error(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, max_mb=16)
    journal.close_blocking()
    journal.close_blocking()
    for call in (lambda: journal.add(make()), lambda: journal.add_event("x"), journal.flush_blocking):
        with pytest.raises(MisuseError, match="is closed"):
            call()


def test_a_full_disk_is_an_error_that_says_what_was_lost_and_what_was_not(tmp_path: Path) -> None:
    journal = assemble(tmp_path, max_pages=20)
    journal.add(make("safe"))
    journal.flush_blocking()
    large = replace(make("lost"), messages=({"role": "user", "content": "x" * 1_000_000},))
    journal.add(large)
    journal.add_event("lost, too")
    with pytest.raises(
        RunError, match=r"no space left on the disk.*Lost: 1 × Trajectory, 1 × JournalEvent.*1 records before"
    ):
        journal.flush_blocking()
    with pytest.raises(RunError, match="no space left on the disk"):
        journal.add(make("refused"))
    with pytest.raises(RunError, match="no space left on the disk"):
        journal.close_blocking()
    assert read_starts(tmp_path)[-1].status is RunStatus.FAILED
    with JournalReader.open(tmp_path) as reader:
        assert [headline.uid for headline in reader.headlines()] == ["safe"]
    Journal.open(tmp_path, max_mb=16).close_blocking()


def test_whoever_watches_hears_of_a_failure_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        journal = assemble(tmp_path, max_pages=20)
        journal.add(replace(make(), messages=({"role": "user", "content": "x" * 1_000_000},)))
        with pytest.raises(RunError, match="no space left on the disk"):
            async with asyncio.timeout(5):
                await journal.watch()
        with pytest.raises(RunError, match="no space left on the disk"):
            await journal.close()

    asyncio.run(main())


def test_whoever_watches_is_done_when_the_journal_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group, Journal.open(tmp_path, max_mb=16) as journal:
            group.create_task(journal.watch())

    asyncio.run(main())


def test_a_record_that_cannot_be_stored_ends_the_journal_loudly(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, max_mb=16)
    journal.add(replace(make(), rows=(replace(make().rows[0], ids=(2**40, 1)),)))
    with pytest.raises(RunError, match="Lost: 1 × Trajectory"):
        journal.flush_blocking()
    with pytest.raises(RunError):
        journal.close_blocking()


def test_a_flush_that_takes_too_long_says_so(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=16) as journal:
        with held(tmp_path):
            journal.add(make())
            with pytest.raises(DeadlineError, match=r"waited 0\.05 s for the journal of .*: a flush"):
                journal.flush_blocking(0.05)
        journal.flush_blocking()


def test_a_full_queue_is_drained_and_nothing_is_lost(tmp_path: Path) -> None:
    async def main() -> int:
        async with assemble(tmp_path, max_pending=8) as journal:
            with held(tmp_path):
                journal.add(make("first"))
                with pytest.raises(DeadlineError):
                    await journal.flush(0.05)
                added = 1
                while not journal.full:
                    journal.add(make("more"))
                    added += 1
                with pytest.raises(DeadlineError, match="room in its queue"):
                    await journal.drain(0.05)
            await journal.drain()
            assert not journal.full
            await journal.drain()
        return added

    added = asyncio.run(main())
    assert added >= 8
    with JournalReader.open(tmp_path) as reader:
        assert len(list(reader.headlines(Filter(superseded=True)))) == added


def test_a_caller_that_never_drains_is_refused_at_last(tmp_path: Path) -> None:
    journal = assemble(tmp_path, max_pending=2)
    with held(tmp_path), pytest.raises(MisuseError, match=r"await journal\.drain\(\)"):
        for _ in range(300):
            journal.add(make())
    journal.close_blocking()


def test_the_awaitable_forms_work_in_virtual_time(tmp_path: Path) -> None:
    async def main() -> float:
        async with Journal.open(tmp_path, max_mb=16) as journal:
            journal.add(make())
            await journal.flush()
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == 0.0


def test_a_fork_cannot_write_and_does_not_hold_the_directory(tmp_path: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from treadle.errors import MisuseError
from treadle.journal import Journal
journal = Journal.open(Path(sys.argv[1]), max_mb=16)
if os.fork() == 0:
    try:
        journal.add_event("x")
    except MisuseError as error:
        os.write(1, str(error).encode())
        os.close(1)
        os.read(0, 1)  # outlive the parent
    os._exit(0)
os._exit(3)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert b"not to a fork" in child.stdout.read()
        assert child.wait(10) == 3
        Journal.open(tmp_path, max_mb=16).close_blocking()


def test_a_journal_nobody_closed_is_written_at_exit(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from treadle.journal import Journal
Journal.open(Path(sys.argv[1]), max_mb=16).add_event("last words")
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=20)
    assert read_starts(tmp_path)[-1].status is RunStatus.INTERRUPTED
    with JournalReader.open(tmp_path) as reader:
        assert [event.kind for event in reader.events()] == ["last words"]


def test_journal_and_plain_progress_need_neither_torch_nor_rich() -> None:
    script = """
import io, sys
import treadle.journal, treadle.observe
with treadle.observe.LiveProgress(treadle.observe.RolloutCounters(), stream=io.StringIO()):
    pass
print({"torch", "ray", "rich"} & sys.modules.keys())
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert found.stdout.strip() == "set()"
