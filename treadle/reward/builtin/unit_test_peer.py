"""Peers of a unit-test grading: the program in one box, its tests in another, and the calls between them.

    tests    assert Stack().pop() == 3   ──►  {"do": "call", "on": 4, …}  ──►  program
             3                           ◄──  {"value": 3}                ◄──

Run in boxes as `python3 -I -c SOURCE program` and `… tests`, with the standard library alone. Plain data crosses as a
copy. What else the program has (objects, classes, generators) stays there: a test holds a `RemoteObject`, whose
attributes, calls, items and iteration are asked of the program. Functions that a test passes as arguments stay with the
test. Invariant: a program gives values, and decides nothing. No comparison, operator or `in` between its objects and
plain data is asked of it, so it never learns what is expected, nor says that it is equal; only two of its own objects
are compared there. A name of the program hides no builtin, no module and no name of the tests.
"""

import ast
import builtins
import enum
import importlib
import json
import operator
import os
import sys
import types
import unittest

TYPE_CHECKING = False
if TYPE_CHECKING:  # at the cost of no import
    from collections.abc import Callable
    from typing import Any, NoReturn

MAX_DEPTH = 50
LONG_INT_BITS = 10_000
COLLECTIONS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
OPERATORS = ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod")


class LineChannel:
    """Lines of JSON: orders and replies, of which each side has one at a time."""

    def __init__(self) -> None:
        self.status = os.dup(3)
        os.close(3)
        self.source = os.fdopen(os.dup(0), "rb")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def receive(self) -> "Any":
        line = self.source.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def send(self, message: "dict[str, Any]") -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.status, data) :]


def encode(value: "Any", refer: "Callable[[Any], dict[str, Any]]", depth: int = 0) -> "Any":
    """A value as JSON; `refer` gives what stands for one that is no plain data."""
    if depth > MAX_DEPTH:
        raise TypeError("a value is nested too deeply")
    if isinstance(value, enum.Enum):
        return refer(value)
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer, depth + 1) for item in value]}
    if isinstance(value, dict):
        pairs = list(value.items())
        return {"dict": [[encode(key, refer, depth + 1), encode(item, refer, depth + 1)] for key, item in pairs]}
    for kinds, encode_scalar in SCALARS:
        if isinstance(value, kinds):
            return encode_scalar(value)
    if not isinstance(value, type) and hasattr(type(value), "__index__"):  # an array library's number
        return operator.index(value)
    return refer(value)


def encode_int(value: int) -> "Any":
    """JSON's reader refuses numbers of many digits."""
    return {"int": hex(value)} if value.bit_length() > LONG_INT_BITS else int(value)


SCALARS: "tuple[tuple[Any, Callable[[Any], Any]], ...]" = (
    ((type(None), bool), lambda value: value),
    (int, encode_int),
    (str, str),
    (float, lambda value: {"float": repr(float(value))}),
    ((bytes, bytearray), lambda value: {"bytes": bytes(value).hex()}),
    (complex, lambda value: {"complex": [repr(value.real), repr(value.imag)]}),
    (range, lambda value: {"range": [value.start, value.stop, value.step]}),
)


