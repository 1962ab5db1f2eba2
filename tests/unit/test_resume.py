from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import EngineFailure, EnvironmentFailure, RunError
from treadle.journal import Journal
from treadle.rollout.completion_log import NOTHING_RECOVERED, RecoveredTask
from treadle.trainer.resume import RunHistory
from treadle.types import Completion, Outcome, RecordedCompletion, Row, Score, StopReason, Trajectory

DONE = Outcome.ended(StopReason.STOP)
DEAD = Outcome.failed(EngineFailure("gone"))
ABORTED = Outcome.ended(StopReason.ABORT)
SCORE = Score(1.0)


def trajectory(
    sample: int,
    *versions: int,
    uid: str = "task",
    attempt: int = 0,
    outcome: Outcome = DONE,
    reward: Score | None = SCORE,
) -> Trajectory:
    """One observed token among the sampled ones, whose version counts for nothing."""
    size = len(versions)
    row = Row((1,), (*range(size), 9), (1,) * size + (0,), (-0.5,) * size + (0.0,), (*versions, -1))
    return Trajectory(uid, sample, (row,), outcome, reward if outcome.ok else None, attempt=attempt)


def part(sample: int, number: int, *versions: int, uid: str = "task") -> RecordedCompletion:
    said = Completion(tuple(range(len(versions))), (-0.5,) * len(versions), versions, StopReason.ABORT)
    return RecordedCompletion(uid, sample, number, 10, 11, said)


@contextmanager
def start(run_dir: Path, resumed: int | None = None) -> Iterator[Journal]:
    """One start of a run; `resumed` is the version it goes back to."""
    with Journal.open(run_dir, max_mb=16) as journal:
        if resumed is not None:
            journal.add_event("resume", step=resumed, version=resumed)
        yield journal


def write(journal: Journal, *records: Trajectory | RecordedCompletion) -> None:
    for record in records:
        if isinstance(record, RecordedCompletion):
            journal.add_parts([record])
        else:
            journal.add(record)


def past(run_dir: Path, *, n: int = 4, version: int = 100, oldest: int = 0, scored: bool = True) -> RecoveredTask:
    history = RunHistory.read(run_dir, scored=scored)
    try:
        return history.past("task", n, version=version, oldest=oldest)
    finally:
        history.close()


def test_finished_and_half_finished_samples_of_a_task_are_found(tmp_path: Path) -> None:
    with start(tmp_path) as journal:
        write(journal, trajectory(0, 1, 2), part(1, 0, 1), part(1, 1, 2), part(2, 0, 2), part(0, 0, 1))
        write(journal, trajectory(3, 1, uid="other"), part(3, 0, 1, uid="other"))
    assert past(tmp_path) == RecoveredTask((trajectory(0, 1, 2),), (part(1, 0, 1), part(1, 1, 2), part(2, 0, 2)), 1)
    assert past(tmp_path, n=2) == RecoveredTask((trajectory(0, 1, 2),), (part(1, 0, 1), part(1, 1, 2)), 1)


def test_a_task_nobody_began_has_no_past(tmp_path: Path) -> None:
    with start(tmp_path):
        pass
    assert past(tmp_path) == NOTHING_RECOVERED


def test_a_directory_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no journal at"):
        RunHistory.read(tmp_path)


def test_the_newest_attempt_that_ended_well_counts_and_new_ones_get_unused_numbers(tmp_path: Path) -> None:
    with start(tmp_path) as journal:
        write(
            journal,
            *(trajectory(0, 1, attempt=0), trajectory(0, 2, attempt=1), trajectory(0, 2, attempt=2, outcome=DEAD)),
            *(trajectory(1, 1, attempt=0, outcome=DEAD), trajectory(1, 1, attempt=6, outcome=ABORTED)),
            trajectory(2, 1, attempt=3),
        )
    found = past(tmp_path)
    assert found.finished == (trajectory(0, 2, attempt=1), trajectory(2, 1, attempt=3))
    assert found.attempt == 7


