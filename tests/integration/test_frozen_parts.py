"""Parts of a run that are frozen (SIGSTOP): they live and answer nothing. Each is seen by a deadline, and replaced."""

import os
import signal
from pathlib import Path

import pytest

from tests.chaos import FROZEN, FROZEN_RANKS, Part, Start
from tests.proc_tree import is_alive
from treadle.journal import JournalReader


def freeze_all(start: Start, part: Part) -> list[int]:
    """Every process of a part, so that no other does its work."""
    frozen = start.parts()[part]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    return frozen


@pytest.mark.parametrize("part", [Part.ENGINE, Part.WORKER, Part.REWARD])
def test_a_frozen_part_is_killed_and_replaced_and_the_run_goes_on(tmp_path: Path, part: Part) -> None:
    with Start(tmp_path, *FROZEN, "rollout.failures.max_failed_fraction=1.0") as start:
        assert start.wait_for("two steps", lambda: start.steps >= 2), start.said()
        frozen = freeze_all(start, part)
        assert start.wait_for("its end", lambda: not any(map(is_alive, frozen))), start.said()
        before = start.steps
        assert start.wait_for("two more steps", lambda: start.steps >= before + 2), start.said()
        assert start.interrupt() == 130, start.said()
    with JournalReader.open(tmp_path) as reader:
        recoveries = [event.fields for event in reader.events(kind="replica")]
    if part is Part.ENGINE:
        assert recoveries[0]["replacement"] == "native-0"
        assert "it was killed, since there was no answer to a health check" in recoveries[0]["cause"]


def test_a_frozen_rank_ends_the_run_with_its_name_and_the_deadline(tmp_path: Path) -> None:
    with Start(tmp_path, *FROZEN_RANKS) as start:
        assert start.wait_for("two steps", lambda: start.steps >= 2), start.said()
        os.kill(start.parts()[Part.RANK][-1], signal.SIGSTOP)
        assert start.end() == 1
        cause = start.said().splitlines()[-1]
        assert "rank" in cause and "trainer.rank_timeout_s" in cause, cause
