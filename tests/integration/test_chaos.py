"""Fifty attacks on one run: parts that are killed, a full disk, a driver that is told to end or killed.

The run goes on, or ends and says why; nothing is lost or done twice. Every part is sent every signal once, and the
parts that are replaced while the run goes on, which takes a few seconds, are sent each four times more. All of it takes
270 seconds of CPU time. `bench/chaos.py` does the same to as many runs as one likes, at random, with ranks and the
engine of validation too.
"""

from random import Random

from tests.chaos import ChaosRun, Fault, Part, command

SIGNALS = (Fault.KILL, Fault.TERM, Fault.INT, Fault.HUP)
REPLACED = (Part.WORKER, Part.REWARD)
ATTACKS = (
    *((part, fault) for part in (*REPLACED, Part.ENGINE) for fault in SIGNALS),
    *((part, fault) for part in REPLACED for fault in SIGNALS * 4),
)
ENDS = {
    Fault.KILL: -9,
    Fault.TERM: 130,
    Fault.INT: 130,
    Fault.HUP: 130,
    Fault.FULL_DISK: 1,
    Fault.VANISHED: 1,
}


def test_whatever_is_attacked_nothing_is_lost_and_nothing_is_trained_twice(tmp_path):
    rng = Random(3)
    attacks = [*ATTACKS, *((Part.DRIVER, fault) for fault in ENDS)]
    assert len(attacks) == 50
    rng.shuffle(attacks)
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