def decode(value: "Any", find: "Callable[[str, Any], Any]") -> "Any":
    """The value that JSON stands for; `find` gives those that are no plain data."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "int":
        return int(items, 16)
    if kind == "float":
        return float(items)
    if kind == "bytes":
        return bytes.fromhex(items)
    if kind == "complex":
        return complex(float(items[0]), float(items[1]))
    if kind == "range":
        return range(*items)
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in items}
    if kind in COLLECTIONS:
        return COLLECTIONS[kind]([decode(item, find) for item in items])
    return find(kind, items)


def describe_error(error: BaseException) -> "dict[str, Any]":
    """An exception: its class, the first of its bases that every Python has, and its text."""
    return {"error": [type(error).__name__, builtin_base(type(error)), str(error)[:500]]}


def builtin_base(kind: type) -> str:
    return next((base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"), "Exception")


def make_error(made: "dict[str, type[Exception]]", name: str, base: str) -> "type[Exception]":
    """The class of this side for an exception of the other: a builtin, or one of that name, made once."""
    for known in (name, base):
        kind = getattr(builtins, known, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            if known == name:
                return kind
            return made.setdefault(name, type(name, (kind,), {}))
    return made.setdefault(name, type(name, (RuntimeError,), {}))


class Peer:
    """What both sides do: send an order, serve the other's meanwhile, and read the reply."""

    def __init__(self, channel: LineChannel) -> None:
        self.channel = channel
        self.errors: dict[str, type[Exception]] = {}

    def ask(self, order: "dict[str, Any]") -> "dict[str, Any]":
        self.channel.send(order)
        while True:
            message = self.channel.receive()
            if "do" not in message:
                break
            self.channel.send(self.perform(message))
        if "error" in message:
            name, base, text = message["error"]
            kind = make_error(self.errors, str(name), str(base))
            try:
                raised = kind(str(text))
            except TypeError:
                raised = RuntimeError(str(text))
            raise raised
        return dict(message)

    def perform(self, order: "dict[str, Any]") -> "dict[str, Any]":
        raise NotImplementedError


class ProgramPeer(Peer):
    """The program: its names, and what is done with its objects."""

    def __init__(self, channel: LineChannel) -> None:
        super().__init__(channel)
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def refer(self, value: "Any") -> "dict[str, Any]":
        callback = getattr(value, "treadle_callback", None)
        if isinstance(value, types.FunctionType) and callback is not None:
            return {"callback": callback}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"exception": [value.__name__, builtin_base(value)]}
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return {"object": self.numbers[id(value)]}

    def find(self, kind: str, number: "Any") -> "Any":
        if kind == "object":
            return self.objects[number]

        def callback(*arguments: "Any") -> "Any":
            order = {"do": "callback", "on": number, "arguments": encode(list(arguments), self.refer)}
            return decode(self.ask(order)["value"], self.find)

        callback.treadle_callback = number  # type: ignore[attr-defined]
        return callback

    def load(self) -> "dict[str, Any]":
        scope: dict[str, Any] = {"__name__": "solution"}
        with open("main.py") as file:
            exec(compile(file.read(), "main.py", "exec"), scope)
        names = {}
        for name, value in list(scope.items()):
            if not name.startswith("__") and not isinstance(value, types.ModuleType):
                names[name] = encode(value, self.refer)
        return {"names": names}

    def perform(self, order: "dict[str, Any]") -> "dict[str, Any]":
        try:
            arguments = decode(order["arguments"], self.find)
            named = decode(order["named"], self.find) if "named" in order else {}
            value = self.act(order["do"], self.objects[order["on"]], arguments, named)
            return {"value": encode(value, self.refer), "arguments": encode(arguments, self.refer)}
        except BaseException as error:  # noqa: BLE001  it is the reply
            return describe_error(error)

    @staticmethod
    def act(verb: str, subject: "Any", arguments: "list[Any]", named: "dict[str, Any]") -> "Any":
        actions: dict[str, Callable[..., Any]] = {
            "call": lambda *words, **more: subject(*words, **more),
            "get": lambda name: getattr(subject, name),
            "set": lambda name, value: setattr(subject, name, value),
            "item": lambda key: subject[key],
            "set item": lambda key, value: operator.setitem(subject, key, value),
            "delete item": lambda key: operator.delitem(subject, key),
            "iter": lambda: iter(subject),
            "next": lambda: next(subject),
            "len": lambda: len(subject),
            "bool": lambda: bool(subject),
            "str": lambda: str(subject),
            "repr": lambda: repr(subject),
            "instance": lambda value: isinstance(value, subject),
            "enter": lambda: subject.__enter__(),
            "exit": lambda: subject.__exit__(None, None, None),
            "eq": lambda other: bool(subject == other),
            **{name: lambda other, name=name: getattr(operator, name)(subject, other) for name in OPERATORS},
        }
        return actions[verb](*arguments, **named)

    def serve(self) -> "NoReturn":
        self.channel.receive()
        try:
            self.channel.send(self.load())
        except BaseException as error:  # noqa: BLE001  it is the reply
            self.channel.send({"names": {}, **describe_error(error)})
        while True:
            self.channel.send(self.perform(self.channel.receive()))


