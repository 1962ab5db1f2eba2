"""Pickle scan: the first use of a text runner in a serialized function, by its code objects. Nothing of it is run.

The pickle is taken apart with stand-ins in the place of everything that it would import or call. What is left are the
names it refers to, the modules its functions know, and their code, which is read as instructions. Modules of the
user's that it refers to are searched by `source_scan`.
"""

import builtins
import dis
import pickle
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from types import CodeType
from typing import Any

from treadle.reward.source_scan import SourceScan, runs_text

_BUILTINS = frozenset(dir(builtins))
_BETWEEN = frozenset({"PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG", "COPY", "NOP", "RESUME"})
"""Instructions that leave the last value where it is."""
_LOOKUPS = ("LOAD_ATTR", "LOAD_METHOD")


class StandIn(type):
    """What a pickle would look up or make: says what it was made of, and takes everything. A type, since pickles make
    classes and then objects of them."""

    path: str
    """The dotted name that was looked up."""
    arguments: tuple[Any, ...]
    held: list[Any]
    made: "list[StandIn]"

    def __call__(cls, *arguments: Any, **_: Any) -> "StandIn":
        return make_stand_in(cls.path, (*cls.arguments, *arguments), cls.made)

    def __setstate__(cls, state: Any) -> None:
        cls.held.append(state)

    def __setitem__(cls, name: Any, value: Any) -> None:
        cls.held.append((name, value))

    def append(cls, value: Any) -> None:
        cls.held.append(value)

    extend = add = append


def make_stand_in(path: str, arguments: tuple[Any, ...], made: list[StandIn]) -> StandIn:
    def new(cls: StandIn, *more: Any, **_: Any) -> StandIn:
        return cls(*more)

    item = StandIn(path, (), {"path": path, "arguments": arguments, "held": [], "made": made, "__new__": new})
    made.append(item)
    return item


class InertUnpickler(pickle.Unpickler):
    """Imports nothing, calls nothing."""

    def __init__(self, content: BytesIO) -> None:
        super().__init__(content)
        self.looked_up: list[str] = []
        self.made: list[StandIn] = []

    def find_class(self, module: str, name: str) -> Any:
        self.looked_up.append(f"{module}.{name}")
        return make_stand_in(f"{module}.{name}", (), self.made)

    def persistent_load(self, pid: Any) -> Any:
        return None


def find_in_pickle(file: Path) -> str | None:
    """The first use of a text runner in a serialized function, in words."""
    names = list(dict.fromkeys(_names(file.read_bytes())))
    runner = next((found for name in names if (found := runs_text(name))), None)
    if runner is not None:
        return f"{file.name} uses {runner}"
    reached = SourceScan().find_any(names)
    return None if reached is None else str(reached)


def _names(content: bytes) -> Iterator[str]:
    """Dotted names that the pickles of a file refer to, and that their code uses."""
    stream = BytesIO(content)
    while stream.tell() < len(content):
        unpickler = InertUnpickler(stream)
        try:
            unpickler.load()
        except Exception:  # noqa: BLE001 - whatever it is, the real load reports it
            return
        # What every pickle of a function is made with is no use of it.
        yield from (name for name in unpickler.looked_up if not name.startswith("cloudpickle."))
        known = dict(_known(unpickler.made))
        yield from known.values()
        codes = list(_codes(unpickler.made))
        for code in (*codes, *codes):  # the first time for what they import, which functions inside of them use
            yield from _used(code, known)


def _known(made: Iterable[StandIn]) -> Iterator[tuple[str, str]]:
    """Globals of the functions: the dotted names that their names stand for."""
    for item in made:
        for state in (*item.arguments, *item.held):
            for fields in state if isinstance(state, tuple) else ():
                values = fields.get("__globals__") if isinstance(fields, dict) else None
                for name, value in values.items() if isinstance(values, dict) else ():
                    if dotted := _dotted(value):
                        yield name, dotted


def _dotted(value: Any) -> str:
    """The name of a class or function that was looked up, or of a module."""
    if not isinstance(value, StandIn):
        return ""
    if value.path.endswith(".subimport"):
        return str(value.arguments[0])
    return "" if value.arguments else value.path


def _codes(made: Iterable[StandIn]) -> Iterator[CodeType]:
    for item in made:
        if item.path.endswith("._builtin_type") and item.arguments[:1] == ("CodeType",) and item.arguments[1:]:
            parts = [_without_stand_ins(part) for part in item.arguments[1:]]
            yield CodeType(*parts)


def _without_stand_ins(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(None if isinstance(item, StandIn) else item for item in part)
    return part


def _used(code: CodeType, known: dict[str, str]) -> Iterator[str]:
    """Dotted names that its instructions put together: a global or an import, and attributes of it.

    What names stand for is added to `known`.
    """
    here, imported = "", ""
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        before, here = here, here if kind in _BETWEEN else ""
        if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            here = known.get(name) or (f"builtins.{name}" if name in _BUILTINS else "")
        elif kind == "IMPORT_NAME":
            here = imported = name
        elif kind == "IMPORT_FROM":
            here = f"{imported}.{name}"
        elif kind in _LOOKUPS and before:
            here = f"{before}.{name}"
        elif kind.startswith("STORE_") and before:
            known[name] = (
                before.partition(".")[0] if before == imported and name == before.partition(".")[0] else before
            )
        elif kind.startswith("LOAD_") and isinstance(name, str):
            here = known.get(name, "")
        if here:
            yield here
