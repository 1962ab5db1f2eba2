"""The asynchronous schedules as a person runs them: parity with sync, bounded staleness, replay, Ctrl-C and resume."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos import Start, command, run_python, tiny_run
from treadle.journal import Event, JournalReader

STEPS = 4
TINY = tiny_run(STEPS)
APART = ("rollout.nnodes=1",)
FILTERED = ("algorithm.filter_groups.enable=true",)
SLOW = ("rollout.multi_turn.tools=tests.chaos:calculate",)
"""Tool calls that take up to a second and a half, so that weight updates find sessions half done."""

ON_UPDATE = ("continue", "recompute", "wait", "drop")

RUNS = {
    "sync": FILTERED,
    "fresh": ("trainer.mode=fully_async", "trainer.max_staleness=0", *APART, *FILTERED),
    "one_step_off": ("trainer.mode=one_step_off", *APART, *SLOW),
    **{
        name: ("trainer.mode=fully_async", "trainer.max_staleness=2", f"trainer.on_weight_update={name}", *APART, *SLOW)
        for name in ON_UPDATE
    },
}
LAG = {"sync": 0, "fresh": 0, "one_step_off": 1, **dict.fromkeys(ON_UPDATE, 2)}

Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Run directories by name; each run happens once, when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        if not (folder / name).exists():
            with Start(folder / name, *TINY, *RUNS[name]) as start:
                assert start.end() == 0, start.said()
        return folder / name

    return run


def events(run_dir: Path, kind: str) -> tuple[Event, ...]:
    with JournalReader.open(run_dir) as reader:
        return reader.events(kind=kind)


def checksums(run_dir: Path) -> list[str]:
    """Of the weights after each step, as the engines confirmed them."""
    return [event.fields["checksum"] for event in events(run_dir, "weights")]


def trained_tokens(run_dir: Path) -> Iterator[tuple[int, list[int]]]:
    """The version that each trajectory was trained by, and those that sampled its tokens."""
    with JournalReader.open(run_dir) as reader:
        for event in reader.events(kind="step"):
            for uid, samples in event.fields["groups"]:
                for sample, attempt in samples:
                    entry = reader.trajectory(uid, sample, attempt)
                    assert entry is not None
                    versions = [at for row in entry.trajectory.rows for at in row.versions if at >= 0]
                    yield event.fields["version"] - 1, versions


def test_staleness_zero_gives_the_weights_of_sync_bit_for_bit(runs: Runs) -> None:
    """Though one samples from the policy's own weights and the other in another process; both filter groups."""
    assert len(checksums(runs("sync"))) == STEPS
    assert checksums(runs("fresh")) == checksums(runs("sync"))
    assert len(set(checksums(runs("sync")))) == STEPS
    trained = [[event.fields["groups"] for event in events(runs(name), "step")] for name in ("sync", "fresh")]
    assert trained[0] == trained[1]
    removed = [[event.fields["uid"] for event in events(runs(name), "remove")] for name in ("sync", "fresh")]
    assert sorted(removed[0]) == sorted(removed[1]) and removed[0], "some groups had no signal"


@pytest.mark.parametrize("name", ["one_step_off", *ON_UPDATE])
def test_no_token_is_older_than_the_bound(runs: Runs, name: str) -> None:
    trained = list(trained_tokens(runs(name)))
    assert len(trained) == STEPS * 4
    ages = [version - at for version, versions in trained for at in versions]
    assert 0 < max(ages) <= LAG[name]
    assert min(ages) >= 0
    mixed = [versions for _, versions in trained if len(set(versions)) > 1]
    if name in ("one_step_off", "wait", "drop"):
        assert not mixed, "every trajectory was sampled by one version alone"
    else:
        assert mixed, "sessions went on with new weights"
        assert all(versions == sorted(versions) for versions in mixed)


def test_every_run_replays_to_its_weights_bit_for_bit(runs: Runs) -> None:
    replayed = run_python(REPLAY, *(str(runs(name)) for name in RUNS))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("the same weights") == STEPS * len(RUNS)


REPLAY = """
import sys
from treadle.cli.main import main
for run_dir in sys.argv[1:]:
    try:
        main(["replay", run_dir])
    except SystemExit as end:
        if end.code:
            raise
"""


def test_every_run_leaves_a_timeline_and_right_books(runs: Runs) -> None:
    assert "timeline.svg" in {path.name for path in runs("continue").iterdir()}
    audited = command("audit", runs("drop"))
    assert audited.returncode == 0, audited.stdout
    assert f"{STEPS * 2} trained" in audited.stdout


def test_ctrl_c_saves_within_its_deadline_and_the_same_command_goes_on_with_what_was_sampled(tmp_path: Path) -> None:
    words = (*TINY, *RUNS["continue"], "trainer.total_training_steps=6", "rollout.agent.num_workers=2")
    with Start(tmp_path, *words) as start:
        assert start.wait_for("two steps", lambda: start.steps >= 2), start.said()
        began = time.monotonic()
        assert start.interrupt() == 130
        assert time.monotonic() - began < 45
    open_ = events(tmp_path, "checkpoint")[-1].fields["open"]
    with Start(tmp_path, *words) as start:
        assert start.end() == 0, start.said()
    again = [event.fields for event in events(tmp_path, "admit") if event.start == 2]
    assert [fields["position"] for fields in again][: len(open_)] == open_
    assert sum(fields["finished"] + fields["continued"] for fields in again) > 0
    audited = command("audit", tmp_path)
    assert "none skipped, none trained twice" in audited.stdout, audited.stdout
    assert "0 were trained in steps that a crash undid" in audited.stdout
