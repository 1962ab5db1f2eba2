"""The three schedules in virtual time: who overlaps whom, how old tokens get, what a death or a stop does to a run."""

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollouts import task
from tests.schedules import Checkpoints, Rollout, Trial, words_for
from tests.virtual_time import run
from treadle.checkpoint.store import Progress
from treadle.errors import BudgetSpent, DeadlineError, EngineFailure, EnginesLost, RunError
from treadle.journal import JournalReader
from treadle.rollout.completion_log import NOTHING_RECOVERED
from treadle.rollout.service import RolloutKind
from treadle.trainer.state import RunInterrupted

MODES = ("sync", "one_step_off", "fully_async")


def trial_of(directory, mode: str, *words: str, rollout: Rollout | None = None, **kwargs) -> Trial:
    trial = Trial(directory, rollout or Rollout(), *words_for(mode, *words), **kwargs)
    return run(trial.run_to_end())


def seconds_of(trial: Trial) -> float:
    """How long a run takes on the virtual clock."""

    async def timed() -> float:
        began = asyncio.get_running_loop().time()
        await trial.run_to_end()
        return asyncio.get_running_loop().time() - began

    return run(timed())


def tail(seed: int):
    """Delays with a long tail, the same for the same task."""
    return lambda uid: Random(f"{seed}/{uid}").expovariate(1.0)


@pytest.mark.parametrize("mode", MODES)
def test_every_schedule_trains_every_task_once_in_order(tmp_path, mode):
    trial = trial_of(tmp_path, mode)
    assert trial.batches == [["t0", "t1"], ["t2", "t3"], ["t4", "t0@1"]]
    assert trial.policy.version == 3


def test_staleness_zero_is_the_synchronous_schedule_whatever_the_delays(tmp_path):
    words = ("algorithm.filter_groups.enable=true", "trainer.total_training_steps=5")
    dull = ("t1", "t4", "t7")
    sync = trial_of(tmp_path / "a", "sync", *words, rollout=Rollout(dull, tail(1)), num_tasks=9)
    async_ = trial_of(
        tmp_path / "b", "fully_async", "trainer.max_staleness=0", *words, rollout=Rollout(dull, tail(2)), num_tasks=9
    )
    assert async_.batches == sync.batches
    assert async_.policy.weight == sync.policy.weight
    assert set(async_.ages()) == {0}


def test_one_step_off_samples_the_next_batch_while_this_one_trains(tmp_path):
    trial = trial_of(tmp_path, "one_step_off", "trainer.total_training_steps=4")
    ages = [version - at for version, groups in trial.trained for at in groups[0].trajectories[0].rows[0].versions]
    assert ages == [0, 0, 1, 1, 1, 1, 1, 1]


def test_one_step_off_pushes_before_its_batch_is_there_where_the_engine_of_that_batch_waits_for_weights(tmp_path):
    """Its only engine died: its replacement waits for a push, the batch for the replacement, the push for nothing."""

    class Restarted(Rollout):
        async def generate_group(self, item, *, past=NOTHING_RECOVERED):
            if item.uid == "t4":
                async with asyncio.timeout(1000):
                    while self.version < 2:
                        waiting.set()
                        await asyncio.sleep(1.0)
            return await super().generate_group(item, past=past)

    waiting = asyncio.Event()
    words = ("trainer.total_training_steps=4",)
    trial = trial_of(tmp_path, "one_step_off", *words, rollout=Restarted(), train_s=10.0, needs_push=waiting.wait)
    (late,) = [group for _, groups in trial.trained for group in groups if group.task.uid == "t4"]
    assert late.trajectories[0].rows[0].versions == (2, 2) and trial.run.step == 4


