"""Rows of task files, each with its place.

Owns the file formats: JSONL (one object a line) and Parquet. Knows nothing about what a row means.
Invariant: every line or row comes out, in order, with its place; one that cannot be read comes out with its problem.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError, Mistake

FORMATS = (".jsonl", ".ndjson", ".json", ".parquet")
FORMS = "JSONL or Parquet files, reasoning_gym:NAME, or package.module:function"
"""What an entry of a file list may be, for people who gave something else."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row as it was found: where, under which id unless it has its own, and what it holds."""

    place: str
    uid: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def read_records(file: str, label: str, key: str) -> Iterator[Record]:
    """The rows of a file. `label` stands for the file in ids; `key` is the config key that named it."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError([Mistake(key, f"no file {file!r}", value=file, fix=f"give {FORMS}", missing="file")])
    if path.suffix not in FORMATS:
        raise ConfigError([Mistake(key, f"{file!r} is not one of {', '.join(FORMATS)}", value=file)])
    rows = _read_parquet(path, key) if path.suffix == ".parquet" else _read_jsonl(path)
    for number, (fields, problem) in zip(count(1), rows, strict=False):
        yield Record(f"{file}:{number}", f"{label}:{number}", fields, problem)


def _read_jsonl(path: Path) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    with path.open("rb") as lines:  # as bytes: only a line feed ends a line, whatever else the text holds
        for number, line in enumerate(lines):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            yield _parse(text.rstrip(b"\r\n"))


def _parse(line: bytes) -> tuple[Mapping[str, Any], str | None]:
    if not line.strip():
        return {}, "the line is blank"
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {}, f"the line is not UTF-8: {error.reason} at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        return {}, f"the line is not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return {}, "the line is not usable JSON: nested too deeply"
    if not isinstance(fields, dict):
        return {}, f"the line must hold an object with named fields, it holds a {type(fields).__name__}"
    return fields, None


def _read_parquet(path: Path, key: str) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        fix = "pip install 'treadle[parquet]'"
        problem = f"reading {path} needs pyarrow"
        raise ConfigError([Mistake(key, problem, value="pyarrow", fix=fix, missing="package")]) from error
    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise ConfigError([Mistake(key, f"{path} is not a Parquet file: {error}", value=str(path))]) from error
    with file:
        for batch in file.iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                yield fields, None
