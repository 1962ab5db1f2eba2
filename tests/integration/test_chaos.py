"""Parts that are killed, a full disk, a driver that is told to end or killed: the run goes on, or ends and says why.

Nothing is lost or done twice. `bench/chaos.py` does the same with every signal, for as many cycles as one likes.
"""

from random import Random

from tests.chaos import ChaosRun, Fault, Part, command

REPLACED = (Part.WORKER, Part.REWARD, Part.ENGINE)


def test_whatever_is_attacked_nothing_is_lost_and_nothing_is_trained_twice(tmp_path):
    with ChaosRun(tmp_path / "run") as run:
        rng = Random(3)
        for part in REPLACED:
            for fault in (Fault.KILL, Fault.TERM):
                assert run.cycle(rng, part, fault).status is None, f"{part}: it is replaced, and the run goes on"
        full = run.cycle(rng, Part.DRIVER, Fault.FULL_DISK)
        assert full.status == 1
        assert "no file may grow beyond 4,096 bytes (RLIMIT_FSIZE)" in full.cause
        assert run.cycle(rng, Part.DRIVER, Fault.TERM).status == 130
        assert run.cycle(rng, Part.DRIVER, Fault.KILL).status == -9
        assert run.finish() == 130
    audited = command("audit", tmp_path / "run")
    assert audited.returncode == 0, audited.stdout
    assert "none skipped, none trained twice" in audited.stdout
    replayed = command("replay", tmp_path / "run")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "every step gives the weights it gave then" in replayed.stderr
