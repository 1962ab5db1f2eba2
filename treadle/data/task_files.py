"""Task rows: each row of a data file read into a Task, or into a conversation for supervised fine-tuning.

Owns which fields of a row mean what: the keys that `data` names, treadle's own optional fields, the places where verl's
rows keep the same things (`reward_model.ground_truth`, `extra_info`); and the prompt that `data.system_prompt` and
`data.prompt_template` make of them.
Invariant: a field is understood, or kept in `extra`; a wrong one is a mistake that names place, field and the row's
keys.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from treadle.config.root import DataConfig
from treadle.config.section import Source
from treadle.config.training import SFTConfig
from treadle.data.file_formats import TaskRow
from treadle.errors import ConfigError, Mistake, nearest
from treadle.types import Message, Task

if TYPE_CHECKING:
    from jinja2 import Template

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
        renamed=_read_renamed(record, data),
    )


def _read_renamed(record: TaskRow, data: DataConfig) -> Mapping[str, str]:
    """What the row calls its prompt, answer and data source, where these are not the names."""
    named = {"prompt": data.prompt_key, "answer": data.answer_key, "data_source": data.reward_fn_key}
    return {name: meant for meant, name in named.items() if name != meant and name in record.fields}


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation to learn from: the assistant's turns are what is learned."""

    uid: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | tuple[str, ...] | None = None
    """Schemas, or names of tools of `rollout.multi_turn`; None for all of those."""


def to_conversation(record: TaskRow, data: DataConfig, sft: SFTConfig) -> ChatExample:
    """The conversation in a row: whole in one field, or a prompt and its response; a ConfigError otherwise."""
    if record.problem is not None:
        raise _mistake(record, record.problem)
    messages = _read_conversation(record, data, sft)
    first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), None)
    if messages[-1]["role"] != "assistant" or not first:
        roles = ", ".join(str(message["role"]) for message in messages)
        problem = f"a conversation must begin with a prompt and end with an assistant's message; its roles are {roles}"
        raise _mistake(record, problem)
    return ChatExample(_read_uid(record), messages, _read_schemas(record))


def _read_conversation(record: TaskRow, data: DataConfig, sft: SFTConfig) -> tuple[Message, ...]:
    if sft.messages_key not in record.fields:
        if sft.response_key not in record.fields:
            names = f"{sft.messages_key!r} (sft.messages_key), or {sft.response_key!r} (sft.response_key)"
            present = ", ".join(record.fields) or "no fields at all"
            raise _mistake(record, f"there is no field {names}; the row has {present}")
        return (*_read_messages(record, data), *_read_response(record, sft.response_key))
    given = _from_json(record.fields[sft.messages_key])
    if not isinstance(given, list) or not given:
        raise _wrong(record, sft.messages_key, "a list of chat messages, not empty")
    messages = tuple(_read_learned(record, sft.messages_key, at, message) for at, message in enumerate(given))
    return messages if messages[0]["role"] == "system" else (*_system(data), *messages)


def _read_response(record: TaskRow, name: str) -> tuple[Message, ...]:
    response = _from_json(record.fields[name])
    if isinstance(response, str) and response:
        return ({"role": "assistant", "content": response},)
    if not isinstance(response, list) or not response:
        raise _wrong(record, name, "a text or a list of chat messages, not empty")
    return tuple(_read_learned(record, name, at, message) for at, message in enumerate(response))


def _read_learned(record: TaskRow, name: str, at: int, message: Any) -> Message:
    """A message of a conversation. Its turn is learned or not: a weight between would be taken for 1."""
    found = _read_message(record, name, at, message)
    weight = found.get("weight", 1)
    if found["role"] == "assistant" and (not isinstance(weight, int | float) or weight not in (0, 1)):
        problem = f"{name}[{at}].weight must be 0 or 1, got {type(weight).__name__} {str(weight)[:60]!r}"
        fix = "0 leaves a turn out, 1 learns it; to count rows differently, give files their data.train_weights"
        raise _mistake(record, problem, fix)
    return found


def _from_json(value: Any) -> Any:
    """Messages that a CSV cell holds as JSON; everything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _read_schemas(record: TaskRow) -> tuple[Mapping[str, Any], ...] | tuple[str, ...] | None:
    tools = _from_json(record.fields.get("tools"))
    if isinstance(tools, list) and tools and all(isinstance(tool, Mapping) for tool in tools):
        return tuple(tools)
    return _read_tools(record)


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
    try:
        str(uid).encode()
    except UnicodeEncodeError as error:
        raise _wrong(record, "uid", "text without halves of surrogate pairs") from error
    return str(uid)


def _read_messages(record: TaskRow, data: DataConfig) -> tuple[Message, ...]:
    if data.prompt_template is not None:
        prompt: Any = _fill_template(record, data)
    elif data.prompt_key not in record.fields and _read_environment_kwargs(record):
        return ()  # its environment writes the prompt
    elif data.prompt_key not in record.fields:
        raise _absent(record, data.prompt_key, "data.prompt_key")
    else:
        prompt = record.fields[data.prompt_key]
    name = data.prompt_key
    if isinstance(prompt, str) and prompt:
        return (*_system(data), {"role": "user", "content": prompt})
    if not isinstance(prompt, list) or not prompt:
        raise _wrong(record, name, "a text or a list of chat messages, not empty")
    messages = tuple(_read_message(record, name, at, message) for at, message in enumerate(prompt))
    if data.system_prompt is not None and any(message["role"] == "system" for message in messages):
        fix = "leave data.system_prompt out, or take the system message out of the row"
        raise _mistake(record, f"{name} has a system message of its own, and data.system_prompt is set", fix)
    return (*_system(data), *messages)


def _system(data: DataConfig) -> tuple[Message, ...]:
    return () if data.system_prompt is None else ({"role": "system", "content": data.system_prompt},)


def _fill_template(record: TaskRow, data: DataConfig) -> str:
    """The user's message that `data.prompt_template` makes of a row's fields."""
    from jinja2 import TemplateError, UndefinedError

    assert data.prompt_template is not None
    if isinstance(record.fields.get(data.prompt_key), list):
        fix = "leave data.prompt_template out, or give the prompt as text"
        raise _mistake(record, f"{data.prompt_key} holds chat messages, and data.prompt_template makes its own", fix)
    try:
        text = str(compile_template(data).render(record.fields))
    except UndefinedError as error:
        present = ", ".join(record.fields) or "no fields at all"
        raise _mistake(record, f"data.prompt_template: {error.message}; the row has {present}") from error
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise _mistake(record, f"data.prompt_template cannot be filled with this row: {error}") from error
    if not text.strip():
        raise _mistake(record, "data.prompt_template gives an empty text for this row")
    return text


def compile_template(data: DataConfig) -> "Template":
    """The template of `data.prompt_template`; a ConfigError where it is no Jinja."""
    assert data.prompt_template is not None
    return compile_jinja(data.prompt_template, "data.prompt_template", data.origin("prompt_template"))


def compile_jinja(text: str, key: str, origin: object = None) -> "Template":
    """A template over fields, which cannot reach anything else; a ConfigError for `key` where it is no Jinja."""
    from jinja2 import TemplateSyntaxError

    try:
        return _compile(text)
    except TemplateSyntaxError as error:
        problem = f"is not a Jinja template: {error.message} in its line {error.lineno}"
        fix = "a field is written {{ question }}; write braces of your own as {{ '{{' }}"
        raise ConfigError([Mistake(key, problem, text, origin, fix)]) from error


@lru_cache(maxsize=8)
def _compile(text: str) -> "Template":
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False).from_string(text)


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
