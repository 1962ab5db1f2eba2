"""The rollout buffer: the choice of a batch among open groups, and what is reused after a resume."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollouts import task
from tests.schedules import Checkpoints, Rollout, Trial, words_for
from tests.virtual_time import run
from treadle.checkpoint.store import Progress
from treadle.data.task_source import TaskSource
from treadle.errors import EngineFailure, RunError
from treadle.inspect.audit import audit
from treadle.journal import Journal, JournalReader
from treadle.rollout.completion_log import NOTHING_RECOVERED
from treadle.trainer.buffer import OpenGroup, OpenGroups
from treadle.trainer.resume import RunHistory, settings_digest
from treadle.trainer.state import RunInterrupted
from treadle.types import Group, Outcome, Row, Score, StopReason, Task, Trajectory

TASK = Task("t", ())
DONE = Group(TASK, ())


def search(items: list[OpenGroup], size: int, due: int | None) -> list[OpenGroup] | None:
    """The same choice by definition: every group is looked at, and every version counted over all of them."""
    chosen = sorted((item for item in items if item.group is not None), key=lambda item: item.version)[:size]
    if len(chosen) < size:
        return None
    for version in {item.version for item in items} if due is not None else ():
        assert due is not None
        later = (version - due) * size
        if count_until(version, items) - later > count_until(version, chosen):
            return None
    return [item for item in items if item in chosen]


def count_until(version: int, items: Iterable[OpenGroup]) -> int:
    return sum(item.version <= version for item in items)


def begin(groups: OpenGroups, position: int, version: int) -> OpenGroup:
    item = OpenGroup(position, TASK, version, 0.0)
    groups.add(item)
    return item


EVENTS = st.tuples(
    st.sampled_from(["begin", "begin", "end", "end", "end", "leave", "take"]), st.integers(0, 2), st.integers(0, 30)
)
"""What happens to groups, with how many versions after the oldest, or to which of them."""


@given(st.lists(EVENTS, min_size=20, max_size=80), st.integers(1, 3), st.booleans())
def test_counts_choose_what_a_search_over_all_groups_would(history, size, wait):
    groups = OpenGroups()
    due = 0
    for position, (kind, version, at) in enumerate(history):
        items = list(groups)
        item = items[at % len(items)] if items else None
        if kind == "begin":
            begin(groups, position, due + version)
        elif kind == "end" and item is not None and item.group is None:
            groups.end(item, DONE, due + version)
        elif kind == "leave" and item is not None:
            groups.remove(item)
        elif kind == "take" and (chosen := groups.choose(size, due if wait else None)):
            for item in chosen:
                groups.remove(item)
            due += 1
        expected = search(list(groups), size, due if wait else None)
        assert groups.choose(size, due if wait else None) == expected
        for bound in range(due, due + 6):
            assert groups.count_until(bound) == count_until(bound, groups)


def test_a_batch_waits_for_a_group_that_would_be_too_old_for_the_next():
    groups = OpenGroups()
    old = begin(groups, 0, version=0)
    for position in (1, 2):
        groups.end(begin(groups, position, version=1), DONE, 1)
    assert groups.choose(2, min_version=0) is None
    later = groups.choose(2, min_version=-1) or ()
    assert [item.position for item in later] == [1, 2], "a batch later it is still in time"
    groups.end(old, DONE, 0)
    assert [item.position for item in groups.choose(2, min_version=0) or ()] == [0, 1]


def test_a_group_that_begins_again_is_the_last_of_its_version():
    groups = OpenGroups()
    first = begin(groups, 0, version=0)
    groups.end(begin(groups, 1, version=0), DONE, 0)
    groups.remove(first)
    groups.end(begin(groups, 0, version=0), DONE, 0)
    assert [item.position for item in groups.choose(1, min_version=None) or ()] == [1]
    assert [item.position for item in groups.choose(2, min_version=None) or ()] == [1, 0]


def saved_after(step: int, admitted: int, open_: Sequence[int]) -> Checkpoints:
    """A checkpoint with so many tasks admitted, and some of them open."""
    source = TaskSource([task(f"t{at}") for at in range(20)], shuffle=False, seed=0)
    source.take(admitted)
    return Checkpoints(
        Progress(step, step, {"tasks": asdict(source.state()), "open": [*open_], "kl_coefficient": None})
    )


def leave_behind(directory: Path, uids: Sequence[str], version: int, settings: str) -> None:
    """What an earlier start finished, all of it with weights of one version."""
    row = Row((1,), (5, 9), (1, 1), (-0.5, -0.5), (version, version))
    with Journal.open(directory, max_mb=10) as journal:
        journal.add_event("resume", step=0, version=0, settings=settings, position=0, open=[])
        for uid in uids:
            for sample in range(2):
                journal.add(Trajectory(uid, sample, (row,), Outcome.ended(StopReason.STOP), Score(float(sample))))


@pytest.mark.parametrize("stale", ["wait", "drop"])
def test_more_finished_groups_of_an_old_version_than_a_batch_has_places_for_do_not_block_the_run(tmp_path, stale):
    words = words_for("fully_async", "trainer.max_staleness=1", "trainer.total_training_steps=5")
    trial = Trial(
        tmp_path,
        Rollout(),
        *words,
        f"trainer.stale_samples={stale}",
        checkpoints=saved_after(2, admitted=8, open_=[4, 5, 6, 7]),
        num_tasks=20,
    )
    leave_behind(tmp_path, ["t4", "t5", "t6", "t7"], version=1, settings=settings_digest(trial.config))
    run(trial.run_to_end())
    assert sorted(uid for batch in trial.batches for uid in batch) == sorted(f"t{at}" for at in range(4, 10))
    taken_over = [uid for uid, past in trial.rollout.pasts.items() if past.finished]
    assert taken_over == ["t4", "t5"], "as many as the next batch can still train"


def test_a_batch_that_was_taken_and_not_trained_is_still_open_for_the_checkpoint(tmp_path):
    """remax samples baselines between the two; a stop comes while it does."""
    rollout = Rollout(delay=lambda uid: 100.0 if uid.startswith("greedy") else 1.0)
    trial = Trial(
        tmp_path,
        rollout,
        *words_for("fully_async", "algorithm.adv_estimator=remax", "trainer.max_staleness=1"),
        num_tasks=20,
    )

    async def stopped_in_the_middle() -> None:
        running = asyncio.ensure_future(trial.run_to_end())
        await asyncio.sleep(50)
        trial.run.request_stop()
        with pytest.raises(RunInterrupted):
            await running

    run(stopped_in_the_middle())
    assert trial.run._state.describe() == {"step": 0, "version": 0, "position": 4, "open": [0, 1, 2, 3]}


def test_the_engines_death_at_a_push_ends_the_run_as_an_error_of_the_run(tmp_path):
    def die(run_, version: int) -> None:
        if version == 2:
            raise EngineFailure("the process of native-0 died: killed by SIGKILL")

    trial = Trial(tmp_path, Rollout(), *words_for("fully_async"), on_push=die)
    with pytest.raises(RunError, match="native-0 died: killed by SIGKILL"):
        run(trial.run_to_end())
    with JournalReader.open(tmp_path) as reader:
        assert [event.fields["version"] for event in reader.events(kind="weights")] == [1]
    assert audit(tmp_path).problems == ()


def test_a_run_whose_trajectories_all_fail_ends_with_what_failed_them(tmp_path):
    class Broken(Rollout):
        async def generate_group(self, item, *, past=NOTHING_RECOVERED):
            outcome = Outcome.failed(EngineFailure("no replica can serve: native-0 died: killed by SIGKILL"))
            return Group(item, (Trajectory(item.uid, 0, (), outcome),))

    with pytest.raises(RunError, match="too few survivors; the last failure: no replica can serve: native-0 died"):
        run(Trial(tmp_path, Broken(), *words_for("fully_async"), num_tasks=100).run_to_end())


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_stop_does_not_wait_for_weights_that_wait_for_sessions_and_the_step_counts(tmp_path, mode):
    class Slow(Rollout):
        async def update_weights(self, update, *, running="continue"):
            await asyncio.sleep(500.0 if update.version == 2 else 0.0)
            return await super().update_weights(update, running=running)

    trial = Trial(tmp_path, Slow(), *words_for(mode), num_tasks=20)

    async def stopped() -> float:
        running, clock = asyncio.ensure_future(trial.run_to_end()), asyncio.get_running_loop().time
        await asyncio.sleep(100)
        began = clock()
        trial.run.request_stop()
        with pytest.raises(RunInterrupted):
            await running
        return clock() - began

    assert run(stopped()) < 10
    assert trial.run.step == trial.policy.version
    assert len(set(trial.run._state.describe()["open"])) == trial.run._state.describe()["position"] - 2 * trial.run.step


def test_a_resumed_run_notes_the_weights_it_restored(tmp_path):
    trial = Trial(tmp_path, Rollout(), *words_for("sync"), checkpoints=saved_after(2, 4, []), num_tasks=20)
    run(trial.run_to_end())
    with JournalReader.open(tmp_path) as reader:
        assert [event.fields["version"] for event in reader.events(kind="weights")] == [2, 3]


def test_the_journal_is_asked_of_a_task_only_where_an_earlier_start_has_sampled_it(tmp_path, monkeypatch):
    asked: list[str] = []
    past = RunHistory.past

    def noted(history, uid, n, **bounds):
        asked.append(uid)
        return past(history, uid, n, **bounds)

    monkeypatch.setattr(RunHistory, "past", noted)
    trial = Trial(tmp_path, Rollout(), *words_for("sync", "trainer.total_training_steps=2"), num_tasks=8)
    run(trial.run_to_end())
    assert trial.batches == [["t0", "t1"], ["t2", "t3"]] and asked == []
    words = words_for("sync", "checkpoint.resume_mode=disable")  # from the first task on
    again = Trial(tmp_path, Rollout(), *words, num_tasks=8)
    run(again.run_to_end())
    assert again.batches == [["t0", "t1"], ["t2", "t3"], ["t4", "t5"]]
    assert asked == ["t0", "t1", "t2", "t3"]
