import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treadle.errors import RunError
from treadle.journal import Filter, Journal, JournalReader, RunStatus, read_starts
from treadle.types import Outcome, Row, Score, StopReason, Trajectory

NUM_KILLS = 10
PER_FLUSH = 7


def make(uid: str, number: int) -> Trajectory:
    """The same trajectory for the same name, in every process."""
    noise = random.Random(f"{uid}/{number}")
    size = noise.randrange(1, 300)
    row = Row(
        prompt_ids=tuple(noise.randrange(50_000) for _ in range(30)),
        ids=tuple(noise.randrange(50_000) for _ in range(size)),
        mask=tuple(noise.randrange(2) for _ in range(size)),
        logprobs=tuple(-noise.random() for _ in range(size)),
        versions=tuple(noise.randrange(-1, 5) for _ in range(size)),
    )
    messages = ({"role": "user", "content": uid}, {"role": "assistant", "content": "x" * noise.randrange(3000)})
    forks = (row,) * noise.randrange(1, 3)
    return Trajectory(uid, number, forks, Outcome.ended(StopReason.STOP), Score(noise.random()), messages)


def write_for_ever(run_dir: Path, uid: str, max_mb: int) -> None:
    """What the killed process does: after each flush, say how many are on disk."""
    journal = Journal.open(run_dir, max_mb=max_mb)
    number = 0
    while True:
        for _ in range(PER_FLUSH):
            journal.add(make(uid, number))
            journal.add_event("added", number=number)
            number += 1
        journal.flush_blocking()
        os.write(1, f"{number}\n".encode())


def start_and_kill(run_dir: Path, uid: str, max_mb: int, alive_s: float) -> int:
    """How many trajectories the process had said were on disk when it was killed."""
    command = [sys.executable, __file__, str(run_dir), uid, str(max_mb)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(alive_s)
        child.send_signal(signal.SIGKILL)
        said = (first + child.stdout.read()).decode()
    assert child.returncode == -signal.SIGKILL
    return int(said[: said.rindex("\n")].split("\n")[-1])


def check(run_dir: Path, flushed: dict[str, int], after: int) -> int:
    """Whatever the moment of death, what is there is whole and what was flushed is there; the id of the last."""
    with JournalReader.open(run_dir) as reader:
        finished = reader.finished()
        assert finished >= {(uid, number) for uid, count in flushed.items() for number in range(count)}
        for entry in reader.trajectories(Filter(superseded=True), after=after):
            after = entry.headline.id
            if entry.headline.has_body:
                assert entry.trajectory == make(entry.trajectory.uid, entry.trajectory.sample)
        assert len(reader.events(kind="added", limit=1_000_000)) == len(finished)
    connection = sqlite3.connect(run_dir / "journal.sqlite")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    stray = "SELECT count(*) FROM {} WHERE trajectory NOT IN (SELECT id FROM trajectories)"
    assert all(connection.execute(stray.format(table)).fetchone() == (0,) for table in ("rows", "texts"))
    connection.close()
    return after


@pytest.mark.parametrize("max_mb", [1, 1024], ids=["while old bodies are dropped", "with room to spare"])
def test_kill_9_at_any_moment_leaves_whole_trajectories_and_all_that_was_flushed(tmp_path: Path, max_mb: int) -> None:
    moments = random.Random(max_mb)
    flushed: dict[str, int] = {}
    last = 0
    for number in range(NUM_KILLS):
        uid = f"life-{number}"
        flushed[uid] = start_and_kill(tmp_path, uid, max_mb, moments.uniform(0.0, 0.25))
        last = check(tmp_path, flushed, after=last)
    assert sum(flushed.values()) > NUM_KILLS * PER_FLUSH
    with Journal.open(tmp_path, max_mb=max_mb):
        pass
    statuses = [start.status for start in read_starts(tmp_path)]
    assert statuses == [RunStatus.CRASHED] * NUM_KILLS + [RunStatus.FINISHED]


def test_a_live_run_in_another_process_is_refused_by_its_pid(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path), "other", "16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            with pytest.raises(RunError, match=f"in use by pid {child.pid} on "):
                Journal.open(tmp_path, max_mb=16)
        finally:
            child.kill()
    Journal.open(tmp_path, max_mb=16).close_blocking()


def test_a_disk_that_is_really_full_ends_the_journal_and_spares_what_was_flushed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "treadle-test", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        run_dir = disk / "run"
        journal = Journal.open(run_dir, max_mb=1024)
        flushed = 0
        with pytest.raises(RunError, match=r"no space left.*Lost: .*Trajectory"):
            while True:
                journal.add(make("task", flushed))
                journal.flush_blocking()
                flushed += 1
        with pytest.raises(RunError, match="no space left"):
            journal.close_blocking()
        assert flushed > 10
        with JournalReader.open(run_dir) as reader:
            assert reader.finished() == {("task", number) for number in range(flushed)}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