def test_overlap_takes_the_longer_of_sampling_and_training_where_sync_takes_both(tmp_path):
    took = {}
    for mode in MODES:
        words = words_for(mode, "trainer.total_training_steps=10")
        took[mode] = seconds_of(Trial(tmp_path / mode, Rollout(delay=lambda uid: 10.0), *words, train_s=10.0))
    assert took["sync"] == pytest.approx(200, abs=5)
    assert took["one_step_off"] == pytest.approx(110, abs=5)
    assert took["fully_async"] == pytest.approx(110, abs=5)


@settings(max_examples=40, deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    seed=st.integers(0, 1000),
    train_s=st.sampled_from([0.0, 0.3, 3.0]),
    stale=st.sampled_from(["wait", "drop"]),
    sync_steps=st.integers(1, 3),
)
def test_no_token_is_ever_older_than_the_bound_and_none_is_lost(
    tmp_path_factory, max_staleness, seed, train_s, stale, sync_steps
):
    rollout = Rollout(dull=[f"t{at}" for at in range(0, 30, 7)], delay=tail(seed))
    trial = trial_of(
        tmp_path_factory.mktemp("run"),
        "fully_async",
        f"trainer.max_staleness={max_staleness}",
        f"trainer.stale_samples={stale}",
        f"trainer.parameter_sync_steps={min(sync_steps, max_staleness + 1)}",
        "algorithm.filter_groups.enable=true",
        "trainer.total_training_steps=8",
        rollout=rollout,
        num_tasks=30,
        train_s=train_s,
    )
    assert max(trial.ages()) <= max_staleness
    assert rollout.most_open <= (max_staleness + 1) * 2
    trained = [uid for batch in trial.batches for uid in batch]
    assert len(trained) == len(set(trained)) == 16
    with JournalReader.open(trial.directory) as reader:
        removed = [event.fields["position"] for event in reader.events(kind="remove")]
        positions = [at for event in reader.events(kind="step") for at in event.fields["positions"]]
        admitted = {event.fields["position"] for event in reader.events(kind="admit")}
    assert sorted(positions + removed) == sorted(admitted) == list(range(len(admitted)))


def test_a_straggler_holds_training_up_only_where_it_would_become_too_old(tmp_path):
    slow = {"t0": 100.0}
    delays = lambda uid: slow.get(uid, 1.0)  # noqa: E731
    words = ("trainer.max_staleness=3", "trainer.total_training_steps=8")
    waiting = trial_of(tmp_path / "wait", "fully_async", *words, rollout=Rollout(delay=delays), num_tasks=40)
    assert [("t0" in batch) for batch in waiting.batches].index(True) == 3
    dropping = trial_of(
        tmp_path / "drop",
        "fully_async",
        *words,
        "trainer.stale_samples=drop",
        rollout=Rollout(delay=delays),
        num_tasks=40,
    )
    assert [("t0" in batch) for batch in dropping.batches].index(True) == 7, "begun again until nothing else is left"
    with JournalReader.open(tmp_path / "drop") as reader:
        assert {event.fields["uid"] for event in reader.events(kind="stale")} == {"t0"}


def test_groups_without_a_signal_are_replaced_by_exactly_as_many(tmp_path):
    words = ("algorithm.filter_groups.enable=true", "trainer.total_training_steps=1")
    trial = trial_of(tmp_path, "sync", *words, rollout=Rollout(dull=("t0", "t2")))
    assert [uid for _, uid in trial.rollout.asked] == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize("mode", MODES)
def test_dynamic_sampling_gives_up_at_its_bound_and_says_so(tmp_path, mode):
    words = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2")
    rollout = Rollout(dull=tuple(f"t{at}" for at in range(5)))
    with pytest.raises(RunError, match=r"3 groups were removed for one training step of 2.*3 × no signal"):
        trial_of(tmp_path, mode, *words, rollout=rollout)


@pytest.mark.parametrize("mode", MODES)
def test_the_death_of_any_part_ends_the_run_with_its_cause(tmp_path, mode):
    rollout = Rollout(delay=lambda uid: 5.0)
    rollout.dies = BudgetSpent("too many trajectories failed")
    with pytest.raises(BudgetSpent, match="too many"):
        trial_of(tmp_path, mode, rollout=rollout)


