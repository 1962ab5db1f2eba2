"""Journal schema: the tables of `journal.sqlite`, and how its connections are opened.

Owns the layout and its version. Knows nothing of records or threads.
Invariant: a connection from here is to a journal of exactly this version, or it was refused with the reason.

    tasks         one row per task, as it was given
    prompts       prompt ids and opening messages, once for the samples that share them
    trajectories  one row per attempt, kept for good: outcome, reward, counts, timings
    rows          training sequences: ids, mask, logprobs and versions as little-endian arrays, turns as JSON
    texts         the rest of the conversation and free-form extras, as JSON; dropped together with `rows`
    annotations   what the trainer computed for each sampled token of a row; dropped together with `rows`
    parts         completions of sessions that are still open; deleted once their session has ended
    events        what happened, in order
    metrics       what was measured, by step

Every row of tasks, trajectories, annotations, parts, events and metrics ends in a `digest` of the row, as `codec.seal`
computes it; that of a trajectory covers its prompt, rows and texts through `body_digest`.
`start` counts the times the journal was opened to be written: it tells what came before a resume from what came after
it, whatever the clocks of two machines say.
"""

import os
import re
import sqlite3
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from treadle.disk import explain_disk_error
from treadle.errors import RunError

FILE_NAME = "journal.sqlite"
VERSION = 3
_APPLICATION_ID = 0x7265646C  # "redl": tells a journal from any other SQLite file
_PAGE_BYTES = 16384  # holds a short trajectory whole; 4096 would spill nearly each one into overflow pages
_CHECKPOINT_BYTES = 8 << 20
_MIN_CHECKPOINT_BYTES = 1 << 20  # each checkpoint waits for the disk
_BUSY_TIMEOUT_S = 10.0
_CHECKPOINT = re.compile(r"\d+-step-\d+")


@dataclass(frozen=True)
class Table:
    """A table, and the columns an insert fills in."""

    name: str
    columns: tuple[str, ...]
    verb: str = "INSERT"

    @cached_property
    def width(self) -> int:
        return len(self.columns)

    def insert(self, num_rows: int) -> str:
        """One statement for many rows: each statement costs a hand-over of the interpreter lock, each row does not."""
        row = f"({','.join('?' * self.width)})"
        return f"{self.verb} INTO {self.name} ({','.join(self.columns)}) VALUES {','.join([row] * num_rows)}"


TASKS = Table("tasks", ("uid", "data_source", "task", "digest"), verb="INSERT OR REPLACE")
PROMPTS = Table("prompts", ("id", "uid", "ids", "messages"))
TRAJECTORIES = Table(
    "trajectories",
    (
        *("id", "start", "written_at", "uid", "sample", "attempt", "prompt", "data_source"),
        *("status", "reason", "boundary", "detail", "reward", "parts"),
        *("num_rows", "num_turns", "prompt_tokens", "response_tokens", "num_sampled"),
        *("started_at", "total_s", "generate_s", "tool_s", "score_s", "queue_s"),
        *("provenance", "body_digest", "digest"),
    ),
)
ROWS = Table(
    "rows",
    ("trajectory", "position", "prompt_ids", "ids", "mask", "logprobs", "versions", "processed_logprobs", "turns"),
)
TEXTS = Table("texts", ("trajectory", "messages", "extra", "score_extra"))
PARTS = Table(
    "parts",
    (
        *("uid", "sample", "row", "number", "start", "written_at", "asked", "digest"),
        *("ids", "logprobs", "versions", "processed_logprobs", "answer", "checksum"),
    ),
    verb="INSERT OR REPLACE",
)
ANNOTATIONS = (
    *("position", "step", "trainer", "old", "reference", "advantage", "entropy", "weight", "flags", "digest"),
)
"""Columns after the trajectory's own, which is looked up by uid, sample and attempt."""
EVENTS = Table("events", ("start", "time", "kind", "fields", "digest"))
METRICS = Table("metrics", ("time", "step", "items", "digest"))

_DDL = """
CREATE TABLE tasks (uid TEXT PRIMARY KEY, data_source TEXT NOT NULL, task TEXT NOT NULL, digest BLOB NOT NULL);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, uid TEXT NOT NULL, ids BLOB NOT NULL, messages TEXT NOT NULL);
CREATE INDEX prompts_by_uid ON prompts (uid);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, start INTEGER NOT NULL, written_at REAL NOT NULL,
    uid TEXT NOT NULL, sample INTEGER NOT NULL, attempt INTEGER NOT NULL,
    prompt INTEGER NOT NULL, data_source TEXT NOT NULL,
    status TEXT NOT NULL, reason TEXT NOT NULL, boundary TEXT, detail TEXT NOT NULL,
    reward REAL, parts TEXT,
    num_rows INTEGER NOT NULL, num_turns INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, response_tokens INTEGER NOT NULL, num_sampled INTEGER NOT NULL,
    started_at REAL, total_s REAL, generate_s REAL, tool_s REAL, score_s REAL, queue_s REAL,
    provenance TEXT, body_digest BLOB NOT NULL, digest BLOB NOT NULL
);
CREATE INDEX trajectories_by_sample ON trajectories (uid, sample);
CREATE TABLE rows (
    id INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL, position INTEGER NOT NULL, prompt_ids BLOB,
    ids BLOB NOT NULL, mask BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL,
    processed_logprobs BLOB, turns TEXT NOT NULL
);
CREATE INDEX rows_by_trajectory ON rows (trajectory);
CREATE TABLE texts (trajectory INTEGER PRIMARY KEY, messages TEXT NOT NULL, extra TEXT, score_extra TEXT);
CREATE TABLE parts (
    id INTEGER PRIMARY KEY, uid TEXT NOT NULL, sample INTEGER NOT NULL, row INTEGER NOT NULL, number INTEGER NOT NULL,
    start INTEGER NOT NULL, written_at REAL NOT NULL, asked INTEGER NOT NULL, digest INTEGER NOT NULL,
    ids BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL, processed_logprobs BLOB,
    answer TEXT NOT NULL, checksum BLOB NOT NULL
);
CREATE UNIQUE INDEX parts_by_session ON parts (uid, sample, row, number);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, start INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, fields TEXT NOT NULL,
    digest BLOB NOT NULL
);
CREATE TABLE metrics (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, step INTEGER NOT NULL, items TEXT NOT NULL, digest BLOB NOT NULL
);
"""

