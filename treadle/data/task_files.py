"""Task files: rows of JSONL and Parquet, each read into a Task.

Owns the file formats and which fields of a row mean what: the keys that `data` names, treadle's own optional fields,
and the places where verl's rows keep the same things (`reward_model.ground_truth`, `extra_info`).
Invariant: every line or row comes out, in order, with its place; one that cannot be read comes out with its problem.
A field is understood, or kept in `extra`; a wrong one is a mistake that names place, field and the row's keys.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

from treadle.config.root import DataConfig
from treadle.config.section import Source
from treadle.errors import ConfigError, Mistake, nearest
from treadle.types import Message, Task

FORMATS = (".jsonl", ".ndjson", ".json", ".parquet")
SOURCE_FORMS = "JSONL or Parquet files, reasoning_gym:NAME, or package.module:function"
"""What an entry of a file list may be, for the error message about one that is not."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One row as it was read: its place, its id unless it has its own, and its fields."""

    place: str
    uid: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def read_records(file: str, label: str, key: str) -> Iterator[TaskRow]:
    """The rows of a file. `label` stands for the file in ids; `key` is the config key that named it."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError([Mistake(key, f"no file {file!r}", value=file, fix=f"give {SOURCE_FORMS}", missing="file")])
    if path.suffix not in FORMATS:
        raise ConfigError([Mistake(key, f"{file!r} is not one of {', '.join(FORMATS)}", value=file)])
    rows = _read_parquet(path, key) if path.suffix == ".parquet" else _read_jsonl(path)
    for number, (fields, problem) in zip(count(1), rows, strict=False):
        yield TaskRow(f"{file}:{number}", f"{label}:{number}", fields, problem)


def _read_jsonl(path: Path) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    with path.open("rb") as lines:  # as bytes: only a line feed ends a line, whatever else the text holds
        for number, line in enumerate(lines):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            yield _parse_line(text.rstrip(b"\r\n"))


def _parse_line(line: bytes) -> tuple[Mapping[str, Any], str | None]:
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


OWN_FIELDS = ("uid", "agent", "agent_name", "n", "tools", "tool_kwargs", "environment_kwargs")
VERL_CALL_KWARGS = {"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"}


def to_task(record: TaskRow, data: DataConfig) -> Task:
    """The task in a row; a ConfigError that says what is wrong with it otherwise."""
    if record.problem is not None:
        raise _mistake(record, record.problem)
    known = {data.prompt_key, data.answer_key, data.reward_fn_key, *OWN_FIELDS}
    return Task(
        uid=_read_uid(record),
        messages=_read_messages(record, data),
        ground_truth=_read_answer(record, data),
        data_source=_read_text(record, data.reward_fn_key) or "",
        agent=_read_agent(record),
        n=_read_count(record, data.max_n),
        tools=_read_tools(record),
        tool_kwargs=_read_tool_kwargs(record),
        environment_kwargs=_read_environment_kwargs(record),
        extra={name: value for name, value in record.fields.items() if name not in known},
    )


def _mistake(record: TaskRow, problem: str, fix: str | None = None) -> ConfigError:
    return ConfigError([Mistake(record.place, problem, fix=fix)])


def _wrong(record: TaskRow, name: str, wanted: str) -> ConfigError:
    value = record.fields[name]
    return _mistake(record, f"{name} must be {wanted}, got {type(value).__name__} {str(value)[:60]!r}")


def _absent(record: TaskRow, name: str, key: str) -> ConfigError:
    present = ", ".join(record.fields) or "no fields at all"
    fix = nearest(name, record.fields) or f"set {key} to the field that holds it"
    return _mistake(record, f"no field {name!r}; the row has {present}", fix)


def _read_uid(record: TaskRow) -> str:
    uid = record.fields.get("uid")
    if uid is None:
        return record.uid
    if isinstance(uid, bool) or not isinstance(uid, str | int) or uid == "":
        raise _wrong(record, "uid", "a text or a whole number")
    return str(uid)


def _read_messages(record: TaskRow, data: DataConfig) -> tuple[Message, ...]:
    name = data.prompt_key
    prompt = record.fields.get(name)
    if name not in record.fields:
        raise _absent(record, name, "data.prompt_key")
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise _wrong(record, name, "a text or a list of chat messages, not empty")
    return tuple(_read_message(record, name, at, message) for at, message in enumerate(prompt))


def _read_message(record: TaskRow, name: str, at: int, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _mistake(record, f"{name}[{at}] must be a message with a role, got {str(message)[:60]!r}")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        keys = ", ".join(message)
        raise _mistake(record, f"{name}[{at}].content must be a text or a list of parts; the message has {keys}")
    # Parquet writes null for every field that another message has
    return {field: value for field, value in message.items() if value is not None or field == "content"}


def _read_answer(record: TaskRow, data: DataConfig) -> Any:
    if data.answer_key in record.fields:
        return record.fields[data.answer_key]
    reward_model = _read_map(record, "reward_model")
    if "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    if data.origin("answer_key").source is not Source.DEFAULT:  # asked for by name, so its absence is a mistake
        raise _absent(record, data.answer_key, "data.answer_key")
    return None


def _read_text(record: TaskRow, name: str) -> str | None:
    value = record.fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(record, name, "a text")
    return value


def _read_agent(record: TaskRow) -> str | None:
    agent, verl_agent = _read_text(record, "agent"), _read_text(record, "agent_name")
    if agent and verl_agent and agent != verl_agent:
        raise _mistake(record, f"agent is {agent!r} and agent_name is {verl_agent!r}", "keep one of the two")
    return agent or verl_agent or None


def _read_count(record: TaskRow, most: int) -> int | None:
    n = record.fields.get("n")
    if n is not None and (type(n) is not int or n < 1):
        raise _wrong(record, "n", "a whole number ≥ 1")
    if n is not None and n > most:
        raise _mistake(record, f"n is {n}, more than data.max_n = {most}", "lower it, or raise data.max_n")
    return n


def _read_tools(record: TaskRow) -> tuple[str, ...] | None:
    tools = record.fields.get("tools")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, str) for tool in tools)):
        raise _wrong(record, "tools", "a list of tool names")
    return None if tools is None else tuple(tools)


def _read_map(record: TaskRow, name: str) -> Mapping[str, Any]:
    """The map in a field, or in a field of a field; empty if there is none."""
    value: Any = record.fields
    path: list[str] = []
    for step in name.split("."):
        path.append(step)
        value = value.get(step) or {}
        if not isinstance(value, Mapping):
            raise _mistake(record, f"{'.'.join(path)} must be a map, got {type(value).__name__} {str(value)[:60]!r}")
    return cast(Mapping[str, Any], value)


def _read_tool_kwargs(record: TaskRow) -> Mapping[str, Mapping[str, Any]]:
    verl = _read_map(record, "extra_info.tools_kwargs")
    given = _read_map(record, "tool_kwargs") or {tool: _flatten(kwargs) for tool, kwargs in verl.items()}
    wrong = [tool for tool, kwargs in given.items() if kwargs is not None and not isinstance(kwargs, Mapping)]
    if wrong:
        raise _mistake(record, f"tool_kwargs.{wrong[0]} must be a map of arguments, got {given[wrong[0]]!r}")
    return {tool: kwargs for tool, kwargs in given.items() if kwargs is not None}


def _flatten(kwargs: Any) -> Any:
    """verl keeps the arguments of a tool's create and execute calls apart; a tool here has one set."""
    if not isinstance(kwargs, Mapping) or not kwargs or not kwargs.keys() <= VERL_CALL_KWARGS:
        return kwargs
    parts = [part for part in kwargs.values() if isinstance(part, Mapping)]
    return {name: value for part in parts for name, value in part.items()}


def _read_environment_kwargs(record: TaskRow) -> Mapping[str, Any]:
    return _read_map(record, "environment_kwargs") or _read_map(record, "extra_info.interaction_kwargs")
