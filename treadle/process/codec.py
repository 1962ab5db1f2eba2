"""Codec of messages from a process that has run foreign code: JSON and raw arrays, checked field by field.

Owns the form of every message on the way up, and its limits. Tools, environments and reward functions run in such a
process and can write to its channel: whatever arrives is a message of the right shape, or `DecodeError`. No code of its
own choosing runs, as a pickle would; the way down stays a pickle. Knows no channel.
Invariant: what `decode` returns has the declared type in every field, as deep as fields are declared; arrays of numbers
and bytes come back bit for bit. Values of free form are plain JSON: tuples come back as lists, and what JSON cannot
hold is `EncodeError`, by name.

    frame    length of the JSON (4 bytes), the JSON, the arrays one after the other
    JSON     [kind, number, name of the record, its fields in order]; an array is [bytes, values]
"""

import json
import struct
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from treadle.process.channel import FrameCodec
from treadle.process.rpc import RpcCancel, RpcError, RpcNotify, RpcReply, RpcRequest

MAX_FRAME_BYTES = 256 << 20
"""A trajectory of a million tokens takes 14 MB and its text."""
MAX_JSON_BYTES = 64 << 20
MAX_VALUES = 4_000_000
"""Commas and brackets in the JSON: memory goes by its values, and small ones take much more than their text."""
_MAX_INT = 1 << 63

_LENGTH = struct.Struct("!I")

RpcMessage = RpcRequest | RpcReply | RpcNotify | RpcCancel
Write = Callable[[Any, list[bytes]], Any]
Read = Callable[[Any, "_Arrays"], Any]


class DecodeError(ValueError):
    """Bytes that no process of ours sends."""


class EncodeError(ValueError):
    """A value that cannot leave its process."""


@dataclass(frozen=True)
class RecordCodec:
    """The records (dataclasses) that one kind of process may send, and in which messages."""

    requests: tuple[type, ...] = ()
    notifies: tuple[type, ...] = ()
    replies: tuple[type, ...] = ()
    errors: tuple[str, ...] = ()
    """Kinds of errors that it may raise at this end."""
    checks: Mapping[type, Callable[[Any], None]] = field(default_factory=dict)
    """What is checked of a record beyond its types; raises ValueError."""
    replace_reply: Callable[[Any, str], Any] | None = None
    """A reply in the place of one that cannot be encoded, with the problem; None: it is raised."""
    max_bytes: int = MAX_FRAME_BYTES

    def frames(self) -> FrameCodec:
        """For a channel."""
        return FrameCodec(self.encode, self.decode, (DecodeError,), self.max_bytes)

    def encode(self, message: RpcMessage) -> bytes:
        """One message as a frame."""
        try:
            return self._frame(message)
        except EncodeError as problem:
            if not isinstance(message, RpcReply) or message.error is not None or self.replace_reply is None:
                raise
            return self._frame(RpcReply(message.number, self.replace_reply(message.body, str(problem))))

    def _frame(self, message: RpcMessage) -> bytes:
        number, body = getattr(message, "number", 0), getattr(message, "body", None)
        if isinstance(message, RpcReply) and message.error is not None:
            body = message.error
        arrays = list[bytes]()
        values = None if body is None else _writer(_type_of(body))(body, arrays)
        try:
            text = _json((type(message).__name__, number, None if body is None else type(body).__name__, values))
        except (RecursionError, ValueError) as error:
            raise EncodeError(f"{type(error).__name__}: {error}") from error
        head = text.encode("utf-8", "surrogatepass")
        _check_json(head, EncodeError)
        frame = b"".join((_LENGTH.pack(len(head)), head, *arrays))
        if len(frame) > self.max_bytes:
            raise EncodeError(f"it has {len(frame) >> 20} MiB; at most {self.max_bytes >> 20} travel")
        return frame

    def decode(self, frame: bytes | memoryview) -> RpcMessage:
        """The message in a frame; `DecodeError` for everything else."""
        try:
            (size,) = _LENGTH.unpack_from(frame)
            head = bytes(frame[_LENGTH.size : _LENGTH.size + size])
            _check_json(head, DecodeError)
            kind, number, name, values = json.loads(head.decode("utf-8", "surrogatepass"))
            arrays = _Arrays(frame, _LENGTH.size + size, self.checks)
            body = None if name is None else _reader(self._record(kind, name))(values, arrays)
            arrays.check_end()
            return self._message(kind, _read_int(number, arrays), body)
        except DecodeError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
            raise DecodeError(f"{type(error).__name__}: {error}"[:200]) from error

    def _record(self, kind: str, name: str) -> type:
        """The record with that name, if such a message may carry it."""
        carried = {"RpcRequest": self.requests, "RpcNotify": self.notifies, "RpcReply": (*self.replies, RpcError)}
        for record in carried.get(kind, ()):
            if record.__name__ == name:
                return record
        return _refuse(f"a {kind} with a {name}")

    def _message(self, kind: str, number: int, body: Any) -> RpcMessage:
        if kind == "RpcCancel" and body is None:
            return RpcCancel(number)
        if kind == "RpcReply" and isinstance(body, RpcError):
            if body.kind not in (*self.errors, "Cancelled") or body.mistakes:
                _refuse(f"a reply with a {body.kind}")
            return RpcReply(number, error=body)
        if body is None and (kind != "RpcReply" or NoneType not in self.replies):
            _refuse(f"a {kind} with nothing")
        if kind == "RpcReply":
            return RpcReply(number, body)
        return RpcRequest(number, body) if kind == "RpcRequest" else RpcNotify(body)


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
    raise EncodeError(f"it holds a {type(value).__module__}.{type(value).__qualname__}")


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_stand_in).encode