_ANNOTATIONS_DDL = """
CREATE TABLE IF NOT EXISTS annotations (
    id INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL, position INTEGER NOT NULL, step INTEGER NOT NULL,
    trainer BLOB, old BLOB, reference BLOB, advantage BLOB, entropy BLOB, weight BLOB, flags BLOB, digest BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS annotations_by_trajectory ON annotations (trajectory, position);
"""
"""Made when a journal is opened to be written: readers of older journals find no such table, and no annotations."""


def connect_writer(path: Path, *, max_bytes: int) -> sqlite3.Connection:
    """The one writing connection; makes the tables if the file is new. Used by one thread at a time."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's further files have the same mode
        connection = sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=256
        )
    except sqlite3.Error as error:
        raise RunError(f"cannot open {path}: {error}") from error
    try:
        _prepare(connection, path, max_bytes)
    except sqlite3.Error as error:
        connection.close()
        disk = explain_disk_error(error, path)
        problem = f"{disk.problem}: {disk.fix} and start again" if disk else f"{error}{what_is_left(path)}"
        raise RunError(f"cannot use {path} as a journal: {problem}") from error
    except RunError:
        connection.close()
        raise
    return connection


def what_is_left(path: Path) -> str:
    """What can be done where the journal at `path` is damaged: how to go on from the newest checkpoint beside it."""
    folder = path.parent / "checkpoints"
    saved = [entry for entry in folder.iterdir() if _CHECKPOINT.fullmatch(entry.name)] if folder.is_dir() else []
    if not saved:
        return "; choose another logging.run_dir, or give --fresh, which sets this one aside"
    newest = max(saved, key=lambda entry: int(entry.name.split("-")[0]))
    return (
        f"; its checkpoints do not need it: go on from the newest with another logging.run_dir, "
        f"checkpoint.resume_mode=resume_path and checkpoint.resume_from_path={newest}"
    )


def _prepare(connection: sqlite3.Connection, path: Path, max_bytes: int) -> None:
    if _is_empty(connection):
        # Page size and vacuum mode are fixed by the first write, which also switches the file to WAL.
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(
            f"BEGIN; {_DDL} PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT;"
        )
    check_version(connection, path)
    connection.executescript(f"BEGIN; {_ANNOTATIONS_DDL} COMMIT;")
    checkpoint_bytes = min(_CHECKPOINT_BYTES, max(max_bytes // 8, _MIN_CHECKPOINT_BYTES))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_bytes // _PAGE_BYTES}")
    connection.execute(f"PRAGMA journal_size_limit = {checkpoint_bytes}")


def connect_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection, also while a run writes, and also where the directory itself is read-only."""
    if not path.is_file():
        raise RunError(f"no journal at {path}: is {path.parent} a run directory?")
    try:
        try:
            connection = _attach(path, "mode=ro")
        except sqlite3.OperationalError:
            # Without a write-ahead log nothing can be missed by taking the file as it lies, as on read-only media.
            if path.with_name(f"{path.name}-wal").exists():
                raise
            connection = _attach(path, "mode=ro&immutable=1")
    except sqlite3.Error as error:
        raise RunError(f"cannot read the journal {path}: {error}{what_is_left(path)}") from error
    return connection


def _attach(path: Path, options: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?{options}",
        uri=True,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        check_version(connection, path)
    except (sqlite3.Error, RunError):
        connection.close()
        raise
    return connection


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is no journal, or a journal of another version."""
    if pragma(connection, "application_id") != _APPLICATION_ID:
        raise RunError(f"{path} is not a treadle journal: choose another logging.run_dir")
    version = pragma(connection, "user_version")
    if version != VERSION:
        age = "a newer" if version > VERSION else "an older"
        raise RunError(
            f"{path} was written by {age} treadle (journal version {version}, this one knows {VERSION}): "
            "use that version, or choose another logging.run_dir"
        )


def pragma(connection: sqlite3.Connection, name: str) -> int:
    """A whole-number setting of the database."""
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _is_empty(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