def test_without_a_reward_a_trajectory_counts_only_where_the_run_scores_none(tmp_path: Path) -> None:
    with start(tmp_path) as journal:
        write(journal, trajectory(0, 1, reward=None), trajectory(1, 1))
    assert [item.sample for item in past(tmp_path).finished] == [1]
    assert [item.sample for item in past(tmp_path, scored=False).finished] == [0, 1]


def test_a_trajectory_whose_tokens_were_let_go_does_not_count(tmp_path: Path) -> None:
    long = trajectory(0, *([1] * 60_000))
    with Journal.open(tmp_path, max_mb=1) as journal:
        for item in (long, trajectory(1, *([1] * 60_000)), trajectory(2, 1)):
            journal.add(item)
            journal.flush_blocking()
    assert [item.sample for item in past(tmp_path).finished] == [2]


def test_tokens_of_weights_that_are_not_there_yet_or_too_old_do_not_count(tmp_path: Path) -> None:
    with start(tmp_path) as journal:
        write(journal, trajectory(0, 3, 4, 5), part(1, 0, 3), part(1, 1, 4, 5), part(1, 2, 5))
    assert past(tmp_path, version=5, oldest=3).finished == (trajectory(0, 3, 4, 5),)
    assert past(tmp_path, version=4, oldest=3) == RecoveredTask((), (part(1, 0, 3),), 1)
    assert past(tmp_path, version=5, oldest=4) == RecoveredTask((), (), 1)


def test_parts_are_cut_at_the_first_that_does_not_count_session_by_session(tmp_path: Path) -> None:
    with start(tmp_path) as journal:
        write(journal, part(0, 0, 1), part(0, 1, 9), part(0, 2, 1), part(1, 0, 9), part(2, 0, 1), part(2, 1))
    assert past(tmp_path, version=5).parts == (part(0, 0, 1), part(2, 0, 1), part(2, 1))


def test_what_was_sampled_by_weights_that_a_resume_threw_away_does_not_count(tmp_path: Path) -> None:
    with start(tmp_path) as journal:
        write(journal, trajectory(0, 5), trajectory(1, 6), part(2, 0, 5), part(2, 1, 6))
    with start(tmp_path, resumed=5) as journal:
        write(journal, trajectory(3, 6))
    with start(tmp_path, resumed=7):
        pass
    assert past(tmp_path, version=7) == RecoveredTask((trajectory(0, 5), trajectory(3, 6)), (part(2, 0, 5),), 1)


def test_a_run_that_begins_again_keeps_what_the_first_weights_said(tmp_path: Path) -> None:
    with start(tmp_path) as journal:
        write(journal, trajectory(0, 0), trajectory(1, 0, 1))
    with start(tmp_path, resumed=0):
        pass
    assert past(tmp_path, version=0).finished == (trajectory(0, 0),)


def test_the_order_of_starts_decides_and_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(tmp_path) as journal:
        write(journal, trajectory(0, 6))
    with monkeypatch.context() as slow:
        slow.setattr("treadle.journal.journal.time.time", lambda: 1000.0)
        with start(tmp_path, resumed=5) as journal:
            write(journal, trajectory(1, 6))
    assert past(tmp_path, version=6).finished == (trajectory(1, 6),)


def test_a_lineage_reads_beside_the_run_that_writes(tmp_path: Path) -> None:
    with start(tmp_path) as journal:
        write(journal, trajectory(0, 1))
    with start(tmp_path, resumed=1) as journal:
        journal.flush_blocking()
        history = RunHistory.read(tmp_path)
        write(journal, trajectory(1, 1, uid="later"))
        journal.flush_blocking()
        assert len(history.past("task", 4, version=1, oldest=0).finished) == 1
        assert len(history.past("later", 4, version=1, oldest=0).finished) == 1
        history.close()


