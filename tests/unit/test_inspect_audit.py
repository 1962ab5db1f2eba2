"""Audit of a run: right across kills and resumes, and a task that is skipped, repeated or lost is found."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules import BASE, Checkpoints, Policy, Rollout, Trial, words_for
from tests.unit.test_schedules import tail
from tests.virtual_time import run
from treadle.checkpoint.store import Progress
from treadle.config import loads
from treadle.errors import RunError
from treadle.inspect.audit import Audit, SamplerBooks, audit
from treadle.inspect.replay import replay
from treadle.journal import Journal
from treadle.trainer.state import RunInterrupted
from treadle.trainer.step import StepParts
from treadle.types import Row

Note = tuple[str, dict[str, Any]]

STEPS = 8
BATCH = 2
TASKS = 30


def start(step: int = 0, position: int = 0, open: Iterable[int] = ()) -> Note:
    return "resume", {"step": step, "position": position, "open": [*open]}


def admit(*positions: int, finished: int = 0, continued: int = 0) -> list[Note]:
    reuse = {"finished": finished, "continued": continued}
    return [("admit", {"position": position, "uid": f"t{position}", **reuse}) for position in positions]


def train(step: int, *positions: int, uids: Iterable[str] | None = None) -> Note:
    groups = [[uid, []] for uid in uids or [f"t{position}" for position in positions]]
    return "step", {"step": step, "positions": [*positions], "groups": groups}


def remove(position: int) -> Note:
    return "remove", {"position": position}


def stale(position: int) -> Note:
    return "stale", {"position": position}


def save(step: int, position: int, open: Iterable[int] = ()) -> Note:
    return "checkpoint", {"step": step, "position": position, "open": [*open]}


def books_of(directory: Path, *notes: Note | list[Note]) -> Audit:
    """The audit of a journal with these events."""
    with Journal.open(directory, max_mb=10) as journal:
        for note in notes:
            for kind, fields in note if isinstance(note, list) else [note]:
                journal.add_event(kind, **fields)
    return audit(directory)


def test_a_run_from_end_to_end_has_every_task_in_one_place(tmp_path):
    found = books_of(
        tmp_path,
        start(),
        admit(0, 1, 2),
        remove(1),
        admit(3),
        train(1, 0, 2),
        save(1, 4, [3]),
        admit(4),
        train(2, 3, 4),
        save(2, 5),
    )
    assert found == Audit(1, 2, trained=4, removed=1, open=0, trained_again=0, reused=0, continued=0, problems=())


def test_what_a_crash_undid_is_trained_again_and_counts_once(tmp_path):
    found = books_of(
        tmp_path,
        [start(), *admit(0, 1, 2, 3)],
        [train(1, 0, 1), save(1, 4, [2, 3])],
        [train(2, 3, 2), *admit(4, 5), remove(4)],
        [start(1, 4, [2, 3]), *admit(2, finished=3), *admit(3, continued=1), *admit(4, 5)],
        [train(2, 2, 3), train(3, 4, 5), save(3, 6)],
    )
    assert found == Audit(2, 3, trained=6, removed=0, open=0, trained_again=2, reused=3, continued=1, problems=())


def test_of_two_checkpoints_after_one_step_the_books_go_back_to_the_one_that_was_found(tmp_path):
    """The second was killed on its way to the disk; what was removed before it is admitted again."""
    before = [start(), *admit(0, 1, 2, 3), train(1, 0, 1), save(1, 4, [2, 3]), remove(2), *admit(4), save(1, 5, [3, 4])]
    after_first = [start(1, 4, [2, 3]), *admit(2, 3), train(2, 2, 3)]
    after_second = [start(1, 5, [3, 4]), *admit(3, 4), train(2, 3, 4)]
    assert books_of(tmp_path / "first", before, after_first).problems == ()
    assert books_of(tmp_path / "second", before, after_second).problems == ()


def test_a_run_may_begin_with_the_checkpoint_of_another(tmp_path):
    found = books_of(tmp_path, start(7, 20, [12, 19]), admit(12, 19, 20), train(8, 12, 19), save(8, 21, [20]))
    assert found == Audit(1, 1, trained=2, removed=0, open=1, trained_again=0, reused=0, continued=0, problems=())


def test_a_task_that_was_begun_again_is_open_once(tmp_path):
    found = books_of(tmp_path, start(), admit(0, 1), stale(0), admit(0), train(1, 0, 1), save(1, 2))
    assert (found.trained, found.problems) == (2, ())


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        pytest.param([start(), *admit(0, 2), train(1, 0, 2)], "task 1 was skipped", id="skipped"),
        pytest.param(
            [start(), *admit(0, 1, 2), train(1, 0, 1), train(2, 1, 2)],
            "task 1 was trained in step 2, but it was trained",
            id="trained twice",
        ),
        pytest.param(
            [start(), *admit(0, 1), train(1, 0, 0), save(1, 2, [1])],
            "task 0 was trained in step 1, but it was trained",
            id="trained twice in one step",
        ),
        pytest.param(
            [start(), *admit(0, 1, 2), train(1, 0, 2), save(1, 3)],
            "task 1 was lost: the checkpoint after step 1 has no trace of it",
            id="lost",
        ),
        pytest.param(
            [start(), *admit(0, 1, 2), train(1, 0, 1), save(1, 3, [1, 2])],
            "task 1 is open in the checkpoint after step 1, but it was trained",
            id="trained and kept open",
        ),
        pytest.param(
            [start(), *admit(0, 1), train(1, 0, 1), save(1, 4)],
            "the checkpoint after step 1 goes on with task 4, but the next is 2",
            id="frontier too far",
        ),
        pytest.param(
            [start(), *admit(0, 1), remove(1), train(1, 0, 1)],
            "task 1 was trained in step 1, but it was removed",
            id="removed and trained",
        ),
        pytest.param(
            [start(), *admit(0, 1), train(1, 0, 1), remove(1)], "task 1 was removed, but it was trained", id="removed"
        ),
        pytest.param([start(), *admit(0), train(1, 0, 1)], "task 1 was trained in step 1, but it was never", id="new"),
        pytest.param([start(), *admit(0, 1, 0)], "task 0 was admitted, but it was open", id="admitted twice"),
        pytest.param([start(), *admit(0, 1), train(2, 0, 1)], "step 2 follows step 0", id="a step is missing"),
        pytest.param(
            [start(), *admit(0, 1), train(1, 0, 1, uids=["t0", "t7"])],
            "task 1 is t1, but step 1 trained t7 for it",
            id="another task",
        ),
        pytest.param(
            [start(), *admit(0, 1), train(1, 0, 1), save(1, 2), start(1, 3)],
            "start 2 went back to step 1 with 0 open tasks of 3: no such checkpoint is recorded",
            id="another checkpoint",
        ),
        pytest.param(
            [start(), *admit(0, 1), train(1, 0), save(1, 2, [1]), start(1, 2, [1]), *admit(2), train(2, 2), save(2, 3)],
            "task 1 was lost: the checkpoint after step 2 has no trace of it",
            id="lost by a resume",
        ),
    ],
)
def test_whatever_breaks_the_books_is_found_and_named(tmp_path, notes, problem):
    problems = books_of(tmp_path, notes).problems
    assert len(problems) == 1
    assert problem in problems[0]


def sampled(drawn: int, note: Note) -> Note:
    return note[0], {**note[1], "sampler": "success_band", "tasks": 5, "drawn": drawn}


def draw(position: int, uid: str, repeat: int) -> list[Note]:
    return [(kind, {**fields, "uid": uid, "repeat": repeat}) for kind, fields in admit(position)]


def test_tasks_that_a_sampler_did_not_draw_are_skipped_and_not_lost(tmp_path):
    first = [draw(0, "a", 0), draw(1, "b", 0), train(1, 0, 1, uids=["a", "b"]), sampled(2, save(1, 2))]
    undone = [draw(2, "a@1", 1), draw(3, "c", 0), train(2, 2, 3, uids=["a@1", "c"])]
    again = [sampled(2, start(1, 2)), draw(2, "b@1", 1), draw(3, "b@2", 2), train(2, 2, 3, uids=["b@1", "b@2"])]
    found = books_of(tmp_path, sampled(0, start()), *first, *undone, *again, sampled(2, save(2, 4)))
    assert found.problems == () and (found.trained, found.trained_again) == (4, 2)
    assert found.sampler == SamplerBooks("success_band", tasks=5, drawn=2, repeated=2)
    assert found.sampler.skipped == 3


def test_a_sampler_that_goes_on_from_another_run_counts_what_was_drawn_there(tmp_path):
    begun = sampled(2, start(3, 6, [5]))
    found = books_of(tmp_path, begun, draw(5, "b", 0), draw(6, "c", 0), train(4, 5, 6, uids=["b", "c"]))
    assert found.problems == ()
    assert found.sampler == SamplerBooks("success_band", tasks=5, drawn=3, repeated=0)


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        ([sampled(1, save(0, 2, [0, 1]))], "the checkpoint after step 0 has 1 tasks that were drawn, but 2 were"),
        (
            [sampled(2, save(0, 2, [0, 1])), sampled(2, start(0, 2, [0, 1])), draw(0, "z", 0)],
            "task 0 is a, but z was admitted again for it",
        ),
    ],
)
def test_what_a_sampler_drew_and_a_checkpoint_has_otherwise_is_found(tmp_path, notes, problem):
    found = books_of(tmp_path, sampled(0, start()), draw(0, "a", 0), draw(1, "b", 0), *notes)
    assert found.problems == (problem,)


def test_a_journal_without_a_start_is_no_training_run(tmp_path):
    with pytest.raises(RunError, match="no training run"):
        books_of(tmp_path)


class Disk(Checkpoints):
    """Checkpoints that the next start finds: what was saved last is what it goes on from."""

    def restore(self, policy, critic, reference=None):
        if not self.saved:
            return None
        step, version, weight, state = self.saved[-1]
        policy.version, policy.weight = version, weight.clone()
        return Progress(step, version, state)

    def save(self, policy, critic, step, state, reference=None):
        self.saved.append((step, policy.version, policy.weight.clone(), state))  # type: ignore[arg-type]


class Doomed(Trial):
    """A run that ends at a moment: killed, so that nothing it does after that reaches the disk, or asked to stop."""

    async def ended_at(self, moment: float, *, killed: bool) -> bool:
        running = asyncio.ensure_future(self.run_to_end())
        await asyncio.wait({running}, timeout=moment)
        if running.done():
            running.result()
            return False
        if killed:
            await self._kill(running)
        else:
            self.run.request_stop()
            with suppress(RunInterrupted):
                await running
        return True

    async def _kill(self, running: "asyncio.Future[Trial]") -> None:
        assert self.rollout.journal is not None
        self.rollout.journal._put = lambda record: None  # type: ignore[method-assign]
        disk, self.checkpoints.saved = list(self.checkpoints.saved), []
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        self.checkpoints.saved = disk


class Witness(Rollout):
    """Every token carries, as its logprob, the weight that sampled it.

    Every start samples something of its own, so that no two starts make the same weights.
    """

    def __init__(self, start: int, seed: int) -> None:
        super().__init__([f"t{at}" for at in range(0, 30, 7)], tail(seed + start))
        self.start = start
        self.weights: dict[int, float] = {}

    def _group(self, item, begun, ended, attempt=0):
        group = super()._group(item, begun, ended, attempt)
        row = Row((1,), (self.start, 9), (1, 1), (self.weights[begun], self.weights[ended]), (begun, ended))
        return replace(group, trajectories=tuple(replace(done, rows=(row,)) for done in group.trajectories))


class Learner(Policy):
    """Its weight follows from what was sampled, too."""

    def train(self, batch):
        metrics = super().train(batch)
        self.weight = self.weight + sum(row.ids[0] for row in batch.rows)
        return metrics


class Judge(Learner):
    """Trains, and remembers which tokens other weights had sampled than those this history has."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [0.0]
        self.strangers: list[tuple[int, float]] = []

    def train(self, batch):
        sampled = [pair for row in batch.rows for pair in zip(row.versions, row.logprobs, strict=True)]
        self.strangers += [(version, weight) for version, weight in sampled if weight != self.weights[version]]
        metrics = super().train(batch)
        self.weights.append(self.weight.item())
        return metrics