def test_a_part_that_returns_early_ends_the_run(tmp_path):
    rollout = Rollout(delay=lambda uid: 5.0)

    async def return_at_once() -> None:
        return None

    rollout.watch = return_at_once  # type: ignore[method-assign]
    with pytest.raises(RunError, match="watch ended early"):
        trial_of(tmp_path, "fully_async", rollout=rollout)


def test_a_rollout_that_never_answers_is_named_within_a_deadline(tmp_path):
    words = ("rollout.limits.session_timeout_s=10", "rollout.limits.request_timeout_s=10")
    with pytest.raises(DeadlineError, match=r"training waits for 4 groups: t0 \(\d+ s, version 0\)"):
        trial_of(tmp_path, "fully_async", *words, rollout=Rollout(delay=lambda uid: 1e6))


def test_validation_goes_on_beside_training_on_one_fixed_version(tmp_path):
    validating = Rollout(delay=lambda uid: 25.0)
    trial = trial_of(
        tmp_path,
        "fully_async",
        "trainer.total_training_steps=10",
        "trainer.test_freq=4",
        "data.val_files=unused",
        rollout=Rollout(delay=lambda uid: 1.0),
        validation=(task("v"),),
        validation_rollout=validating,
        train_s=10.0,
    )
    assert [found.step for found in trial.run.validations] == [4, 8, 10]
    sampled = [{at for row in found.trajectories[0].rows for at in row.versions} for found in trial.run.validations]
    assert sampled == [{4}, {8}, {10}]
    with JournalReader.open(tmp_path) as reader:
        steps = [event.fields for event in reader.events(kind="spans") if event.fields["step"] < 10]
    assert not [span for step in steps for span in step["spans"] if span[0] == "validation"]


def validated_versions(trial: Trial) -> list[set[int]]:
    return [{at for row in found.trajectories[0].rows for at in row.versions} for found in trial.run.validations]


def validating(mode: str, *words: str) -> tuple[str, ...]:
    return ("trainer.total_training_steps=10", "trainer.test_freq=4", "data.val_files=unused", *words)


@pytest.mark.parametrize("mode", MODES)
def test_every_validation_is_of_the_weights_of_its_step(tmp_path, mode):
    trial = trial_of(tmp_path, mode, *validating(mode), validation=(task("v"),), train_s=1.0)
    assert [found.step for found in trial.run.validations] == [4, 8, 10]
    assert validated_versions(trial) == [{4}, {8}, {10}]


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_training_goes_on_while_validation_shares_the_engines(tmp_path, mode):
    """A step takes 10 s, a validation 9: nobody waits for it between steps. With 25 s only pushes wait."""
    seconds = {}
    for takes_s in (0.0, 9.0, 25.0):
        rollout = Rollout(delay=lambda uid, takes_s=takes_s: takes_s if uid.startswith("validation") else 1.0)
        trial = Trial(
            tmp_path / f"{takes_s}",
            rollout,
            *words_for(mode, *validating(mode)),
            num_tasks=40,
            validation=(task("v"),),
            train_s=10.0,
        )
        seconds[takes_s] = seconds_of(trial)
        assert validated_versions(trial) == [{4}, {8}, {10}]
    assert seconds[9.0] == pytest.approx(seconds[0.0] + 9.0), "the last one, after the last step"
    assert seconds[25.0] <= seconds[0.0] + 25.0 + 2 * 16.0


def test_weights_that_are_not_pushed_after_each_step_are_validated_when_they_are(tmp_path):
    words = validating("fully_async", "trainer.parameter_sync_steps=3", "trainer.max_staleness=3")
    trial = trial_of(tmp_path, "fully_async", *words, validation=(task("v"),), train_s=1.0)
    assert [found.step for found in trial.run.validations] == [6, 9, 10]
    assert validated_versions(trial) == [{6}, {9}, {10}]