class RemoteObject:
    """An object of the program, held by a test."""

    def __init__(self, peer: "TestsPeer", number: int) -> None:
        self.treadle_peer, self.treadle_number = peer, number

    def treadle_do(self, verb: str, *arguments: "Any", **named: "Any") -> "Any":
        return self.treadle_peer.order(verb, self.treadle_number, arguments, named)

    def __call__(self, *arguments: "Any", **named: "Any") -> "Any":
        return self.treadle_do("call", *arguments, **named)

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        return self.treadle_do("get", name)

    def __setattr__(self, name: str, value: "Any") -> None:
        if name in ("treadle_peer", "treadle_number"):
            super().__setattr__(name, value)
        else:
            self.treadle_do("set", name, value)

    def __getitem__(self, key: "Any") -> "Any":
        return self.treadle_do("item", key)

    def __setitem__(self, key: "Any", value: "Any") -> None:
        self.treadle_do("set item", key, value)

    def __delitem__(self, key: "Any") -> None:
        self.treadle_do("delete item", key)

    def __iter__(self) -> "Any":
        return self.treadle_do("iter")

    def __next__(self) -> "Any":
        return self.treadle_do("next")

    def __len__(self) -> int:
        return int(self.treadle_do("len"))

    def __bool__(self) -> bool:
        return self.treadle_do("bool") is True

    def __str__(self) -> str:
        return str(self.treadle_do("str"))

    def __repr__(self) -> str:
        return str(self.treadle_do("repr"))

    def __enter__(self) -> "Any":
        return self.treadle_do("enter")

    def __exit__(self, *_: object) -> None:
        self.treadle_do("exit")  # and what it returns is dropped: a program silences no assert

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, RemoteObject) and self.treadle_do("instance", value) is True

    def __hash__(self) -> int:
        return hash(self.treadle_number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteObject):
            return NotImplemented
        return self is other or self.treadle_do("eq", other) is True


def _between_remotes(name: str) -> "Callable[[RemoteObject, object], Any]":
    def act(self: RemoteObject, other: object) -> "Any":
        return self.treadle_do(name, other) if isinstance(other, RemoteObject) else NotImplemented

    return act


for _name in OPERATORS:
    setattr(RemoteObject, f"__{_name}__", _between_remotes(_name))


