"""Engines that are killed while a run of one machine uses them: it trains on the same tokens as undisturbed.

Their logprobs may differ in the last bits, as what was decoded before is prefilled now, and not every CPU rounds both
alike; so weights are the same to rounding, and on many machines bit for bit.
"""

import os
import signal
import time
from pathlib import Path
from random import Random

import pytest

from tests.chaos import VALIDATED, Part, Start, command, tiny_run
from treadle.errors import RunError
from treadle.journal import JournalReader

STEPS = 6
WORDS = (*tiny_run(STEPS), "rollout.nnodes=1", "rollout.multi_turn.tools=tests.chaos:calculate")


Tokens = dict[tuple[str, int], list[tuple[int, ...]]]


def train(run_dir: Path, kills: int, *words: str) -> tuple[Tokens, set[int], list[str], int]:
    """What was sampled, the versions, what was started again, and how many were killed.

    Sessions are slow, so that kills find them open.
    """
    rng, killed = Random(5), 0
    with Start(run_dir, *WORDS, *words) as start:
        for kill in range(kills):
            assert start.wait_for(f"step {kill}", lambda kill=kill: start.steps > kill), start.said()
            time.sleep(rng.uniform(0.0, 0.7))
            engines = start.parts().get(Part.ENGINE)
            if engines:  # else it is being started again
                os.kill(engines[0], signal.SIGKILL)
                killed += 1
        assert start.end() == 0, start.said()
    with JournalReader.open(run_dir) as reader:
        records = [entry.trajectory for entry in reader.trajectories()]
        tokens = {(record.uid, record.sample): [row.ids for row in record.rows] for record in records}
        versions = {event.fields["version"] for event in reader.events(kind="weights")}
        return tokens, versions, [event.fields["replacement"] for event in reader.events(kind="replica")], killed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    tokens, _, again, _ = train(tmp_path_factory.mktemp("undisturbed"), 0)
    assert tokens and not again
    return tokens


@pytest.mark.parametrize(("engines", "kills"), [(1, 3), (2, 1)])
def test_a_run_whose_engines_are_killed_trains_on_the_same_tokens(
    tmp_path: Path, undisturbed: Tokens, engines: int, kills: int
) -> None:
    tokens, versions, again, killed = train(tmp_path, kills, f"rollout.replicas_per_node={engines}")
    assert tokens == undisturbed and versions == set(range(1, STEPS + 1))
    assert killed and set(again) <= {"native-0"}
    assert again or engines > 1, "with another engine the run may be over before the first is back"
    audited = command("audit", tmp_path)
    assert audited.returncode == 0 and "none skipped, none trained twice" in audited.stdout


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_an_engine_that_dies_while_a_step_trains_is_started_again_before_the_step_has_ended(
    tmp_path: Path, mode: str
) -> None:
    words = (f"trainer.mode={mode}", "trainer.total_training_steps=3", "rollout.limits.request_timeout_s=120")
    with Start(tmp_path, *WORDS, *words, "actor.ppo_epochs=60") as start:
        assert start.wait_for("a step", lambda: start.steps > 0), start.said()
        (engine,) = start.parts()[Part.ENGINE]
        assert start.wait_for("the groups of step 2", lambda: num_finished(tmp_path) >= 8), start.said()
        os.kill(engine, signal.SIGKILL)
        assert start.wait_for("another process", lambda: start.parts().get(Part.ENGINE, [engine]) != [engine])
        assert start.steps == 1, "before the step that trains has ended"
        assert start.end() == 0, start.said()
    with JournalReader.open(tmp_path) as reader:
        assert all(entry.trajectory.outcome.ok for entry in reader.trajectories())
        assert [event.fields["replacement"] for event in reader.events(kind="replica")] == ["native-0"]


def test_an_engine_that_dies_while_it_validates_costs_one_validation_at_most(tmp_path: Path) -> None:
    words = ("trainer.total_training_steps=7", "rollout.agent.num_workers=0")
    with Start(tmp_path, *VALIDATED, *words) as start:
        killed = []
        for step in (3, 6):
            assert start.wait_for(f"step {step}", lambda step=step: start.steps >= step), start.said()
            (engine,) = start.parts()[Part.VALIDATION]
            os.kill(engine, signal.SIGKILL)
            killed.append(engine)
            assert start.wait_for(
                "another", lambda: start.steps >= 7 or start.parts().get(Part.VALIDATION, killed)[0] not in killed
            ), start.said()
        assert start.end() == 0, start.said()
    with JournalReader.open(tmp_path) as reader:
        again = [event.fields for event in reader.events(kind="replica")]
        lost = {event.fields["step"] for event in reader.events(kind="validation_lost")}
        done = {metrics.step for metrics in reader.metrics() if "validation/success" in metrics.values}
    assert again and {recovery["replica"] for recovery in again} == {"validation-0"}
    assert done | lost == {0, 3, 6, 7} and {0, 7} <= done


ALONE = ("rollout.n=4", "data.train_max_samples=200", "rollout.multi_turn.tools=tests.chaos:calculate")


def num_finished(run_dir: Path) -> int:
    try:
        with JournalReader.open(run_dir) as reader:
            return sum(1 for _ in reader.headlines())
    except RunError:
        return 0


def test_a_rollout_that_stands_alone_records_the_restart_of_its_engine(tmp_path: Path) -> None:
    words = ("rollout.n=2", "data.train_max_samples=40", ALONE[-1])
    with Start(tmp_path, *words, command="rollout") as start:
        assert start.wait_for("a trajectory", lambda: num_finished(tmp_path) > 0), start.said()
        os.kill(start.parts()[Part.ENGINE][0], signal.SIGKILL)
        assert start.end() == 0, start.said()
    with JournalReader.open(tmp_path) as reader:
        assert [event.fields["replacement"] for event in reader.events(kind="replica")] == ["native-0"]
        assert all(entry.trajectory.outcome.ok for entry in reader.trajectories())


def test_a_rollout_that_stands_alone_ends_with_its_last_engine_and_fails_no_trajectory(tmp_path: Path) -> None:
    """As training does: the next start goes on with the samples that are missing."""
    with Start(tmp_path, *ALONE, command="rollout") as start:
        assert start.wait_for("a trajectory", lambda: num_finished(tmp_path) > 0), start.said()
        killed: set[int] = set()

        def attack() -> bool:
            for engine in start.parts().get(Part.ENGINE, []):
                if engine not in killed:
                    os.kill(engine, signal.SIGKILL)
                    killed.add(engine)
            return False

        assert not start.wait_for("the end", attack)
        assert start.end() == 1 and "no replica is left, and none could be started again" in start.said()
    with JournalReader.open(tmp_path) as reader:
        assert all(entry.trajectory.outcome.ok for entry in reader.trajectories())
        assert reader.events(kind="replica")[-1].fields["replacement"] is None
