"""A journal whose bits were flipped, whose end was cut off, or whose directory went away under the run."""

import asyncio
import shutil
import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.schedules import BASE, Checkpoints, Policy, Rollout, Trial
from treadle.checkpoint.store import Progress
from treadle.config import loads
from treadle.errors import RunError
from treadle.inspect.audit import audit
from treadle.inspect.findings import scan_run
from treadle.inspect.replay import replay
from treadle.inspect.timeline import write_timeline
from treadle.journal import DamagedRecord, Journal, JournalReader, RunStatus, read_starts
from treadle.trainer.resume import ConfigChange, RunHistory, check_changes, record_config
from treadle.trainer.step import StepParts
from treadle.types import Completion, Outcome, RecordedCompletion, Row, Score, StopReason, Trajectory


def sample(uid: str = "task", number: int = 0) -> Trajectory:
    row = Row((1, 2), (5, 9), (1, 1), (-0.5, -0.25), (0, 0))
    messages = ({"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"})
    return Trajectory(uid, number, (row,), Outcome.ended(StopReason.STOP), Score(1.0, {"f": 1.0}), messages=messages)


def spoil(run_dir: Path, statement: str) -> None:
    connection = sqlite3.connect(run_dir / "journal.sqlite")
    assert connection.execute(statement).rowcount > 0
    connection.commit()
    connection.close()


FLIPS = {
    "a token": "UPDATE rows SET ids = x'0500000008000000'",
    "a logprob": "UPDATE rows SET logprobs = x'000000bf000080bf'",
    "a mask": "UPDATE rows SET mask = x'0100'",
    "a version": "UPDATE rows SET versions = x'0000000001000000'",
    "a turn": "UPDATE rows SET turns = '[ ]'",
    "a prompt": "UPDATE prompts SET ids = x'0100000003000000'",
    "an opening": "UPDATE prompts SET messages = replace(messages, 'what', 'when')",
    "a message": "UPDATE texts SET messages = replace(messages, 'that', 'this')",
    "a reward": "UPDATE trajectories SET reward = 0.0",
    "a part of a reward": "UPDATE trajectories SET parts = replace(parts, '1.0', '2.0')",
    "a status": "UPDATE trajectories SET status = 'complete'",
    "a digest": "UPDATE trajectories SET digest = x'00'",
}


@pytest.mark.parametrize("statement", FLIPS.values(), ids=FLIPS)
def test_a_flipped_bit_is_seen_by_the_reader_and_the_sample_is_not_reused(tmp_path, statement):
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.add(sample())
    with JournalReader.open(tmp_path) as reader:
        found = reader.trajectory("task", 0)
        assert found is not None and found.headline.is_intact and found.trajectory == sample()
    spoil(tmp_path, statement)
    with JournalReader.open(tmp_path) as reader:
        found = reader.trajectory("task", 0)
        assert found is not None and not found.headline.is_intact and found.trajectory.rows == ()
    history = RunHistory.read(tmp_path)
    assert history.past("task", 4, version=10, oldest=0).finished == ()
    history.close()


def test_a_flipped_bit_in_a_half_generated_answer_is_not_continued(tmp_path):
    with Journal.open(tmp_path, max_mb=16) as journal:
        said = Completion((3, 4), (-0.5, -0.5), (0, 0), StopReason.ABORT)
        journal.add_parts([RecordedCompletion("task", 0, 0, 10, 11, said)])
    spoil(tmp_path, "UPDATE parts SET ids = x'0300000005000000'")
    history = RunHistory.read(tmp_path)
    assert history.past("task", 4, version=10, oldest=0).parts == ()
    history.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rows SET ids = x'0500000008000000' WHERE id = 3",
        "UPDATE trajectories SET reward = 5.0 WHERE id = 3",
        "UPDATE events SET fields = replace(fields, '[0,1]', '[0,2]') WHERE kind = 'step'",
    ],
)
def test_audit_and_replay_refuse_what_was_changed_after_it_was_trained(tmp_path, statement):
    asyncio.run(Trial(tmp_path, Rollout()).run_to_end())
    assert audit(tmp_path).problems == ()
    spoil(tmp_path, statement)
    assert any("not as it was written" in problem for problem in audit(tmp_path).problems)
    config = loads(BASE)
    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    with pytest.raises(DamagedRecord, match="not as it was written"):
        list(replay(parts, tmp_path))


