import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.errors import RunError
from treadle.journal import Journal, JournalReader
from treadle.types import Completion, Outcome, RecordedCompletion, Row, StopReason, ToolCall, Trajectory

MB = 1 << 20
INT64 = st.integers(-(2**63), 2**63 - 1)
CALLS = st.builds(ToolCall, st.text(), st.dictionaries(st.text(), st.integers()), st.text(), st.none() | st.text())


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    size = draw(st.integers(0, 8))
    return Completion(
        ids=tuple(draw(st.integers(0, 2**31 - 1)) for _ in range(size)),
        logprobs=tuple(draw(st.floats(allow_nan=False)) for _ in range(size)),
        versions=tuple(draw(st.integers(0, 2**31 - 1)) for _ in range(size)),
        stop=draw(st.sampled_from([StopReason.STOP, StopReason.LENGTH, StopReason.ABORT])),
        text=draw(st.text(st.characters())),
        replica=draw(st.text()),
        calls=tuple(draw(st.lists(CALLS, max_size=2))),
    )


def part(uid: str = "task", sample: int = 0, number: int = 0, *ids: int) -> RecordedCompletion:
    said = ids or (number, sample)
    return RecordedCompletion(
        uid, sample, number, 10, 11, Completion(said, (-0.5,) * len(said), (0,) * len(said), StopReason.ABORT)
    )


def trajectory(uid: str, sample: int = 0, attempt: int = 0, num_tokens: int = 400) -> Trajectory:
    row = Row((1,), (2,) * num_tokens, (1,) * num_tokens, (-0.5,) * num_tokens, (0,) * num_tokens)
    return Trajectory(uid, sample, (row,), Outcome.ended(StopReason.STOP), attempt=attempt)


def kept(run_dir: Path, uid: str = "task") -> list[RecordedCompletion]:
    with JournalReader.open(run_dir) as reader:
        return [entry.part for entry in reader.parts(uid)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(completions(), INT64)
def test_a_part_comes_back_equal(tmp_path: Path, completion: Completion, digest: int) -> None:
    sent = RecordedCompletion("täsk", 3, 4, 100, digest, completion)
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.add_parts([sent])
    assert kept(tmp_path, "täsk") == [sent]


def test_parts_come_back_by_session_in_the_order_of_their_requests(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.add_parts([part("task", 1, 0), part("other", 0, 0), part("task", 0, 10)])
        journal.add_parts([part("task", 1, 1), part("task", 0, 9)])
    assert [(item.sample, item.number) for item in kept(tmp_path)] == [(0, 9), (0, 10), (1, 0), (1, 1)]


@pytest.mark.parametrize("flush", [True, False], ids=["in batches of their own", "in one batch"])
def test_a_part_written_again_replaces_the_earlier_one(tmp_path: Path, flush: bool) -> None:
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.add_parts([part("task", 0, 0, 1), part("task", 0, 1, 2)])
        if flush:
            journal.flush_blocking()
        journal.add_parts([part("task", 0, 1, 3, 4)])
    assert kept(tmp_path) == [part("task", 0, 0, 1), part("task", 0, 1, 3, 4)]


@pytest.mark.parametrize("flush", [True, False], ids=["in batches of their own", "in one batch"])
def test_dropping_parts_concerns_what_was_added_before_and_no_other_session(tmp_path: Path, flush: bool) -> None:
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.add_parts([part("task", 0, 0, 1), part("task", 0, 1), part("task", 1)])
        if flush:
            journal.flush_blocking()
        journal.drop_parts("task", 0)
        if flush:
            journal.flush_blocking()
        journal.add_parts([part("task", 0, 0, 2)])
    assert kept(tmp_path) == [part("task", 0, 0, 2), part("task", 1)]


def test_every_record_says_which_start_of_the_run_wrote_it(tmp_path: Path) -> None:
    for number in range(3):
        with Journal.open(tmp_path, max_mb=16) as journal:
            journal.add_event("resume", version=number)
            if number != 1:
                journal.add(trajectory("task", attempt=number))
                journal.add_parts([part("task", number)])
    with JournalReader.open(tmp_path) as reader:
        assert [event.start for event in reader.events(kind="resume")] == [1, 2, 3]
        assert [(entry.headline.attempt, entry.headline.start) for entry in reader.attempts("task")] == [(0, 1), (2, 3)]
        assert [(entry.part.sample, entry.start) for entry in reader.parts("task")] == [(0, 1), (2, 3)]
        assert all(entry.written_at > 0 for entry in reader.parts("task"))


def test_every_attempt_at_a_task_is_found_whole(tmp_path: Path) -> None:
    sent = [trajectory("task", 1), trajectory("other"), trajectory("task", 0), trajectory("task", 1, attempt=1)]
    with Journal.open(tmp_path, max_mb=16) as journal:
        for item in sent:
            journal.add(item)
    with JournalReader.open(tmp_path) as reader:
        assert [entry.trajectory for entry in reader.attempts("task")] == [sent[2], sent[0], sent[3]]
        assert reader.attempts("none") == ()


def test_both_lookups_by_task_use_an_index(tmp_path: Path) -> None:
    Journal.open(tmp_path, max_mb=16).close_blocking()
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    for query in (
        "SELECT * FROM trajectories WHERE uid = 'a' ORDER BY sample, id",
        "SELECT * FROM parts WHERE uid = 'a' ORDER BY sample, row, number",
    ):
        plan = " ".join(row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}"))
        assert "USING INDEX" in plan and "SCAN" not in plan and "TEMP B-TREE" not in plan
    connection.close()


def test_an_older_journal_is_refused(tmp_path: Path) -> None:
    Journal.open(tmp_path, max_mb=16).close_blocking()
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    with pytest.raises(RunError, match=r"an older treadle \(journal version 1, this one knows 3\)"):
        Journal.open(tmp_path, max_mb=16)


def long_part(number: int) -> RecordedCompletion:
    return replace(part("open", number), completion=replace(trajectory_tokens(2000), stop=StopReason.ABORT))


def trajectory_tokens(size: int) -> Completion:
    return Completion((7,) * size, (-0.25,) * size, (0,) * size, StopReason.STOP)


def test_parts_that_nobody_came_back_for_go_with_the_bodies_of_their_time(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=2) as journal:
        journal.add_parts([long_part(number) for number in range(20)])
        journal.flush_blocking()
        for number in range(800):
            journal.add(trajectory(f"task-{number}"))
            if number % 50 == 49:
                journal.flush_blocking()
                assert (tmp_path / "journal.sqlite").stat().st_size <= 2 * MB
        journal.add_parts([part("late")])
    assert kept(tmp_path, "open") == []
    assert kept(tmp_path, "late") == [part("late")]


def test_parts_alone_stay_within_the_size_too(tmp_path: Path) -> None:
    with Journal.open(tmp_path, max_mb=1) as journal:
        for number in range(200):  # about 5 MB
            journal.add_parts([long_part(number)])
            if number % 5 == 4:
                journal.flush_blocking()
                assert (tmp_path / "journal.sqlite").stat().st_size <= MB
    samples = [item.sample for item in kept(tmp_path, "open")]
    assert samples == list(range(200 - len(samples), 200))
    assert len(samples) > 5
