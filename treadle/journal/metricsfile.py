"""`metrics.jsonl`: a copy of the metrics, one JSON object a line, for people and their tools.

Owns the file. The journal's table is the truth: after a crash this may hold a last line that the table does not.
Invariant: each line is whole. A line that a crash cut short is taken away when the file is opened again.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

FILE_NAME = "metrics.jsonl"
_BLOCK = 65536


class MetricsFile:
    """An append-only file of lines."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, run_dir: Path) -> "MetricsFile":
        """Open for appending, and cut off an unfinished last line."""
        path = run_dir / FILE_NAME
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, _end_of_last_line(descriptor))
        return cls(path, descriptor)

    def append(self, lines: Sequence[str]) -> None:
        """Write lines that hold no line break of their own."""
        rest = memoryview("".join(f"{line}\n" for line in lines).encode())
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            error.filename = str(self._path)  # a write knows no name, and the journal has other files
            raise

    def rewind(self, step: int) -> None:
        """Take away what was measured after `step`; lines that are not ours stay."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            draft = self._path.with_name(f"{self._path.name}.tmp")
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.close(self._descriptor)
            self._descriptor = descriptor
            self.append(kept)
            os.replace(draft, self._path)

    def close(self) -> None:
        os.close(self._descriptor)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1.0


def _end_of_last_line(descriptor: int) -> int:
    end = os.fstat(descriptor).st_size
    while end:
        start = max(end - _BLOCK, 0)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
