"""Disks that take no more: each end of a run says which file, why, and what to do; no traceback, status 1."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from tests.chaos import run_python
from treadle.disk import explain_disk_error
from treadle.policy.rank_group import RankFailed

WORDS = {
    errno.ENOSPC: ("no space left on the disk", "free some space"),
    errno.EDQUOT: ("quota", "ask for more"),
    errno.EFBIG: ("RLIMIT_FSIZE", "ulimit -f"),
    errno.EROFS: ("read-only", "logging.run_dir"),
    errno.EIO: ("I/O error", "a disk that works"),
}
LIMIT = """
import resource, sys
from pathlib import Path
here = Path(sys.argv[1])
def fill():
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize("number", WORDS)
def test_each_errno_is_explained_whichever_library_met_it(number: int, tmp_path: Path) -> None:
    text = f"{os.strerror(number)} (os error {number})"
    for error in (
        OSError(number, os.strerror(number)),
        RuntimeError(f"Error while serializing: I/O error: {text}"),
        RankFailed(f"policy rank 1 (pid 7) failed: SafetensorError: {text}"),
    ):
        found = explain_disk_error(error, tmp_path)
        assert found is not None, error
        assert WORDS[number][0] in found.problem
        assert WORDS[number][1] in found.fix
    assert explain_disk_error(OSError(errno.EACCES, "Permission denied"), tmp_path) is None
    assert explain_disk_error(ValueError("a bug"), tmp_path) is None


def sqlite_error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("in SQLite's words")
    error.sqlite_errorcode = code
    return error


def test_what_sqlite_calls_an_io_error_is_asked_of_the_disk_again(tmp_path: Path) -> None:
    full = explain_disk_error(sqlite_error(sqlite3.SQLITE_FULL), tmp_path / "journal.sqlite")
    read_only = explain_disk_error(sqlite_error(sqlite3.SQLITE_READONLY_DIRECTORY), tmp_path / "journal.sqlite")
    broken = explain_disk_error(sqlite_error(sqlite3.SQLITE_IOERR_WRITE), tmp_path / "journal.sqlite")
    assert full and "no space left" in full.problem
    assert read_only and "read-only" in read_only.problem
    assert broken and "I/O error" in broken.problem, "the disk takes the same write now"
    assert not [*tmp_path.iterdir()], "nothing is left of the question"


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ("journal.add_event('note', text='x' * 100_000)", "journal.sqlite cannot be written: no file"),
        ("journal.add_metrics(1, {'loss': 0.5})", "metrics.jsonl): no file"),
    ],
)
def test_a_journal_at_the_size_limit_of_files_says_so(record: str, named: str, tmp_path: Path) -> None:
    done = run_python(
        f"""{LIMIT}
from treadle.errors import RunError
from treadle.journal import Journal
(here / "run").mkdir()
(here / "run" / "metrics.jsonl").write_text("{{}}" + " " * 8189 + "\\n")
journal = Journal.open(here / "run", max_mb=100)
fill()
{record}
try:
    journal.close_blocking()
except RunError as error:
    print(error)
""",
        str(tmp_path),
    )
    assert named in done.stdout, done.stdout + done.stderr
    assert "may grow beyond 8,192 bytes (RLIMIT_FSIZE)" in done.stdout
    assert "raise the limit with `ulimit -f` and start again" in done.stdout
    assert str(tmp_path / "run" / "journal.sqlite") in done.stdout


def test_a_journal_that_nobody_closed_says_in_a_sentence_that_it_could_not_be_written(tmp_path: Path) -> None:
    done = run_python(
        f"""{LIMIT}
from treadle.journal import Journal
journal = Journal.open(here / "run", max_mb=100)
fill()
journal.add_event("note", text="x" * 100_000)
""",
        str(tmp_path),
    )
    assert "journal.sqlite cannot be written: no file may grow beyond 8,192 bytes" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_directory_that_cannot_be_begun_says_why(tmp_path: Path) -> None:
    done = run_python(
        f"""{LIMIT}
from treadle.errors import RunError
from treadle.journal import Journal
fill()
try:
    Journal.open(here / "run", max_mb=100)
except RunError as error:
    print(error)
""",
        str(tmp_path),
    )
    assert "RLIMIT_FSIZE): raise the limit with `ulimit -f` and start again" in done.stdout, done.stdout + done.stderr


def test_a_checkpoint_at_the_size_limit_of_files_says_so_and_leaves_no_draft(tmp_path: Path) -> None:
    done = run_python(
        f"""{LIMIT}
import torch
from safetensors.torch import save_file
from treadle.checkpoint.store import Checkpoints
from treadle.config.rollout import ModelConfig
from treadle.config.training import CheckpointConfig
from treadle.errors import RunError

class Tensors:
    version = 1
    def save(self, folder):
        save_file({{"weight": torch.zeros(10_000)}}, folder / "model.safetensors")

fill()
try:
    Checkpoints(here, checkpoint=CheckpointConfig(), model=ModelConfig(path="any")).save(Tensors(), None, 1, {{}})
except RunError as error:
    print(error)
""",
        str(tmp_path),
    )
    assert "0001-step-1 cannot be saved: no file may grow beyond 8,192 bytes" in done.stdout, done.stderr
    assert "Earlier checkpoints are whole: raise the limit with `ulimit -f` and start again" in done.stdout
    assert not [*(tmp_path / "checkpoints").iterdir()]