def _type_of(body: object) -> Any:
    return type(body)


def _refuse(problem: str) -> NoReturn:
    raise DecodeError(problem)


@cache
def _writer(hint: Any) -> Write:
    """What writes a value of a declared type."""
    arguments, origin = get_args(hint), get_origin(hint)
    if is_dataclass(hint):
        declared = get_type_hints(hint)
        parts = [(item.name, _writer(declared[item.name])) for item in fields(hint)]
        return lambda item, arrays: [write(getattr(item, name), arrays) for name, write in parts]
    if hint in (tuple[int, ...], tuple[float, ...]):
        from treadle.journal.codec import pack_floats, pack_ints  # brings the journal, which not every process needs

        pack: Callable[[Any], bytes] = pack_ints if hint == tuple[int, ...] else pack_floats
        return lambda item, arrays: _keep(pack(item), len(item), arrays)
    if hint is bytes:
        return lambda item, arrays: _keep(item, len(item), arrays)
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
    """The arrays of a frame, taken one after the other; and what is checked of the records around them."""

    def __init__(self, frame: bytes | memoryview, at: int, checks: Mapping[type, Callable[[Any], None]]) -> None:
        self._frame, self._at, self.checks = frame, at, checks

    def take(self, entry: Any, sizes: tuple[int, ...]) -> tuple[bytes, int]:
        """The bytes of the next array and how many values it has, each of one of these sizes."""
        size, count = entry
        if type(size) is not int or type(count) is not int or count < 0 or size not in [one * count for one in sizes]:
            raise DecodeError(f"an array of {size!r} bytes and {count!r} values")
        blob = bytes(self._frame[self._at : self._at + size])
        if len(blob) != size:
            raise DecodeError("an array ends early")
        self._at += size
        return blob, count

    def check_end(self) -> None:
        if self._at != len(self._frame):
            raise DecodeError(f"{len(self._frame) - self._at} bytes that belong to nothing")


@cache
def _reader(hint: Any) -> Read:
    """What reads a value of a declared type, or raises."""
    arguments, origin = get_args(hint), get_origin(hint)
    if is_dataclass(hint):
        return _record_reader(hint)
    if hint in (tuple[int, ...], tuple[float, ...]):
        from treadle.journal.codec import unpack_floats, unpack_ints

        if hint == tuple[int, ...]:
            return lambda value, arrays: unpack_ints(arrays.take(value, (4,))[0])
        return lambda value, arrays: unpack_floats(*arrays.take(value, (4, 8)))
    if hint is bytes:
        return lambda value, arrays: arrays.take(value, (1,))[0]
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
    parts = [_reader(declared[item.name]) for item in fields(record)]

    def read(value: Any, arrays: _Arrays) -> Any:
        if len(_of(list, value)) != len(parts):
            raise DecodeError(f"a {record.__name__} of {len(value)} fields")
        made = record(*[part(one, arrays) for part, one in zip(parts, value, strict=True)])
        if record in arrays.checks:
            arrays.checks[record](made)
        return made

    return read


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise DecodeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _read_int(value: Any, arrays: _Arrays) -> int:
    if type(value) is not int or not -_MAX_INT <= value < _MAX_INT:
        raise DecodeError("no whole number of 64 bits")
    return value


def _read_float(value: Any, arrays: _Arrays) -> float:
    if type(value) not in (int, float):
        raise DecodeError(f"a {type(value).__name__} where a number belongs")
    return float(value)