def test_a_flipped_bit_in_an_event_of_any_kind_is_a_sentence_and_not_a_traceback(tmp_path):
    whole = tmp_path / "whole"
    asyncio.run(Trial(whole, Rollout()).run_to_end())
    config, items = loads(BASE), {"actor.optim.lr": "1"}
    with Journal.open(whole, max_mb=16) as journal:
        record_config(journal, items, [ConfigChange("actor.optim.lr", "2", "1")])
        journal.add_event("set_aside", step=1, uids=["t0"], reason="a loss that is no number")
        journal.add_event("checkpoint", step=3, version=3, position=2, open=[])
    with JournalReader.open(whole) as reader:
        kinds = {event.kind for event in reader.iter_events()}
    assert {"resume", "step", "spans", "admit", "inputs", "set_aside", "checkpoint"} <= kinds

    def read_history(run_dir: Path) -> None:
        history = RunHistory.read(run_dir)
        with closing(history):
            history.refuse_lost_checkpoints()

    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    readers = (
        read_history,
        lambda run_dir: check_changes(run_dir, config, items, allow=False),
        write_timeline,
        scan_run,
        lambda run_dir: list(replay(parts, run_dir)),
    )
    for kind in sorted(kinds):
        spoiled = tmp_path / kind
        shutil.copytree(whole, spoiled)
        spoil(spoiled, f"UPDATE events SET fields = fields || ' ' WHERE kind = '{kind}'")
        assert any("not as it was written" in problem for problem in audit(spoiled).problems), kind
        for read in readers:
            with suppress(RunError):
                read(spoiled)
    for kind, read in (("set_aside", readers[0]), ("resume", readers[0]), ("inputs", readers[1])):
        with pytest.raises(DamagedRecord, match=rf"\({kind}\).*not as it was written.*--fresh"):
            read(tmp_path / kind)


def test_a_task_that_was_changed_is_not_replayed(tmp_path):
    asyncio.run(Trial(tmp_path, Rollout()).run_to_end())
    spoil(tmp_path, "UPDATE tasks SET task = replace(task, 'Task', 'Tusk')")
    with JournalReader.open(tmp_path) as reader, pytest.raises(DamagedRecord, match="'t0'"):
        reader.task("t0")


def test_a_journal_that_was_cut_short_says_how_to_go_on_from_the_checkpoint(tmp_path):
    with Journal.open(tmp_path, max_mb=16) as journal:
        for number in range(200):
            journal.add(sample(f"task{number}"))
    (tmp_path / "checkpoints" / "0002-step-20").mkdir(parents=True)
    path = tmp_path / "journal.sqlite"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    for reopen in (lambda: Journal.open(tmp_path, max_mb=16), lambda: JournalReader.open(tmp_path)):
        with pytest.raises(RunError, match=r"malformed.*resume_from_path=.*0002-step-20"):
            reopen()


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_directory_that_goes_away_ends_the_run_at_the_next_flush(tmp_path, moved):
    run_dir = tmp_path / "run"
    journal = Journal.open(run_dir, max_mb=16)
    journal.add(sample())
    journal.flush_blocking()
    if moved:
        run_dir.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(run_dir)
    with pytest.raises(RunError, match="deleted, moved or unmounted"):
        journal.add(sample("later"))
        journal.flush_blocking()
    with pytest.raises(RunError):
        journal.close_blocking()
    assert not run_dir.exists()


def test_lost_checkpoints_are_refused_where_the_journal_knows_of_one(tmp_path):
    saved = Checkpoints(save_freq=1)
    asyncio.run(Trial(tmp_path, Rollout(), checkpoints=saved).run_to_end())
    with pytest.raises(RunError, match=r"knows of one after step 3.*--fresh"):
        asyncio.run(Trial(tmp_path, Rollout(), checkpoints=Checkpoints()).run_to_end())
    afresh = asyncio.run(Trial(tmp_path, Rollout(), "checkpoint.resume_mode=disable").run_to_end())
    assert len(afresh.batches) == 3


