"""A training run whose tasks a sampler chooses: the same tasks after a resume, shares as metrics, errors by name."""

import json
from zlib import crc32

import pytest

from tests.schedules import Rollout, Trial, words_for
from tests.unit.test_inspect_audit import Disk, Doomed
from tests.virtual_time import run
from treadle.errors import ConfigError
from treadle.inspect.audit import audit
from treadle.journal import JournalReader

DRAWS = [f"t{at}{again}" for at in range(6) for again in ("", *(f"@{k}" for k in range(1, 30)))]
DULL = [uid for uid in DRAWS if crc32(uid.encode()) % 5 < 3]
"""Draws that are removed on the way to a batch: all of their samples are solved."""
WORDS = ("trainer.total_training_steps=8", "algorithm.filter_groups.enable=true")


class JsonDisk(Disk):
    """Checkpoints whose state is JSON, as that of real ones is."""

    def save(self, policy, critic, step, state, reference=None):
        super().save(policy, critic, step, json.loads(json.dumps(state)), reference)


class Chained:
    """Each choice follows from everything it was asked and told before, in that order."""

    def __init__(self, tasks) -> None:
        self.uids, self.past = [task.uid for task in tasks], 0

    def next(self, count):
        chosen = [self.uids[crc32(f"{self.past}/{at}".encode()) % len(self.uids)] for at in range(count)]
        self.past = crc32(f"{self.past}{chosen}".encode())
        return chosen

    def tell(self, results):
        self.past = crc32(f"{self.past}{results}".encode())

    def state(self):
        return self.past

    def load_state(self, state):
        self.past = state


def uneven(seed: int):
    """Sessions that end in another order in every start."""
    return lambda uid: 0.1 + (crc32(f"{uid}/{seed}".encode()) % 7) / 10


@pytest.mark.parametrize("sampler", ["success_band", "hard_replay", f"{__name__}:Chained"])
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
@pytest.mark.parametrize("killed", [True, False])
def test_a_resumed_run_trains_the_tasks_that_an_uninterrupted_one_does(tmp_path, mode, sampler, killed):
    words = words_for(mode, *WORDS, f"data.sampler={sampler}")
    whole = Trial(tmp_path / "whole", Rollout(DULL, uneven(0)), *words, num_tasks=6)
    run(whole.run_to_end())
    disk, batches = JsonDisk(save_freq=2), {}
    for start, moment in enumerate((2.3, 2.1, 1e6)):
        rollout = Rollout(DULL, uneven(start + 1))
        trial = Doomed(tmp_path / "cut", rollout, *words, checkpoints=disk, num_tasks=6, train_s=0.5)
        ended = run(trial.ended_at(moment, killed=killed))
        batches |= {version: [group.task.uid for group in groups] for version, groups in trial.trained}
        assert ended == (start < 2)
    assert list(batches.values()) == whole.batches
    assert len({uid for batch in whole.batches for uid in batch}) == 16, "each draw has a name of its own"
    assert (
        audit(tmp_path / "cut").problems == () and audit(tmp_path / "cut").sampler == audit(tmp_path / "whole").sampler
    )


def test_shares_of_new_and_repeated_tasks_are_metrics_of_each_step(tmp_path):
    run(Trial(tmp_path, Rollout(), *words_for("sync", "data.sampler=success_band"), num_tasks=3).run_to_end())
    with JournalReader.open(tmp_path) as reader:
        metrics = [entry.values for entry in reader.metrics()]
    found = [[item[f"sampler/{name}"] for name in ("new", "repeated", "coverage")] for item in metrics]
    assert found == [[1.0, 0.0, 2 / 3], [0.5, 0.5, 1.0], [0.0, 1.0, 1.0]]


class Exhausted:
    """Has nothing left after the first batch."""

    def __init__(self, tasks) -> None:
        self.left = [task.uid for task in tasks[:2]]

    def next(self, count):
        return [self.left.pop() for _ in range(count)]

    def tell(self, results): ...

    def state(self):
        return self.left

    def load_state(self, state):
        self.left = state


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_sampler_that_breaks_ends_the_run_with_its_name(tmp_path, mode):
    words = words_for(mode, f"data.sampler={__name__}:Exhausted")
    with pytest.raises(ConfigError, match=r"data.sampler: .*:Exhausted: next\(\d\) raised IndexError: pop from empty"):
        run(Trial(tmp_path, Rollout(), *words).run_to_end())
