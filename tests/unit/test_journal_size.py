import random
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from treadle.errors import EngineFailure
from treadle.journal import Filter, Journal, JournalReader
from treadle.types import Outcome, Row, StopReason, Trajectory

MB = 1 << 20


def make(uid: str, sample: int, num_tokens: int = 400) -> Trajectory:
    noise = random.Random(f"{uid}/{sample}")
    ids = tuple(noise.randrange(50_000) for _ in range(num_tokens))
    row = Row(tuple(range(50)), ids, (1,) * num_tokens, (-0.5,) * num_tokens, (0,) * num_tokens)
    messages = ({"role": "user", "content": uid}, {"role": "assistant", "content": "y" * num_tokens})
    return Trajectory(uid, sample, (row,), Outcome.ended(StopReason.STOP), messages=messages)


def fill(run_dir: Path, trajectories: Iterator[Trajectory], max_mb: int) -> int:
    """Write in small batches; the largest size the files had on the way."""
    largest = 0
    with Journal.open(run_dir, max_mb=max_mb) as journal:
        for number, trajectory in enumerate(trajectories):
            journal.add(trajectory)
            if number % 50 == 49:
                journal.flush_blocking()
                largest = max(largest, size_of(run_dir))
    return largest


def size_of(run_dir: Path) -> int:
    return (run_dir / "journal.sqlite").stat().st_size


def many(count: int, first: int = 0) -> Iterator[Trajectory]:
    return (make(f"task-{number // 4}", number % 4) for number in range(first, first + count))


def test_the_file_stays_within_its_size_and_the_oldest_bodies_go_first(tmp_path: Path) -> None:
    largest = fill(tmp_path, many(800), max_mb=2)  # about 5 MB of tokens and messages
    assert largest <= 2 * MB
    with JournalReader.open(tmp_path) as reader:
        headlines = list(reader.headlines())
        assert len(headlines) == 800
        kept = [headline.id for headline in headlines if headline.has_body]
        assert kept == list(range(801 - len(kept), 801))
        assert 100 < len(kept) < 400
        assert reader.counts().without_body == 800 - len(kept)
        dropped = reader.events(kind="dropped")
        assert sum(event.fields["count"] for event in dropped) == 800 - len(kept)
        assert dropped[-1].fields["through"] == 800 - len(kept)


def test_a_trajectory_without_its_body_says_so_and_still_counts_as_finished(tmp_path: Path) -> None:
    fill(tmp_path, many(800), max_mb=2)
    with JournalReader.open(tmp_path) as reader:
        first, last = reader.trajectory("task-0", 0), reader.trajectory("task-199", 3)
        assert first is not None and last is not None
        assert not first.headline.has_body
        assert first.trajectory.rows == () and first.trajectory.messages == ()
        assert first.headline.num_sampled == 400
        assert last.trajectory == make("task-199", 3)
        assert ("task-0", 0) in reader.finished()


def test_prompts_go_with_the_last_body_that_needs_them(tmp_path: Path) -> None:
    def epochs() -> Iterator[Trajectory]:
        for _ in range(5):
            yield from many(100)

    fill(tmp_path, epochs(), max_mb=2)
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    needed = "SELECT DISTINCT prompt FROM trajectories WHERE id IN (SELECT trajectory FROM texts)"
    (orphans,) = connection.execute(f"SELECT count(*) FROM prompts WHERE id NOT IN ({needed})").fetchone()
    (missing,) = connection.execute(
        f"SELECT count(*) FROM ({needed}) WHERE prompt NOT IN (SELECT id FROM prompts)"
    ).fetchone()
    connection.close()
    assert (orphans, missing) == (0, 0)
    with JournalReader.open(tmp_path) as reader:
        bodies = [entry for entry in reader.trajectories() if entry.headline.has_body]
        assert len(bodies) == 100
        assert all(e.trajectory == make(e.trajectory.uid, e.trajectory.sample) for e in bodies)


def test_a_late_sample_of_a_task_whose_prompt_was_dropped_is_whole(tmp_path: Path) -> None:
    def late() -> Iterator[Trajectory]:
        yield make("task-late", 0)
        yield from many(800)
        yield make("task-late", 1)

    fill(tmp_path, late(), max_mb=2)
    with JournalReader.open(tmp_path) as reader:
        first, last = reader.trajectory("task-late", 0), reader.trajectory("task-late", 1)
        assert first is not None and not first.headline.has_body
        assert last is not None and last.trajectory == make("task-late", 1)


def test_a_reader_beside_a_writer_that_drops_bodies_sees_whole_trajectories(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, max_mb=1)
    sent = [make(f"task-{number}", 0, num_tokens=2000) for number in range(120)]
    with ThreadPoolExecutor(1) as other, JournalReader.open(tmp_path) as reader:
        filling = other.submit(lambda: [(journal.add(t), journal.flush_blocking()) for t in sent])
        while not filling.done():
            for entry in reader.trajectories():
                assert len(entry.trajectory.rows) == entry.headline.has_body
        filling.result()
    journal.close_blocking()


def test_a_journal_opened_with_a_smaller_size_shrinks(tmp_path: Path) -> None:
    fill(tmp_path, many(400), max_mb=64)
    assert size_of(tmp_path) > 2 * MB
    fill(tmp_path, many(1, first=400), max_mb=1)
    assert size_of(tmp_path) <= 1 * MB
    with JournalReader.open(tmp_path) as reader:
        assert len(list(reader.headlines())) == 401


def test_headlines_are_bounded_too_the_oldest_go_and_it_is_said(tmp_path: Path) -> None:
    outcome = Outcome.failed(EngineFailure("x" * 1000))
    trajectories = (Trajectory(f"task-{number}", 0, (), outcome) for number in range(4000))  # about 5 MB of headlines
    largest = fill(tmp_path, trajectories, max_mb=1)
    assert largest <= 1 * MB
    with JournalReader.open(tmp_path) as reader:
        kept = [headline.uid for headline in reader.headlines()]
        assert kept == [f"task-{number}" for number in range(4000 - len(kept), 4000)] and len(kept) > 100
        dropped = sum(event.fields["count"] for event in reader.events(kind="dropped_headlines"))
        assert dropped == 4000 - len(kept)


def test_events_and_metrics_are_bounded_and_what_a_resume_needs_stays(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=1) as journal:
        journal.add_event("resume", step=0, version=0)
        for number in range(4000):
            journal.add_event("spans", step=number, spans="x" * 600)
            journal.add_metrics(number, {"loss": 0.5})
            if number % 100 == 99:
                journal.flush_blocking()
        journal.flush_blocking()
        assert size_of(tmp_path) <= 1 * MB
    with JournalReader.open(tmp_path) as reader:
        assert len(reader.events(kind="resume")) == 1
        assert reader.events(kind="spans", limit=10_000)[-1].fields["step"] == 3999
        assert sum(event.fields["count"] for event in reader.events(kind="dropped_events")) > 1000


def test_the_write_ahead_log_stays_small_beside_a_slow_reader(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=2) as journal:
        journal.add(make("first", 0))
        journal.flush_blocking()
        with JournalReader.open(tmp_path) as reader:
            entries = reader.trajectories(Filter(superseded=True))
            next(entries)
            for trajectory in many(400):
                journal.add(trajectory)
            journal.flush_blocking()
            assert (tmp_path / "journal.sqlite-wal").stat().st_size < 4 * MB
