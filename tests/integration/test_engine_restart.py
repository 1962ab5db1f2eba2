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

from tests.chaos import Part, Start, command, tiny_run
from treadle.journal import JournalReader

STEPS = 6
WORDS = (*tiny_run(STEPS), "rollout.nnodes=1", "rollout.multi_turn.tools=tests.chaos:calculate")


Tokens = dict[tuple[str, int], list[tuple[int, ...]]]


def train(run_dir: Path, kills: int, *words: str) -> tuple[Tokens, set[int], list[str]]:
    """What was sampled, the versions, and who was started again. Sessions are slow, so that kills find them open."""
    rng = Random(5)
    with Start(run_dir, *WORDS, *words) as start:
        for kill in range(kills):
            assert start.wait_for(f"step {kill}", lambda kill=kill: start.steps > kill), start.said()
            time.sleep(rng.uniform(0.0, 0.7))
            engines = start.parts().get(Part.ENGINE)
            if engines:  # else it is being started again
                os.kill(engines[0], signal.SIGKILL)
        assert start.end() == 0, start.said()
    with JournalReader.open(run_dir) as reader:
        records = [entry.trajectory for entry in reader.trajectories()]
        tokens = {(record.uid, record.sample): [row.ids for row in record.rows] for record in records}
        versions = {event.fields["version"] for event in reader.events(kind="weights")}
        return tokens, versions, [event.fields["successor"] for event in reader.events(kind="replica")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    tokens, _, again = train(tmp_path_factory.mktemp("undisturbed"), 0)
    assert tokens and not again
    return tokens


@pytest.mark.parametrize(("engines", "kills"), [(1, 3), (2, 1)])
def test_a_run_whose_engines_are_killed_trains_on_the_same_tokens(
    tmp_path: Path, undisturbed: Tokens, engines: int, kills: int
) -> None:
    tokens, versions, again = train(tmp_path, kills, f"rollout.replicas_per_node={engines}")
    assert tokens == undisturbed and versions == set(range(1, STEPS + 1))
    assert again and set(again) == {"native-0"}
    audited = command("audit", tmp_path)
    assert audited.returncode == 0 and "none skipped, none trained twice" in audited.stdout


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_an_engine_that_dies_while_a_step_trains_is_started_again_before_the_step_has_ended(
    tmp_path: Path, mode: str
) -> None:
    words = (f"trainer.mode={mode}", "trainer.total_training_steps=3", "rollout.limits.request_timeout_s=20")
    with Start(tmp_path, *WORDS, *words, "actor.ppo_epochs=60") as start:
        assert start.wait_for("a step", lambda: start.steps > 0), start.said()
        (engine,) = start.parts()[Part.ENGINE]
        time.sleep(0.5)
        os.kill(engine, signal.SIGKILL)
        assert start.wait_for("another process", lambda: start.parts().get(Part.ENGINE, [engine]) != [engine])
        assert start.steps == 1, "before the step that trains has ended"
        assert start.end() == 0, start.said()
    with JournalReader.open(tmp_path) as reader:
        assert all(entry.trajectory.outcome.ok for entry in reader.trajectories())
        assert [event.fields["successor"] for event in reader.events(kind="replica")] == ["native-0"]
