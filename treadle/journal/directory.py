"""The plain files of a run directory: `config.yaml` and `run.json`.

Owns their form. Knows nothing of SQLite or of what the config says.
Invariant: each file is replaced whole, never half written; every start in the directory stays listed in `run.json`,
and a config that differs from the last one does not overwrite it.
"""

import json
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from treadle.errors import RunError
from treadle.journal.record import RunStatus

DIRECTORY_MODE = 0o700
"""Of what a run makes: trajectories may hold what only its user should read. Files are 0600."""

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
_PACKAGES = ("treadle", "torch", "transformers", "vllm", "ray", "openai", "mcp")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run in this directory."""

    started_at: float
    command: tuple[str, ...]
    pid: int
    host: str
    versions: dict[str, str]
    status: RunStatus = RunStatus.RUNNING
    ended_at: float | None = None
    cause: str | None = None
    """Why it ended, where it did not finish."""


class RunFile:
    """`run.json`, of which this process is the last start."""

    def __init__(self, path: Path, starts: tuple[Start, ...]) -> None:
        self._path = path
        self._starts = starts

    @classmethod
    def open(cls, run_dir: Path, command: Sequence[str], now: float) -> "RunFile":
        """List this start. Earlier ones that still read as running died without a word: nobody else holds the lock."""
        earlier = tuple(
            replace(start, status=RunStatus.CRASHED, cause="it died without a word")
            if start.status is RunStatus.RUNNING
            else start
            for start in read_starts(run_dir)
        )
        start = Start(now, tuple(command), os.getpid(), socket.gethostname(), _versions())
        opened = cls(run_dir / RUN_FILE, (*earlier, start))
        opened._write()
        return opened

    @property
    def num_starts(self) -> int:
        return len(self._starts)

    def note(self, status: RunStatus, cause: str | None) -> None:
        """Say how this start is about to end, in case that it is killed on the way."""
        self._starts = (*self._starts[:-1], replace(self._starts[-1], status=status, cause=cause))
        self._write()

    def end(self, status: RunStatus, now: float, cause: str | None = None) -> None:
        """Say how this start ended, and why."""
        last = replace(self._starts[-1], status=status, ended_at=now, cause=cause)
        self._starts = (*self._starts[:-1], last)
        self._write()

    def _write(self) -> None:
        last = self._starts[-1]
        content = {
            "status": last.status,
            "cause": last.cause,
            "starts": [asdict(start) for start in self._starts],
        }
        replace_text(self._path, json.dumps(content, indent=2) + "\n")


def read_starts(run_dir: Path) -> tuple[Start, ...]:
    """Every start in this directory, oldest first."""
    path = run_dir / RUN_FILE
    try:
        return tuple(_read_start(**found) for found in json.loads(path.read_text())["starts"])
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} cannot be read ({error}): mend or delete it, or choose another logging.run_dir"
        ) from error


def _read_start(status: str, command: list[str], **fields: Any) -> Start:
    return Start(status=RunStatus(status), command=tuple(command), **fields)


def write_config(run_dir: Path, text: str, num_starts: int) -> None:
    """Store the resolved config; one of an earlier start that differs is kept beside it, numbered by that start."""
    path = run_dir / CONFIG_FILE
    if path.exists() and path.read_text() != text:
        os.replace(path, run_dir / f"config.{num_starts - 1}.yaml")
    replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, meets the old text or the new."""
    draft = path.with_name(f"{path.name}.tmp")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
