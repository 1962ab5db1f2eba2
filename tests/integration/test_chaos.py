"""Kill -9 of any part at any moment: the run goes on, or ends and says why; and nothing is lost or done twice.

`bench/chaos.py` does the same for as many cycles as one likes.
"""

from random import Random

from tests.chaos import Part, command, finish, run_cycle


def test_whatever_is_killed_nothing_is_lost_and_nothing_is_trained_twice(tmp_path):
    rng = Random(3)
    assert run_cycle(tmp_path, rng, Part.DRIVER).status is None
    for part in (Part.WORKER, Part.REWARD, Part.ENGINE):
        assert run_cycle(tmp_path, rng, part).status is None, "the process is replaced, and the run goes on"
    killed = run_cycle(tmp_path, rng, Part.VALIDATION)
    assert killed.status == 1
    assert "died: killed by SIGKILL" in killed.cause, "the run says what ended it"
    assert finish(tmp_path) == 130
    audited = command("audit", tmp_path)
    assert audited.returncode == 0, audited.stdout
    assert "none skipped, none trained twice" in audited.stdout
    replayed = command("replay", tmp_path)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "every step gives the weights it gave then" in replayed.stderr
