"""A row of a file becomes a Task.

Owns which fields of a row mean what: the keys that `data` names, treadle's own optional fields, and the places where
verl's rows keep the same things (`reward_model.ground_truth`, `extra_info`). Knows nothing about files.
Invariant: a field is understood, or kept in `extra`; a wrong one is a mistake that names place, field and row's keys.
"""

from collections.abc import Mapping
from typing import Any, cast

from treadle.config.data import DataConfig
from treadle.config.origin import Source
from treadle.data.files import Record
from treadle.errors import ConfigError, Mistake, nearest
from treadle.types import Message, Task

OWN_FIELDS = ("uid", "agent", "agent_name", "n", "tools", "tool_kwargs", "environment_kwargs")
VERL_CALL_KWARGS = {"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"}


def to_task(record: Record, data: DataConfig) -> Task:
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


def _mistake(record: Record, problem: str, fix: str | None = None) -> ConfigError:
    return ConfigError([Mistake(record.place, problem, fix=fix)])


def _wrong(record: Record, name: str, wanted: str) -> ConfigError:
    value = record.fields[name]
    return _mistake(record, f"{name} must be {wanted}, got {type(value).__name__} {str(value)[:60]!r}")


def _absent(record: Record, name: str, key: str) -> ConfigError:
    present = ", ".join(record.fields) or "no fields at all"
    return _mistake(record, f"no field {name!r}; the row has {present}", _hint(record, name, key))


def _hint(record: Record, name: str, key: str) -> str:
    return nearest(name, record.fields) or f"set {key} to the field that holds it"


def _read_uid(record: Record) -> str:
    uid = record.fields.get("uid")
    if uid is None:
        return record.uid
    if isinstance(uid, bool) or not isinstance(uid, str | int) or uid == "":
        raise _wrong(record, "uid", "a text or a whole number")
    return str(uid)


def _read_messages(record: Record, data: DataConfig) -> tuple[Message, ...]:
    name = data.prompt_key
    prompt = record.fields.get(name)
    if name not in record.fields:
        raise _absent(record, name, "data.prompt_key")
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise _wrong(record, name, "a text or a list of chat messages, not empty")
    return tuple(_read_message(record, name, at, message) for at, message in enumerate(prompt))


def _read_message(record: Record, name: str, at: int, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _mistake(record, f"{name}[{at}] must be a message with a role, got {str(message)[:60]!r}")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        keys = ", ".join(message)
        raise _mistake(record, f"{name}[{at}].content must be a text or a list of parts; the message has {keys}")
    # Parquet writes null for every field that another message has
    return {field: value for field, value in message.items() if value is not None or field == "content"}


def _read_answer(record: Record, data: DataConfig) -> Any:
    if data.answer_key in record.fields:
        return record.fields[data.answer_key]
    reward_model = _read_map(record, "reward_model")
    if "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    if data.origin("answer_key").source is not Source.DEFAULT:  # asked for by name, so its absence is a mistake
        raise _absent(record, data.answer_key, "data.answer_key")
    return None


def _read_text(record: Record, name: str) -> str | None:
    value = record.fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(record, name, "a text")
    return value


def _read_agent(record: Record) -> str | None:
    agent, verl_agent = _read_text(record, "agent"), _read_text(record, "agent_name")
    if agent and verl_agent and agent != verl_agent:
        raise _mistake(record, f"agent is {agent!r} and agent_name is {verl_agent!r}", "keep one of the two")
    return agent or verl_agent or None


def _read_count(record: Record, most: int) -> int | None:
    n = record.fields.get("n")
    if n is not None and (type(n) is not int or n < 1):
        raise _wrong(record, "n", "a whole number ≥ 1")
    if n is not None and n > most:
        raise _mistake(record, f"n is {n}, more than data.max_n = {most}", "lower it, or raise data.max_n")
    return n


def _read_tools(record: Record) -> tuple[str, ...] | None:
    tools = record.fields.get("tools")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, str) for tool in tools)):
        raise _wrong(record, "tools", "a list of tool names")
    return None if tools is None else tuple(tools)


def _read_map(record: Record, name: str) -> Mapping[str, Any]:
    """The map in a field, or in a field of a field; empty if there is none."""
    value: Any = record.fields
    path: list[str] = []
    for step in name.split("."):
        path.append(step)
        value = value.get(step) or {}
        if not isinstance(value, Mapping):
            raise _mistake(record, f"{'.'.join(path)} must be a map, got {type(value).__name__} {str(value)[:60]!r}")
    return cast(Mapping[str, Any], value)


def _read_tool_kwargs(record: Record) -> Mapping[str, Mapping[str, Any]]:
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


def _read_environment_kwargs(record: Record) -> Mapping[str, Any]:
    return _read_map(record, "environment_kwargs") or _read_map(record, "extra_info.interaction_kwargs")