def test_an_engine_that_waits_for_weights_is_not_kept_waiting_by_validation(tmp_path):
    """Its only engine died while it validated: what is left of it could never be sampled."""
    rollout = Rollout(delay=lambda uid: 1e9 if uid == "validation-4/v" else 1.0)

    async def wanted() -> None:
        if rollout.version != 4:
            await asyncio.Event().wait()
        await asyncio.sleep(60.0)

    trial = trial_of(
        tmp_path,
        "fully_async",
        *validating("fully_async"),
        rollout=rollout,
        validation=(task("v"),),
        train_s=10.0,
        needs_push=wanted,
    )
    assert [found.step for found in trial.run.validations] == [5, 8, 10]
    assert validated_versions(trial) == [{5}, {8}, {10}]


class FrailValidator(Rollout):
    """Its engines die while they validate step 4; where they `stay_away`, they take no weights from then on."""

    def __init__(self, *, stay_away: bool) -> None:
        super().__init__(delay=lambda uid: 1.0)
        self._stay_away = stay_away
        self._died = False

    async def generate_sequences(self, tasks, *, kind=RolloutKind.TRAINING, seed=None):
        if self.version == 4:
            self._died = True
            raise EnginesLost("validation-0 died")
        return await super().generate_sequences(tasks, kind=kind, seed=seed)

    async def update_weights(self, update, *, running="continue"):
        if self._died and self._stay_away:
            raise EngineFailure("validation-0 could not be started again")
        return await super().update_weights(update, running=running)


@pytest.mark.parametrize("stay_away", [False, True])
def test_engines_of_validation_that_die_cost_one_validation_and_not_the_run(tmp_path, stay_away, capsys):
    trial = trial_of(
        tmp_path,
        "fully_async",
        *validating("fully_async"),
        rollout=Rollout(delay=lambda uid: 1.0),
        validation=(task("v"),),
        validation_rollout=FrailValidator(stay_away=stay_away),
        train_s=10.0,
    )
    assert [found.step for found in trial.run.validations] == [8, 10]
    assert validated_versions(trial) == [{8}, {10}]
    with JournalReader.open(tmp_path) as reader:
        (lost,) = [event.fields for event in reader.events(kind="validation_lost")]
        counted = [metrics.step for metrics in reader.metrics() if "validation/lost" in metrics.values]
    assert lost == {"step": 4, "reason": "validation-0 died"} and counted == [4]
    said = capsys.readouterr().err
    assert "the validation of step 4 is lost: validation-0 died" in said
    assert ("validation shares the rollout's engines from now on" in said) == stay_away
    shared = [uid for kind, uid in trial.rollout.asked if kind is RolloutKind.VALIDATION]
    assert shared == (["validation-8/v", "validation-10/v"] if stay_away else [])


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_keeps_what_is_half_done_and_a_resume_goes_on_from_there(tmp_path, mode):
    def stop(run, version):
        if version == 2:
            run.request_stop()

    first = Trial(
        tmp_path / "a",
        Rollout(delay=tail(3)),
        *words_for(mode, "trainer.total_training_steps=6", "trainer.max_staleness=2"),
        num_tasks=40,
        train_s=0.5,
        on_push=stop,
    )

    async def interrupted() -> None:
        with pytest.raises(RunInterrupted):
            await first.run_to_end()

    run(interrupted())
    assert first.rollout.kept == (mode != "sync")
    done = len(first.trained)
    step, state = first.checkpoints.saved[-1]
    assert step == done
    second = Trial(
        tmp_path / "b",
        Rollout(delay=tail(3)),
        *words_for(mode, "trainer.total_training_steps=6", "trainer.max_staleness=2"),
        checkpoints=Checkpoints(Progress(step, first.policy.version, state)),
        num_tasks=40,
    )
    run(second.run_to_end())
    trained = [uid for trial in (first, second) for batch in trial.batches for uid in batch]
    assert sorted(trained) == sorted(f"t{at}" for at in range(12))
