"""File formats of task rows: JSONL, JSON, CSV (each also as .gz), Parquet, `datasets`, and the hub's local cache.

Owns how rows are read from disk, and nothing of what they mean. Looks at the disk alone: nothing is downloaded, and no
script of a data set is run. `hub:OWNER/NAME/PREFIX` names files of a repository in the local Hugging Face cache, those
whose path begins with the prefix: `hub:openai/gsm8k/main/train` is `main/train-00000-of-00001.parquet`.
Invariant: every row comes out, in order, with the number that finds it again; one that cannot be read comes out with
its problem.
"""

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, cast

from treadle.errors import ConfigError, Mistake, nearest

HUB = "hub:"
_OWNER_AND_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.csv)(?<!\.parquet)(?<!\.gz)")
"""OWNER/NAME, as the hub names data sets; a path of two parts may look like it."""
TEXT_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
FORMATS = (*TEXT_FORMATS, *(f"{suffix}.gz" for suffix in TEXT_FORMATS), ".parquet")
SOURCE_FORMS = (
    "JSONL, JSON, CSV (also .gz) or Parquet files, a directory of datasets.save_to_disk, hub:OWNER/NAME/PREFIX, "
    "seeds:COUNT, reasoning_gym:NAME, verifiers:NAME, or package.module:function"
)
"""What an entry of a file list may be, for the error message about one that is not."""

JSON_COLUMNS = ("n", "tools", "tool_kwargs", "environment_kwargs", "reward_model", "extra_info")
"""Columns of a CSV file whose cells are JSON; all others are text."""

_HUB_NAME = re.compile(r"hub:([\w-][\w.-]*/[\w-][\w.-]*)(?:/(.*))?")
_STATE, _DICT = "state.json", "dataset_dict.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}.*|\.[^./]+$")


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One row as it was read: its place, its id unless it has its own, and its fields."""

    place: str
    uid: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _NumberedRow:
    """A row with the number of its line, or of the row where a format has no lines."""

    number: int
    fields: Mapping[str, Any]
    problem: str | None = None


def read_records(source: str, label: str, key: str) -> Iterator[TaskRow]:
    """The rows of a file, a directory or of `hub:`. `label` stands for it in ids; `key` is the config key."""
    for file, name, rows in _open_source(source, label, key):
        for row in rows:
            yield TaskRow(f"{file}:{row.number}", f"{name}:{row.number}", row.fields, row.problem)


def label_source(source: str) -> str:
    """A short name for ids: the last part of a path, or what follows `hub:`."""
    return source.removeprefix(HUB) if source.startswith(HUB) else Path(source).name


def _open_source(source: str, label: str, key: str) -> Iterator[tuple[str, str, Iterator[_NumberedRow]]]:
    """Each file behind a source: its path, its label, its rows."""
    if source.startswith(HUB):
        files = _find_in_hub_cache(source, key)
        for path in files:
            yield str(path), label if len(files) == 1 else f"{label}/{path.name}", _read_file(path, key)
        return
    path = Path(source).expanduser()
    if path.is_dir():
        yield source, label, _read_saved_dataset(path, source, key)
    elif not path.is_file():
        fix = f"give {SOURCE_FORMS}"
        if _OWNER_AND_NAME.fullmatch(source):
            fix = f"a data set of the hub is {HUB}{source}/PREFIX, such as {HUB}{source}/main/train; else {fix}"
        raise ConfigError([Mistake(key, f"no file {source!r}", value=source, fix=fix, missing="file")])
    else:
        yield source, label, _read_file(path, key)


def _read_file(path: Path, key: str) -> Iterator[_NumberedRow]:
    readers: Mapping[str, Callable[[], Iterator[_NumberedRow]]] = {
        ".parquet": lambda: _read_parquet(path, key),
        ".csv": lambda: _read_csv(path, ","),
        ".tsv": lambda: _read_csv(path, "\t"),
        ".json": lambda: _read_json(path),
        ".jsonl": lambda: _read_jsonl(path),
        ".ndjson": lambda: _read_jsonl(path),
    }
    if _format_of(path) not in FORMATS:
        problem = f"{str(path)!r} is not one of {', '.join(FORMATS)}"
        raise ConfigError([Mistake(key, problem, value=str(path), fix=f"give {SOURCE_FORMS}")])
    rows = readers[_format_of(path).removesuffix(".gz")]()
    return _unpacked(rows, path) if path.suffix == ".gz" else rows


def _format_of(path: Path) -> str:
    """The end of a file's name, with that of what is packed in it: `.jsonl.gz`."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _unpacked(rows: Iterator[_NumberedRow], path: Path) -> Iterator[_NumberedRow]:
    """Rows of a gzip file; a ConfigError where it is none, or ends early."""
    try:
        yield from rows
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _unreadable(path, f"is not a whole gzip file: {error}") from error


