"""Serialization of what an agent worker sends to the driver: JSON and raw arrays, checked field by field.

Owns the form of every message on the way up, and its limits. Tools run in the process of a worker and can write to its
channel: whatever arrives is a message of the right shape, or `Garbage`. No code of its own choosing runs, as a pickle
would; the way down stays a pickle. Knows no channel.
Invariant: what `decode` returns has the declared type in every field, as deep as fields are declared; ids, mask,
versions and logprobs come back bit for bit. Values of free form (`extra`, arguments, messages) are plain JSON: tuples
come back as lists, and what JSON cannot hold fails its trajectory, by name.

    frame    length of the JSON (4 bytes), the JSON, the arrays one after the other
    JSON     [kind, number, name of the record, its fields in order]; an array is [bytes, values]
"""

import json
import struct
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from treadle.engine.channel import Answer, Ask, Form, Tell, Withdraw
from treadle.errors import (
    ConfigError,
    EngineFailure,
    EnvironmentFailure,
    Failure,
    LoopFailure,
    Mistake,
    PromptFailure,
    RequestRefused,
    RewardFailure,
    ToolFailure,
)
from treadle.journal.codec import pack_floats, pack_ints, unpack_floats, unpack_ints
from treadle.observe import Wait
from treadle.rollout.worker import Dropped
from treadle.types import Outcome, Request, Row, Trajectory

MAX_FRAME_BYTES = 256 << 20
"""A trajectory of a million tokens takes 14 MB and its text."""
MAX_JSON_BYTES = 64 << 20
MAX_VALUES = 4_000_000
"""Commas and brackets in the JSON: memory goes by its values, and small ones take much more than their text."""
_MAX_INT = 1 << 63

_LENGTH = struct.Struct("!I")
_FAILURES: Mapping[str, type[Failure]] = {
    kind.__name__: kind
    for kind in (
        *(PromptFailure, EngineFailure, RequestRefused, ToolFailure),
        *(EnvironmentFailure, LoopFailure, RewardFailure),
    )
}

Write = Callable[[Any, list[bytes]], Any]
Read = Callable[[Any, "_Arrays"], Any]


class Garbage(ValueError):
    """Bytes that no worker of ours sends."""


class Unsendable(ValueError):
    """A value that cannot leave a worker."""


@dataclass(frozen=True, slots=True)
class WaitReport:
    """What the sessions of a worker wait for. `since` is an age here: clocks differ between machines."""

    waits: tuple[Wait, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's first answer: whether it can work, and if not, why."""

    problem: ConfigError | str | None = None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """`Ready` as it travels."""

    problem: str | None
    mistakes: tuple[tuple[str, ...], ...]
    """Key, problem, value, origin and fix; of which the last three may be missing, as texts."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """A failure as it travels."""

    kind: str
    detail: str


_RECORDS: Mapping[str, type] = {
    kind.__name__: kind for kind in (Request, WaitReport, Trajectory, Dropped, _Refusal, _Fault)
}


def encode(message: Ask | Answer | Tell | Withdraw | Ready) -> bytes:
    """One message as a frame. A trajectory that cannot be sent becomes one that failed, which says why."""
    try:
        return _frame(message)
    except Unsendable as problem:
        if not isinstance(message, Answer) or not isinstance(message.body, Trajectory):
            raise
        return _frame(Answer(message.number, _failed(message.body, str(problem))))


def _failed(trajectory: Trajectory, problem: str) -> Trajectory:
    outcome = Outcome.failed(LoopFailure(f"the trajectory cannot leave its worker process: {problem}"))
    return Trajectory(
        trajectory.uid,
        trajectory.sample,
        (),
        outcome,
        timing=trajectory.timing,
        attempt=trajectory.attempt,
        data_source=trajectory.data_source,
    )


def _frame(message: Ask | Answer | Tell | Withdraw | Ready) -> bytes:
    number, body = getattr(message, "number", 0), getattr(message, "body", None)
    if isinstance(message, Ready):
        body = _refusal(message)
    elif isinstance(message, Answer) and message.failed:
        body = _Fault(_kind_of(message.body), str(message.body))
    name, arrays = type(body).__name__, list[bytes]()
    values = None if body is None else _writer(_RECORDS[name])(body, arrays)
    try:
        text = _json((type(message).__name__, number, None if body is None else name, values))
    except (RecursionError, ValueError) as error:
        raise Unsendable(f"{type(error).__name__}: {error}") from error
    head = text.encode("utf-8", "surrogatepass")
    _check_json(head, Unsendable)
    frame = b"".join((_LENGTH.pack(len(head)), head, *arrays))
    if len(frame) > MAX_FRAME_BYTES:
        raise Unsendable(f"it has {len(frame) >> 20} MiB; at most {MAX_FRAME_BYTES >> 20} travel")
    return frame


def _check_json(head: bytes, error: type[ValueError]) -> None:
    if len(head) > MAX_JSON_BYTES:
        raise error(f"its text has {len(head) >> 20} MiB; at most {MAX_JSON_BYTES >> 20} travel")
    values = head.count(b",") + head.count(b"[") + head.count(b"{")
    if values > MAX_VALUES:
        raise error(f"it has {values:,} values; at most {MAX_VALUES:,} travel")


def _stand_in(value: object) -> object:
    """JSON's own kind of value for one that is as good as that."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise Unsendable(
        f"it holds a {type(value).__module__}.{type(value).__qualname__}; give loops and tools extra values of plain "
        "JSON, or set rollout.agent.num_workers=0"
    )


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_stand_in).encode


