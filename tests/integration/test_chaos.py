"""Attacks on runs: fifty on three of them, and four on each part that only some have.

A run goes on, or ends and says why; nothing is lost or done twice. Every part is sent every signal: in a plain run, in
one that validates on an engine of its own, and in one whose policy is on two ranks. Agent programs, MCP servers,
classifiers and boxes are killed in runs that have them, and the driver is. `bench/chaos.py` does the same to as many
runs as one likes, at random.
"""

from random import Random

import pytest

from tests.chaos import RANKS, VALIDATED, ChaosRun, Fault, Part, command
from tests.chaos_kinds import KINDS, SIGNALS

ATTACKS = (
    *((part, fault) for part in (Part.WORKER, Part.REWARD) for fault in SIGNALS * 3),
    *((Part.ENGINE, fault) for fault in SIGNALS * 2),
)
VALIDATION_ATTACKS = tuple((Part.VALIDATION, fault) for fault in SIGNALS * 2)
RANK_ATTACKS = tuple((Part.RANK, fault) for fault in SIGNALS)
ENDS = {
    Fault.KILL: -9,
    Fault.TERM: 130,
    Fault.INT: 130,
    Fault.HUP: 130,
    Fault.FULL_DISK: 1,
    Fault.VANISHED: 1,
}


def _dealt(rng: Random) -> list[tuple[Part, Fault]]:
    """All attacks at random, but for those on a replaceable part, which are dealt over the driver's starts.

    A supervisor gives up a part that ended four times in a row within a minute each: a fast machine would come to that.
    """
    starts = [list(ATTACKS[number :: len(ENDS)]) for number in range(len(ENDS))]
    rng.shuffle(starts)
    for start in starts:
        rng.shuffle(start)
    return [attack for start, fault in zip(starts, ENDS, strict=True) for attack in (*start, (Part.DRIVER, fault))]


def test_whatever_is_attacked_nothing_is_lost_and_nothing_is_trained_twice(tmp_path):
    rng = Random(3)
    attacks = _dealt(rng)
    assert len(attacks) + len(VALIDATION_ATTACKS) + len(RANK_ATTACKS) == 50
    with ChaosRun(tmp_path / "run") as run:
        for part, fault in attacks:
            cycle = run.cycle(rng, part, fault)
            expected = ENDS[fault] if part is Part.DRIVER else None  # None: it is replaced, and the run goes on
            assert cycle.status == expected, f"{part}, {fault}: {cycle.cause}"
            assert not cycle.problems, f"{part}, {fault}: {cycle.problems}"
            if fault is Fault.FULL_DISK:
                assert "no file may grow beyond 4,096 bytes (RLIMIT_FSIZE)" in cycle.cause
        assert run.finish() == 130
    audited = command("audit", tmp_path / "run")
    assert audited.returncode == 0, audited.stdout
    assert "none skipped, none trained twice" in audited.stdout
    replayed = command("replay", tmp_path / "run")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "every step gives the weights it gave then" in replayed.stderr


@pytest.mark.parametrize(
    ("words", "attacks"), [(VALIDATED, VALIDATION_ATTACKS), (RANKS, RANK_ATTACKS)], ids=["validation", "ranks"]
)
def test_what_not_every_run_has_is_attacked_too(tmp_path, words, attacks):
    """Where a part cannot be replaced the run ends, not well and with a cause, and is started again."""
    rng = Random(3)
    with ChaosRun(tmp_path / "run", words) as run:
        for part, fault in attacks:
            cycle = run.cycle(rng, part, fault)
            assert not cycle.problems, f"{part}, {fault}: {cycle.problems}"
        assert run.finish() == 130
    assert "none skipped, none trained twice" in command("audit", tmp_path / "run").stdout


@pytest.mark.parametrize("name", ["program", "mcp", "classifier", "box"])
def test_programs_servers_classifiers_and_boxes_are_replaced_and_end_with_the_driver(tmp_path, name):
    kind = KINDS[name]
    if problem := kind.missing():
        pytest.skip(f"{name}: {problem}")
    assert kind.part is not None
    rng = Random(3)
    own = [(kind.part, fault) for fault in (Fault.KILL, rng.choice(SIGNALS[1:]))]
    with ChaosRun(tmp_path / "run", kind.words(tmp_path)) as run:
        for part, fault in [own[0], (Part.DRIVER, Fault.KILL), own[1]]:
            cycle = run.cycle(rng, part, fault)
            assert cycle.status == (-9 if part is Part.DRIVER else None), f"{part}, {fault}: {cycle.cause}"
            assert not cycle.problems, f"{part}, {fault}: {cycle.problems}"
        assert run.finish() == 130
    assert "none skipped, none trained twice" in command("audit", tmp_path / "run").stdout