@dataclass
class World:
    """What really happened: which weights each version had, in the history the run is in now."""

    weights: list[int] = field(default_factory=lambda: [0])
    made: int = 0
    said: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By sample: the weights behind each version it used."""

    def train(self) -> None:
        self.made += 1
        self.weights.append(self.made)

    def go_back(self, version: int) -> None:
        del self.weights[version + 1 :]

    def sample(self, oldest: int) -> Trajectory:
        versions = range(max(0, min(oldest, len(self.weights) - 1)), len(self.weights))
        number = len(self.said)
        self.said[number] = tuple(self.weights[version] for version in versions)
        return trajectory(number, *versions)

    def is_ours(self, sample: int) -> bool:
        return set(self.said[sample]) <= set(self.weights)


LIFE = st.lists(st.one_of(st.just("train"), st.integers(0, 6)), max_size=8)


@settings(max_examples=15, deadline=None)
@given(lives=st.lists(st.tuples(st.integers(0, 8), LIFE), min_size=1, max_size=4), last=st.integers(0, 8))
def test_exactly_what_the_weights_of_this_history_sampled_counts(
    lives: list[tuple[int, list[str | int]]], last: int
) -> None:
    world = World()
    with TemporaryDirectory() as name:
        run_dir = Path(name)
        for back_to, deeds in lives:
            version = min(back_to, len(world.weights) - 1)
            world.go_back(version)
            with start(run_dir, version) as journal:
                for deed in deeds:
                    if isinstance(deed, int):
                        journal.add(world.sample(deed))
                    else:
                        world.train()
        version = min(last, len(world.weights) - 1)
        world.go_back(version)
        found = past(run_dir, n=1000, version=version)
    assert {item.sample for item in found.finished} == {sample for sample in world.said if world.is_ours(sample)}


def test_attempts_that_failed_otherwise_than_by_an_engine_count_as_drawn(tmp_path: Path) -> None:
    broken = Outcome.failed(EnvironmentFailure("it broke"))
    with start(tmp_path) as journal:
        write(
            journal,
            *(trajectory(0, 1, attempt=at, outcome=outcome) for at, outcome in enumerate((broken, DEAD, broken))),
            trajectory(1, 1, outcome=DEAD),
        )
    assert past(tmp_path).redraws == {0: 2}


def test_parts_of_forks_are_told_apart(tmp_path: Path) -> None:
    parts = [replace(part(0, number, 1), row=row) for row in (0, 1) for number in (0, 1)]
    with start(tmp_path) as journal:
        write(journal, *reversed(parts))
    assert list(past(tmp_path).parts) == parts


def test_what_ended_a_start_by_its_numbers_is_not_taken_over_and_what_came_after_is(tmp_path: Path) -> None:
    with start(tmp_path, 0) as journal:
        write(journal, trajectory(0, 0), trajectory(1, 0, uid="other"), part(1, 0, 0))
        journal.add_event("set_aside", step=1, uids=["task"], reason="nan")
    assert (past(tmp_path).finished, past(tmp_path).parts) == ((), ())
    assert past(tmp_path).redraws == {0: 1}, "with noise of its own, or the same tokens would come again"
    history = RunHistory.read(tmp_path)
    assert history.newly_set_aside == ("task",)
    assert len(history.past("other", 4, version=100, oldest=0).finished) == 1
    history.close()
    with start(tmp_path, 0) as journal:
        write(journal, trajectory(0, 0, attempt=1))
    assert [item.attempt for item in past(tmp_path).finished] == [1]
    history = RunHistory.read(tmp_path)
    assert history.newly_set_aside == ()
    history.close()


def test_a_reward_outside_the_bounds_is_not_taken_over(tmp_path: Path) -> None:
    with start(tmp_path, 0) as journal:
        write(journal, trajectory(0, 0, reward=Score(1e300)), trajectory(1, 0))
    history = RunHistory.read(tmp_path, bounds=(-1e6, 1e6))
    assert [item.sample for item in history.past("task", 4, version=100, oldest=0).finished] == [1]
    history.close()