def test_damaged_checkpoints_beside_a_deleted_journal_are_refused_too(tmp_path):
    damaged = tmp_path / "checkpoints" / "0003-step-3"
    damaged.mkdir(parents=True)
    with pytest.raises(RunError, match=r"1 damaged, such as 0003-step-3.*--fresh"):
        asyncio.run(Trial(tmp_path, Rollout(), checkpoints=Checkpoints()).run_to_end())


def test_a_checkpoint_that_the_journal_knows_nothing_of_is_gone_on_from_with_a_warning(tmp_path, caplog):
    saved = Checkpoints(save_freq=1)
    asyncio.run(Trial(tmp_path / "one", Rollout(), checkpoints=saved).run_to_end())
    step, state = saved.saved[0]
    again = Checkpoints(Progress(step, 1, state), save_freq=1)
    asyncio.run(Trial(tmp_path / "one", Rollout(), checkpoints=again).run_to_end())
    assert "its journal begins anew" not in caplog.text
    again = Checkpoints(Progress(step, 1, state), save_freq=1)
    asyncio.run(Trial(tmp_path / "deleted", Rollout(), checkpoints=again).run_to_end())
    assert "goes on after step 1, but its journal begins anew" in caplog.text


def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path):
    with Journal.open(tmp_path, max_mb=10) as journal:
        journal.add_event("resume", step=0, version=0, position=0, open=[])
        journal.add_event("checkpoint", step=1, version=1, position=2, open=[])  # killed while it saved
    assert len(asyncio.run(Trial(tmp_path, Rollout()).run_to_end()).batches) == 3


def test_a_step_is_saved_once_and_measured_once_whatever_was_killed(tmp_path):
    saved = Checkpoints(save_freq=1)
    asyncio.run(Trial(tmp_path, Rollout(), checkpoints=saved).run_to_end())
    assert [step for step, _ in saved.saved] == [1, 2, 3]
    step, state = saved.saved[0]
    again = Checkpoints(Progress(step, 1, state), save_freq=1)
    asyncio.run(Trial(tmp_path, Rollout(), checkpoints=again).run_to_end())
    assert [step for step, _ in again.saved] == [2, 3]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3
    with JournalReader.open(tmp_path) as reader:
        assert [found.step for found in reader.metrics()] == [1, 2, 3]
    done = Checkpoints(Progress(3, 3, saved.saved[-1][1]), save_freq=1)
    asyncio.run(Trial(tmp_path, Rollout(), checkpoints=done).run_to_end())
    assert done.saved == []


def test_one_position_of_a_thousand_million_costs_an_audit_nothing(tmp_path):
    with Journal.open(tmp_path, max_mb=10) as journal:
        journal.add_event("resume", step=0, version=0, position=0, open=[])
        for position in (0, 1, 10**9):
            journal.add_event("admit", position=position, uid=f"t{position}", finished=0, continued=0)
    assert audit(tmp_path).problems == (f"tasks 2 to {10**9 - 1} were skipped",)


def test_nobody_else_may_read_a_run_directory(tmp_path):
    run_dir = tmp_path / "run"
    with Journal.open(run_dir, max_mb=16, config_yaml="a: 1\n") as journal:
        journal.add(sample())
        journal.add_metrics(1, {"loss": 0.5})
        journal.flush_blocking()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (run_dir, *run_dir.iterdir())}
    assert modes.pop("run") == 0o700
    assert set(modes.values()) == {0o600}, modes


def test_run_json_has_the_status_and_the_cause(tmp_path):
    with pytest.raises(RunError), Journal.open(tmp_path, max_mb=16):
        raise RunError("the engine\nis gone")
    (start,) = read_starts(tmp_path)
    assert (start.status, start.cause) == (RunStatus.FAILED, "RunError: the engine is gone")
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.interrupt("SIGTERM")
        assert read_starts(tmp_path)[-1].status is RunStatus.INTERRUPTED
    assert (read_starts(tmp_path)[-1].status, read_starts(tmp_path)[-1].cause) == (RunStatus.INTERRUPTED, "SIGTERM")