_LONG_NUMBER = f"a whole number has more than {sys.int_info.default_max_str_digits:,} digits; write it as text"


def _read_jsonl(path: Path) -> Iterator[_NumberedRow]:
    with _open(path) as lines:  # as bytes: only a line feed ends a line, whatever else the text holds
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            yield _parse_line(number, text.rstrip(b"\r\n"))


def _parse_line(number: int, line: bytes) -> _NumberedRow:
    if not line.strip():
        return _NumberedRow(number, {}, "the line is blank")
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _NumberedRow(number, {}, f"the line is not UTF-8: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return _NumberedRow(number, {}, f"the line is not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return _NumberedRow(number, {}, "the line is not usable JSON: nested too deeply")
    except ValueError:
        return _NumberedRow(number, {}, f"the line is not usable JSON: {_LONG_NUMBER}")
    if not isinstance(fields, dict):
        problem = f"the line must hold an object with named fields, it holds a {type(fields).__name__}"
        return _NumberedRow(number, {}, problem)
    return _NumberedRow(number, fields)


def _read_json(path: Path) -> Iterator[_NumberedRow]:
    """An array of rows, numbered from 1; or one row a line, as many `.json` files are."""
    with _open(path) as file:
        content = file.read().removeprefix(b"\xef\xbb\xbf")
    start = content.lstrip()[:1]
    if start != b"[":
        yield from _read_json_lines(path, content)
        return
    try:
        rows = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise _unreadable(path, f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise _unreadable(path, "is not usable JSON: nested too deeply") from error
    except ValueError as error:
        raise _unreadable(path, f"is not usable JSON: {_LONG_NUMBER}") from error
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield _NumberedRow(number, row)
        else:
            problem = f"row {number} must be an object with named fields, it is {type(row).__name__} {str(row)[:60]!r}"
            yield _NumberedRow(number, {}, problem)


def _read_json_lines(path: Path, content: bytes) -> Iterator[_NumberedRow]:
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        whole = None  # several lines, or mistakes that the lines name
    if isinstance(whole, dict) and content.strip().count(b"\n"):
        lists = [name for name, value in whole.items() if isinstance(value, list) and value]
        fix = f"write the list under {lists[0]!r} to a file of its own" if lists else "write [ and ] around it"
        raise _unreadable(path, "holds one object; tasks are an array of objects, or one object a line", fix)
    yield from _read_jsonl(path)


def _unreadable(path: Path, problem: str, fix: str | None = None) -> ConfigError:
    return ConfigError([Mistake(str(path), problem, fix=fix)])


def _read_csv(path: Path, delimiter: str) -> Iterator[_NumberedRow]:
    """Rows by the names in the first line; numbered by the line they begin in. An empty cell is no value."""
    with TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return
            if twice := [name for name in header if header.count(name) > 1]:
                raise _unreadable(path, f"names the column {twice[0]!r} twice in its first line")
            begins = reader.line_num + 1
            for cells in reader:
                yield _csv_row(begins, header, cells)
                begins = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise _unreadable(path, f"is not UTF-8: {error.reason} at byte {error.start + 1}") from error
        except csv.Error as error:
            fix = "quote cells with line breaks or quotation marks in them, or give the rows as JSONL"
            raise _unreadable(path, f"line {reader.line_num} is not CSV: {error}", fix) from error


def _csv_row(number: int, header: list[str], cells: list[str]) -> _NumberedRow:
    if not cells:
        return _NumberedRow(number, {}, "the line is blank")
    if len(cells) != len(header):
        problem = f"the line has {len(cells)} cells, the first line names {len(header)} columns"
        return _NumberedRow(number, {}, problem)
    fields: dict[str, Any] = {name: cell or None for name, cell in zip(header, cells, strict=True)}
    for name in JSON_COLUMNS:
        if fields.get(name) is not None:
            try:
                fields[name] = json.loads(fields[name])
            except (ValueError, RecursionError):
                return _NumberedRow(number, {}, f"the column {name!r} must hold JSON, it holds {fields[name][:60]!r}")
    return _NumberedRow(number, fields)


def _need_pyarrow(path: Path, key: str, error: ImportError) -> ConfigError:
    fix = "pip install 'treadle[parquet]'"
    return ConfigError([Mistake(key, f"reading {path} needs pyarrow", value="pyarrow", fix=fix, missing="package")])


def _read_parquet(path: Path, key: str) -> Iterator[_NumberedRow]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise _need_pyarrow(path, key, error) from error
    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise ConfigError([Mistake(key, f"{path} is not a Parquet file: {error}", value=str(path))]) from error
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                number += 1
                yield _NumberedRow(number, fields)


def _read_saved_dataset(directory: Path, source: str, key: str) -> Iterator[_NumberedRow]:
    """Rows of `Dataset.save_to_disk`: Arrow files that `state.json` lists. A split of a DatasetDict is a directory."""
    if (directory / _DICT).is_file():
        splits = json.loads((directory / _DICT).read_text(encoding="utf-8")).get("splits", [])
        named = ", ".join(f"{source.rstrip('/')}/{split}" for split in splits)
        raise ConfigError([Mistake(key, f"{source!r} holds several splits", source, fix=f"give one of {named}")])
    if not (directory / _STATE).is_file():
        inside = sorted(path.name for path in directory.iterdir() if _format_of(path) in FORMATS)
        fix = f"give the files in it: {', '.join(inside[:5])}" if inside else f"give {SOURCE_FORMS}"
        problem = f"{source!r} is a directory that datasets.save_to_disk did not write"
        raise ConfigError([Mistake(key, problem, source, fix=fix)])
    state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
    if state.get("_indices_data_files") or state.get("_indices_files"):
        problem = f"{source!r} was saved with indices beside its rows, by an old version of datasets"
        raise ConfigError([Mistake(key, problem, source, fix="load it and save it again: flatten_indices() first")])
    return _read_arrow([directory / entry["filename"] for entry in state["_data_files"]], key)


def _read_arrow(files: list[Path], key: str) -> Iterator[_NumberedRow]:
    try:
        from pyarrow import ArrowInvalid, ipc, memory_map
    except ImportError as error:
        raise _need_pyarrow(files[0], key, error) from error
    number = 0
    for path in files:
        try:
            with memory_map(str(path)) as file, ipc.open_stream(file) as batches:
                for batch in batches:
                    for fields in batch.to_pylist():
                        number += 1
                        yield _NumberedRow(number, fields)
        except (OSError, ArrowInvalid) as error:
            raise ConfigError([Mistake(key, f"{path} is not an Arrow file: {error}", value=str(path))]) from error


def _find_in_hub_cache(source: str, key: str) -> list[Path]:
    """The files that `hub:OWNER/NAME/PREFIX` means, in the order of their names."""
    found = _HUB_NAME.fullmatch(source)
    if found is None:
        fix = "write hub:OWNER/NAME/PREFIX, such as hub:openai/gsm8k/main/train"
        raise ConfigError([Mistake(key, f"{source!r} names no data set of the hub", source, fix=fix)])
    name, prefix = found[1], found[2] or ""
    snapshot = _find_snapshot(name)
    if snapshot is None:
        problem = f"no data set {name!r} in the local Hugging Face cache; nothing is downloaded by a run"
        fix = f"hf download --repo-type dataset {name}"
        raise ConfigError([Mistake(key, problem, source, fix=fix, missing="file")])
    files = sorted(path for path in snapshot.rglob("*") if _format_of(path) in FORMATS)
    names = {path: path.relative_to(snapshot).as_posix() for path in files}
    chosen = [path for path in files if prefix and re.match(rf"{re.escape(prefix)}($|[-./])", names[path])]
    if not chosen:
        known = dict.fromkeys(f"{HUB}{name}/{_SHARD.sub('', names[path])}" for path in files)
        listed = f"there are {', '.join(list(known)[:8]) or 'no files of rows at all'}"
        fix = (nearest(source, known) if prefix else None) or listed
        what = f"has no files that begin with {prefix!r}" if prefix else "has several files"
        raise ConfigError([Mistake(key, f"the data set {name} in the local cache {what}", source, fix=fix)])
    return chosen


def _find_snapshot(name: str) -> Path | None:
    """The newest downloaded revision of a data set in the local cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    head = folder / "refs" / "main"
    if head.is_file() and (snapshot := folder / "snapshots" / head.read_text().strip()).is_dir():
        return snapshot
    snapshots = sorted((folder / "snapshots").glob("*")) if folder.is_dir() else []
    return snapshots[-1] if len(snapshots) == 1 else None