@settings(max_examples=10, deadline=None)
@given(
    mode=st.sampled_from(["sync", "one_step_off", "fully_async"]),
    max_staleness=st.integers(0, 3),
    stale=st.sampled_from(["wait", "drop"]),
    save_freq=st.integers(1, 3),
    ends=st.lists(st.tuples(st.floats(0.1, 6.0), st.booleans()), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    sampler=st.sampled_from(["null", "success_band", "hard_replay"]),
)
def test_however_often_a_run_is_killed_or_stopped_its_books_are_right_and_it_replays(
    tmp_path_factory, mode, max_staleness, stale, save_freq, ends, seed, sampler
):
    directory, disk = tmp_path_factory.mktemp("run"), Disk(save_freq=save_freq)
    bounds = (
        (f"trainer.max_staleness={max_staleness}", f"trainer.stale_samples={stale}") if mode == "fully_async" else ()
    )
    words = words_for(mode, *bounds, f"trainer.total_training_steps={STEPS}", "algorithm.filter_groups.enable=true")
    words = (*words, f"data.sampler={sampler}")

    def note_weight(run, version: int) -> None:
        rollout.weights[version] = trial.policy.weight.item()

    for start, (moment, killed) in enumerate([*ends, (1e6, True)]):
        rollout = Witness(start, seed)
        trial = Doomed(directory, rollout, *words, checkpoints=disk, num_tasks=TASKS, train_s=0.5, on_push=note_weight)
        trial.policy = Learner()
        if not run(trial.ended_at(moment, killed=killed)):
            break
    found = audit(directory)
    assert found.problems == ()
    assert (found.steps, found.trained, found.open) == (STEPS, STEPS * BATCH, 0)
    if sampler != "null":
        assert found.sampler is not None and found.sampler.drawn + found.sampler.skipped == TASKS
        assert found.sampler.drawn + found.sampler.repeated == found.trained + found.removed
    config, judge = loads(BASE, "test", words), Judge()
    steps = list(replay(StepParts(judge, config.actor, config.algorithm, config.trainer), directory))
    assert [step.step for step in steps if step.equal] == list(range(1, STEPS + 1))
    assert judge.weight == trial.policy.weight
    assert judge.strangers == [], "tokens were trained that weights of a past which a resume undid had sampled"
