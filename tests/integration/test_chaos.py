"""Any signal to any part, a full disk, a run directory taken away: the run goes on, or ends and says why.

Nothing is lost or done twice. `bench/chaos.py` does the same for as many cycles as one likes.
"""

from random import Random

from tests.chaos import ChaosRun, Fault, Part, command

REPLACED = (Part.WORKER, Part.REWARD, Part.ENGINE)


def test_whatever_is_attacked_nothing_is_lost_and_nothing_is_trained_twice(tmp_path):
    with ChaosRun(tmp_path / "run", Random(3)) as run:
        for part in REPLACED:
            for fault in (Fault.KILL, Fault.TERM, Fault.INT, Fault.HUP):
                assert run.cycle(part, fault).status is None, f"{part}: it is replaced, and the run goes on"
        full = run.cycle(Part.DRIVER, Fault.FULL_DISK)
        assert full.status == 1
        vanished = run.cycle(Part.DRIVER, Fault.VANISHED)
        assert vanished.status == 1
        for fault in (Fault.TERM, Fault.HUP, Fault.INT):
            assert run.cycle(Part.DRIVER, fault).status == 130
        assert run.cycle(Part.DRIVER, Fault.KILL).status == -9
        run.cycle(Part.VALIDATION, Fault.KILL)
        assert run.finish() == 130
    audited = command("audit", tmp_path / "run")
    assert audited.returncode == 0, audited.stdout
    assert "none skipped, none trained twice" in audited.stdout
    replayed = command("replay", tmp_path / "run")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "every step gives the weights it gave then" in replayed.stderr