def _kind_of(failure: Exception) -> str:
    for kind in type(failure).__mro__:
        if kind.__name__ in _FAILURES:
            return kind.__name__
    return LoopFailure.__name__


def _refusal(ready: Ready) -> _Refusal:
    if not isinstance(ready.problem, ConfigError):
        return _Refusal(ready.problem, ())
    return _Refusal(
        None,
        tuple(
            (mistake.key, mistake.problem, str(mistake.value), str(mistake.origin or ""), mistake.fix or "")
            for mistake in ready.problem.mistakes
        ),
    )


def decode(frame: bytes | memoryview) -> Ask | Answer | Tell | Withdraw | Ready:
    """The message in a frame; `Garbage` for everything else."""
    try:
        (size,) = _LENGTH.unpack_from(frame)
        head = bytes(frame[_LENGTH.size : _LENGTH.size + size])
        _check_json(head, Garbage)
        kind, number, name, values = json.loads(head.decode("utf-8", "surrogatepass"))
        arrays = _Arrays(frame, _LENGTH.size + size)
        body = None if name is None else _reader(_RECORDS[name])(values, arrays)
        arrays.check_end()
        return _message(kind, _read_int(number, arrays), body)
    except Garbage:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
        raise Garbage(f"{type(error).__name__}: {error}"[:200]) from error


def _message(kind: str, number: int, body: Any) -> Ask | Answer | Tell | Withdraw | Ready:
    if kind == "Ask" and isinstance(body, Request):
        return Ask(number, body)
    if kind == "Tell" and isinstance(body, WaitReport):
        return Tell(body)
    if kind == "Answer" and isinstance(body, Trajectory | Dropped):
        return Answer(number, body)
    if kind == "Answer" and isinstance(body, _Fault):
        return Answer(number, _FAILURES[body.kind](body.detail), failed=True)
    if kind == "Withdraw" and body is None:
        return Withdraw(number)
    if kind == "Ready" and isinstance(body, _Refusal):
        mistakes = [
            Mistake(key, problem, value, origin or None, fix or None)
            for key, problem, value, origin, fix in body.mistakes
        ]
        return Ready(ConfigError(mistakes) if mistakes else body.problem)
    return _refuse(f"a {kind} with a {type(body).__name__}")


def _refuse(problem: str) -> NoReturn:
    raise Garbage(problem)


@cache
def _writer(hint: Any) -> Write:
    """What writes a value of a declared type."""
    arguments, origin = get_args(hint), get_origin(hint)
    if is_dataclass(hint):
        declared = get_type_hints(hint)
        parts = [(field.name, _writer(declared[field.name])) for field in fields(hint)]
        return lambda item, arrays: [write(getattr(item, name), arrays) for name, write in parts]
    if hint == tuple[int, ...]:
        return lambda item, arrays: _keep(pack_ints(item), len(item), arrays)
    if hint == tuple[float, ...]:
        return lambda item, arrays: _keep(pack_floats(item), len(item), arrays)
    if origin is tuple:
        inner = _writer(arguments[0])
        return lambda item, arrays: [inner(one, arrays) for one in item]
    if origin in (Union, UnionType):
        (inner,) = (_writer(argument) for argument in arguments if argument is not NoneType)
        return lambda item, arrays: None if item is None else inner(item, arrays)
    return lambda item, arrays: item


