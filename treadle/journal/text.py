"""Any value as JSON text that can always be written, and back.

Owns the one JSON dialect of the journal. Knows nothing of records or tables.
Invariant: `encode` returns strict JSON that SQLite can store, whatever a loop, a tool or a model put into a value;
what JSON can hold comes back equal (tuples as lists), numbers that are not finite come back too, and the rest comes
back as its `repr`.
"""

import json
import math
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

_NOT_FINITE = "$float"
_MAX_DEPTH = 64


def _stand_in(value: object) -> object:
    """A value of JSON's own kinds for one that is not."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return repr(value)


# A circle ends in a RecursionError soon enough; looking out for one in every container does not pay.
_fast = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"), default=_stand_in
).encode
_ascii = json.JSONEncoder(
    ensure_ascii=True, check_circular=False, allow_nan=False, separators=(",", ":"), default=_stand_in
).encode


def encode(value: object) -> str:
    """`value` as JSON text."""
    try:
        return storable(_fast(value), value)
    except (TypeError, ValueError, RecursionError):
        return _ascii(_plain(value, 0))


def storable(text: str, value: object) -> str:
    """`text`, or the escaped form of `value` where half a surrogate pair would keep SQLite from storing it."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _ascii(value)
    return text


def label(text: str) -> str:
    """A plain string for a column: as it is, unless it holds half a surrogate pair, which is then spelt out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _plain(value: object, depth: int) -> object:
    """A copy that holds only what JSON can hold; slow, for values the fast way refuses."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NOT_FINITE: repr(float(value))}
    if depth == _MAX_DEPTH:
        return f"<{type(value).__name__} nested too deep>"
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain(_stand_in(value), depth + 1)


def decode(text: str) -> Any:
    """The value behind `text`."""
    return json.loads(text, object_hook=_revive) if _NOT_FINITE in text else json.loads(text)


def _revive(found: dict[str, Any]) -> Any:
    if found.keys() == {_NOT_FINITE}:
        return float(found[_NOT_FINITE])
    return found
