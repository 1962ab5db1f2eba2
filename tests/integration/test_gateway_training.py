"""Whole runs whose agents speak to the gateway: asynchronous, updated in mid-request, killed, resumed, replayed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import Start, command, run_python, tiny_run
from tests.integration.test_async_training import REPLAY, checksums, trained_tokens
from treadle.journal import JournalReader
from treadle.types import Trajectory

STEPS = 5
AGENT = "rollout.agent.loops.function_agent.kwargs.function"
WORDS = (
    *tiny_run(STEPS),
    "trainer.mode=fully_async",
    "trainer.max_staleness=2",
    "trainer.on_weight_update=continue",
    "checkpoint.save_freq=1",
    "rollout.nnodes=1",
    "rollout.agent.default_agent_loop=function_agent",
    f"{AGENT}=tests.gateway_agents:slow_calculator",
    "rollout.agent.num_workers=1",
)
"""One agent worker in a process of its own, an engine in another, and versions that overlap."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after two steps, and went on to its end by the same command."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    with Start(run_dir, *WORDS) as start:
        assert start.wait_for("two steps", lambda: start.steps >= 2), start.said()
        start.kill()
    with Start(run_dir, *WORDS) as start:
        assert start.end() == 0, start.said()
    return run_dir


def trajectories(run_dir: Path) -> Iterator[Trajectory]:
    with JournalReader.open(run_dir) as reader:
        yield from (entry.trajectory for entry in reader.trajectories())


def test_a_killed_run_of_agents_goes_on_and_trains_every_task_once(killed: Path) -> None:
    audited = command("audit", killed)
    assert audited.returncode == 0, audited.stdout
    assert "none skipped, none trained twice" in audited.stdout
    with JournalReader.open(killed) as reader:
        assert [event.fields["version"] for event in reader.events(kind="step")][-1] == STEPS
        assert {event.start for event in reader.events(kind="step")} == {1, 2}


def test_every_step_of_it_replays_to_the_same_weights(killed: Path) -> None:
    replayed = run_python(REPLAY, str(killed))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("the same weights") >= STEPS and len(checksums(killed)) >= STEPS


def test_agents_notice_nothing_of_weight_updates_and_of_the_kill(killed: Path) -> None:
    kept = [one for one in trajectories(killed) if one.outcome.ok]
    assert kept and all("engine_failures" not in one.extra["gateway"] for one in kept)
    assert {kind for one in kept for kind in one.extra["gateway"].get("echoes", {})} <= {"exact"}
    versions = [{at for row in one.rows for at in row.versions if at >= 0} for one in kept]
    assert max(max(found) for found in versions) > 0
    for trained_by, sampled in trained_tokens(killed):
        assert all(trained_by - version <= 2 for version in sampled)