class TestsPeer(Peer):
    """The tests: units that are run one by one, with the names of the program that they use."""

    def __init__(self, channel: LineChannel) -> None:
        super().__init__(channel)
        self.remotes: dict[int, RemoteObject] = {}
        self.callbacks: list[Callable[..., Any]] = []
        self.units: list[Callable[[], object]] = []

    def refer(self, value: "Any") -> "dict[str, Any]":
        if isinstance(value, RemoteObject):
            return {"object": value.treadle_number}
        if callable(value):
            self.callbacks.append(value)
            return {"callback": len(self.callbacks) - 1}
        raise TypeError(f"a value of type {type(value).__name__} is no plain data")

    def find(self, kind: str, items: "Any") -> "Any":
        if kind == "object":
            return self.remotes.setdefault(int(items), RemoteObject(self, int(items)))
        if kind == "exception":
            return make_error(self.errors, str(items[0]), str(items[1]))
        if kind == "callback":
            return self.callbacks[items]
        raise ValueError("the program sent what is no value")

    def order(self, verb: str, number: int, arguments: "tuple[Any, ...]", named: "dict[str, Any]") -> "Any":
        given = {"arguments": encode(list(arguments), self.refer), "named": encode(named, self.refer)}
        reply = self.ask({"do": verb, "on": number, **given})
        if verb == "call":
            for mine, theirs in zip(arguments, decode(reply["arguments"], self.find)):  # noqa: B905  not in Python 3.8
                if isinstance(mine, list):
                    mine[:] = theirs
                elif isinstance(mine, (dict, set)):
                    mine.clear()
                    mine.update(theirs)
        return decode(reply["value"], self.find)

    def perform(self, order: "dict[str, Any]") -> "dict[str, Any]":
        """A function of a test is called by the program."""
        try:
            arguments = decode(order["arguments"], self.find)
            return {"value": encode(self.callbacks[order["on"]](*arguments), self.refer), "arguments": {"list": []}}
        except BaseException as error:  # noqa: BLE001  it is the reply
            return describe_error(error)

    def load(self, setup: "dict[str, Any]") -> None:
        tests, texts = setup["tests"], [setup["setup"]]
        texts += tests if isinstance(tests, list) else [tests]
        used = UsedNames(texts, setup["entry_points"])
        names = {name: decode(value, self.find) for name, value in setup["names"].items()}
        given = {name: value for name, value in names.items() if name in used.of_program}
        if not given and used.only_builtins(names):
            hidden = ", ".join(sorted(used.mentioned & set(names)))
            raise SyntaxError(f"the tests use the builtin {hidden} and no name of a program; name it in entry_point")
        module = types.ModuleType("solution")
        for name, value in {**names, "__all__": list(given)}.items():
            setattr(module, name, value)
        sys.modules["solution"] = module
        scope: dict[str, Any] = {**{name: importlib.import_module(name) for name in used.modules}, **given}
        scope["__name__"] = "tests"
        if isinstance(tests, list):
            exec(setup["setup"], scope)
            self.units = [self.unit(text, scope) for text in tests]
            return
        exec(compile(setup["setup"] + "\n" + tests, "tests", "exec"), scope)
        for name, value in list(scope.items()):
            if isinstance(value, type) and issubclass(value, unittest.TestCase):
                for method in unittest.defaultTestLoader.getTestCaseNames(value):
                    self.units.append(value(method).debug)
            elif name.startswith("test_") and callable(value) and value is not given.get(name):
                self.units.append(value)
        check = scope.get("check")
        if setup["entry_points"] and callable(check) and check is not given.get("check"):
            self.units.append(lambda: check(names[setup["entry_points"][0]]))

    @staticmethod
    def unit(text: str, scope: "dict[str, Any]") -> "Callable[[], object]":
        return lambda: exec(compile(text, "tests", "exec"), scope)

    def serve(self) -> "NoReturn":
        setup, problem = self.channel.receive(), None
        try:
            self.load(setup)
        except BaseException as error:  # noqa: BLE001  it is the reply
            problem = repr(error)[:500]
        self.channel.send({"units": len(self.units), "error": problem})
        while True:
            number = self.channel.receive()
            try:
                self.units[number]()
                self.channel.send({"passed": True})
            except BaseException as error:  # noqa: BLE001  it is the reply
                self.channel.send({"passed": False, "error": repr(error)[:500]})


class UsedNames:
    """The names that tests use without defining them: those of the program, and those of modules.

    A builtin is the program's only where the entry points name it. A name in lower case before a dot is a module's.
    """

    def __init__(self, texts: "list[str]", entry_points: "list[str]") -> None:
        self.mentioned: set[str] = set()
        self.stored: set[str] = set()
        dotted: set[str] = set()
        for text in texts:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Name):
                    (self.mentioned if isinstance(node.ctx, ast.Load) else self.stored).add(node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    dotted.add(node.value.id)
                elif isinstance(node, ast.ImportFrom) and node.module == "solution":
                    self.mentioned.update(item.name for item in node.names)
                elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    self.stored.add(node.name)
        self.builtins = set(dir(builtins))
        named_modules = {name for name in dotted if name[:1].islower()}
        known: frozenset[str] = getattr(sys, "stdlib_module_names", frozenset())
        self.modules = sorted((named_modules & known) - set(entry_points) - self.stored)
        self.of_program = (self.mentioned - self.builtins - named_modules) | set(entry_points)

    def only_builtins(self, names: "dict[str, Any]") -> bool:
        """Whether a builtin that the program defines is all that the tests could be about."""
        return not self.mentioned - self.builtins - self.stored and bool(self.mentioned & self.builtins & set(names))


if __name__ == "__main__":
    {"program": ProgramPeer, "tests": TestsPeer}[sys.argv[1]](LineChannel()).serve()  # type: ignore[attr-defined]