def _keep(blob: bytes, count: int, arrays: list[bytes]) -> list[int]:
    arrays.append(blob)
    return [len(blob), count]


class _Arrays:
    """The arrays of a frame, taken one after the other."""

    def __init__(self, frame: bytes | memoryview, at: int) -> None:
        self._frame, self._at = frame, at

    def take(self, entry: Any, sizes: tuple[int, ...]) -> tuple[bytes, int]:
        """The bytes of the next array and how many values it has, each of one of these sizes."""
        size, count = entry
        if type(size) is not int or type(count) is not int or count < 0 or size not in [one * count for one in sizes]:
            raise Garbage(f"an array of {size!r} bytes and {count!r} values")
        blob = bytes(self._frame[self._at : self._at + size])
        if len(blob) != size:
            raise Garbage("an array ends early")
        self._at += size
        return blob, count

    def check_end(self) -> None:
        if self._at != len(self._frame):
            raise Garbage(f"{len(self._frame) - self._at} bytes that belong to nothing")


@cache
def _reader(hint: Any) -> Read:
    """What reads a value of a declared type, or raises."""
    arguments, origin = get_args(hint), get_origin(hint)
    if is_dataclass(hint):
        return _record_reader(hint)
    if hint == tuple[int, ...]:
        return lambda value, arrays: unpack_ints(arrays.take(value, (4,))[0])
    if hint == tuple[float, ...]:
        return lambda value, arrays: unpack_floats(*arrays.take(value, (4, 8)))
    if origin is tuple:
        inner = _reader(arguments[0])
        return lambda value, arrays: tuple(inner(one, arrays) for one in _of(list, value))
    if origin in (Union, UnionType):
        (inner,) = (_reader(argument) for argument in arguments if argument is not NoneType)
        return lambda value, arrays: None if value is None else inner(value, arrays)
    if origin is not None and issubclass(origin, Mapping):
        inner = _reader(arguments[1])
        return lambda value, arrays: {name: inner(one, arrays) for name, one in _of(dict, value).items()}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value, arrays: hint(value)
    if hint is Any:
        return lambda value, arrays: value
    return {int: _read_int, float: _read_float}.get(hint, lambda value, arrays: _of(hint, value))


def _record_reader(record: Any) -> Read:
    declared = get_type_hints(record)
    parts = [_reader(declared[field.name]) for field in fields(record)]

    def read(value: Any, arrays: _Arrays) -> Any:
        if len(_of(list, value)) != len(parts):
            raise Garbage(f"a {record.__name__} of {len(value)} fields")
        made = record(*[part(one, arrays) for part, one in zip(parts, value, strict=True)])
        if isinstance(made, Row):
            _check_row(made)
        return made

    return read


def _check_row(row: Row) -> None:
    lengths = {len(row.ids), len(row.mask), len(row.logprobs), len(row.versions)}
    if len(lengths) != 1 or len(row.processed_logprobs) not in (0, len(row.ids)):
        raise Garbage("a row whose ids, mask, logprobs and versions differ in length")
    if min(row.prompt_ids, default=0) < 0 or min(row.ids, default=0) < 0 or not {0, 1}.issuperset(row.mask):
        raise Garbage("a row with negative ids, or a mask of other numbers than 0 and 1")


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise Garbage(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _read_int(value: Any, arrays: _Arrays) -> int:
    if type(value) is not int or not -_MAX_INT <= value < _MAX_INT:
        raise Garbage("no whole number of 64 bits")
    return value


def _read_float(value: Any, arrays: _Arrays) -> float:
    if type(value) not in (int, float):
        raise Garbage(f"a {type(value).__name__} where a number belongs")
    return float(value)


WORKER_END = Form(encode=encode)
"""Of a channel: pickles come down, and what is sent up is plain."""
DRIVER_END = Form(decode=decode, garbage=(Garbage,), max_bytes=MAX_FRAME_BYTES)
