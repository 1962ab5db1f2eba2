"""Gateway request and reply: one form for what the three API dialects ask, and for what the model answered

Owns the internal records, the canonical form of a message, the tools of a request, what a body may hold, and the errors
of a request. Knows no dialect, no token and no HTTP. A large body is read in a thread, and refused before where that
would hold the interpreter.
Invariants: two messages have the same `key` exactly if they mean the same to a chat template: a list of text blocks is
its text, null is "", arguments are JSON values, caching hints are left out, and of ids there is which call a result
answers. Requests of a session whose tools are the same JSON get the same objects: agents send tens of kilobytes of them
with every request, and they are read and hashed once.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b, sha256
from secrets import token_hex
from typing import Any, Literal, NoReturn, TypeVar

POLICY_MODEL = "policy"
"""The name of the model that trains, as agents ask for it."""

Role = Literal["system", "user", "assistant", "tool"]

Tool = Mapping[str, Any]
"""A function's schema in OpenAI's shape."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A tool call of an assistant message. Arguments are a JSON value; text that is no JSON stays text."""

    name: str
    arguments: Any
    id: str = ""
    native_id: str = ""
    """The id that the model itself wrote, where its format has one: the template is given that."""
    written: str | None = field(default=None, compare=False)
    """The text that the arguments came as; None where they came as a JSON value."""

    def arguments_text(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, whatever dialect it came in."""

    role: Role
    text: str = ""
    calls: tuple[ChatCall, ...] = ()
    reasoning: str = ""
    call_id: str = ""
    """Of a tool's result: which call it answers."""
    marks: tuple[str, ...] = ()
    """Ids that may be ones we minted: of calls, items and signatures."""

    def key(self, answered: str = "") -> bytes:
        """Digest of the canonical content. `answered`: which call it is the result of."""
        calls = [[call.name, call.arguments] for call in self.calls]
        written = json.dumps(calls, sort_keys=True, ensure_ascii=False) if calls else answered
        parts = [part.encode("utf-8", "surrogatepass") for part in (self.text.strip(), self.reasoning.strip(), written)]
        lengths = f"{self.role} {len(parts[0])} {len(parts[1])} ".encode()
        return sha256(b"".join((lengths, *parts))).digest()[:16]


class Choice(StrEnum):
    """Whether the next turn calls a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class NamespacedTool:
    """A tool as its program calls it, where that is not by a name alone."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an agent asks for: one more assistant turn, or `n` of them side by side."""

    dialect: str
    model: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    choice: Choice = Choice.AUTO
    forced_tool: str = ""
    """The tool that must be called, where `choice` is REQUIRED and one is named."""
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    """Options without effect, such as temperature: the run's own settings hold."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Values of those, and of what bounds and ends a turn, as they were given."""
    notes: tuple[str, ...] = ()
    """What was left out or changed so that a chat template can show it."""
    agent_id: str = ""
    """Which sub-agent asks, where the program says so."""
    namespaces: Mapping[str, "NamespacedTool"] = field(default_factory=dict)
    """Tools that came in a namespace, by the name that the model is shown."""

    def keys(self) -> list[bytes]:
        """The keys of its messages. A result of a tool is that of a call by its name and its place among all calls."""
        answered: dict[str, str] = {}
        keys: list[bytes] = []
        num_calls = 0
        for message in self.messages:
            is_result = message.role == "tool"
            keys.append(message.key(answered.get(message.call_id, f"id {message.call_id}") if is_result else ""))
            for call in message.calls:
                answered[call.id] = f"{num_calls} {call.name}"
                num_calls += 1
        return keys

    def repeat_key(self, keys: Sequence[bytes], tools: bytes) -> bytes:
        """Digest of what decides the answer: two requests with the same one ask for the same.

        Made of the keys of the messages and the root key. Whether the answer is a stream is left out, as is what the
        run's settings override; ids are not: they tell apart what two siblings of one text are answered.
        """
        options = (self.dialect, self.max_tokens, self.stop, self.n, self.choice, self.forced_tool, self.agent_id)
        marks = [(message.marks, message.call_id) for message in self.messages]
        written = repr((options, marks)).encode("utf-8", "surrogatepass")
        return blake2b(b"".join((tools, *keys, written)), digest_size=16).digest()

    def root_key(self) -> bytes:
        """Digest of what decides which conversations this one can belong to: the tools, and the name of the model."""
        return blake2b(json.dumps([self.tools, self.model], sort_keys=True).encode(), digest_size=16).digest()


class Finish(StrEnum):
    """Why a turn ended, as agents are told."""

    STOP = "stop"
    LENGTH = "length"
    CALLS = "calls"
    STOP_STRING = "stop_string"


@dataclass(frozen=True, slots=True)
class TurnReply:
    """One sampled turn, as an agent reads it."""

    mark: str
    """Letters and digits that no other turn of the session has; every id that we mint begins with it."""
    text: str
    reasoning: str = ""
    calls: tuple[ChatCall, ...] = ()
    finish: Finish = Finish.STOP
    stop_string: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    created: int = 0

    def marks(self) -> tuple[str, ...]:
        """Every id of this turn that an agent may send back."""
        items = (f"fc_{self.mark}{at}" for at in range(len(self.calls)))
        return *self.reasoning_marks(), f"msg_{self.mark}", *items, *(call.id for call in self.calls)

    def reasoning_marks(self) -> tuple[str, ...]:
        """Marks that stand for its reasoning."""
        return self.mark, f"rs_{self.mark}"


@dataclass(frozen=True, slots=True)
class ReplySet:
    """Replies to one request, and what of it the dialects repeat in their answer."""

    replies: tuple[TurnReply, ...]
    model: str
    include_usage: bool = False
    tools: tuple[Tool, ...] = field(default=(), compare=False)
    namespaces: Mapping[str, NamespacedTool] = field(default_factory=dict, compare=False)


class RequestError(Exception):
    """A request that gets no turn: what is wrong, as a dialect can say it."""

    kind: str = "invalid_request"
    status = 400

    def __init__(self, message: str, *, option: str = "") -> None:
        super().__init__(message)
        self.option = option
        """The name of the option that was refused, if it is one."""


class ContextExhausted(RequestError):
    """The conversation leaves no room for a token. Programs compact on the dialect's own words for it."""

    kind = "context"

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"the prompt has {num_tokens} tokens and the model takes {max_tokens}")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class Overloaded(RequestError):
    """An engine failed; the same request may be sent again."""

    kind = "overloaded"
    status = 503


class SessionOver(RequestError):
    """A limit has ended the session; nothing more is generated in it."""

    kind = "over"
    status = 403


def refuse(option: str, why: str) -> RequestError:
    """The refusal of an option, by its name."""
    return RequestError(f"{option}: {why}", option=option)


# --- reading JSON that others wrote


def read_object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{what} must be an object")
    return value


def read_list(value: Any, what: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError(f"{what} must be a list")
    return value


def read_text(value: Any, what: str) -> str:
    """A string, or null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{what} must be a string")
    return value


def read_count(value: Any, what: str) -> int | None:
    """A whole number of at least 1, or null."""
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise RequestError(f"{what} must be a whole number of at least 1")
    return value


MAX_MODEL_CHARS = 256
MAX_CALL_ID_CHARS = 1024
"""Names and ids are kept with each turn, and no budget of tokens bounds them."""


def read_model(value: Any) -> str:
    """The name of the model that is asked for."""
    return _bounded(read_text(value, "model"), "model", MAX_MODEL_CHARS)


def read_call_id(value: Any, what: str) -> str:
    """The id of a tool call."""
    return _bounded(read_text(value, what), what, MAX_CALL_ID_CHARS)


def _bounded(text: str, what: str, most: int) -> str:
    if len(text) > most:
        raise RequestError(f"{what}: {text[:40]}… has {len(text)} characters; at most {most} characters are taken")
    return text


def read_call(name: Any, arguments: Any, identity: Any, what: str) -> ChatCall:
    """A call, whether its arguments came as a JSON value or as text."""
    written = arguments if isinstance(arguments, str) else None
    value = {} if arguments is None else arguments
    if written is not None:
        try:
            value = json.loads(written) if written.strip() else {}
        except (ValueError, RecursionError):
            value = written
    return ChatCall(read_text(name, f"{what}.name"), value, read_call_id(identity, f"{what}.id"), written=written)


MAX_STOPS = 32
MAX_STOP_CHARS = 256
"""Stop strings are looked for after every sampled token, in an engine that all sessions share."""


def read_stops(value: Any, what: str) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(read_list(value, what))
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"{what} must be texts that are not empty")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise refuse(what, f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters")
    return stops


def read_blocks(content: Any, what: str, text_types: Sequence[str]) -> str:
    """The text of a content: a string, or a list of text blocks. Anything else is refused by its name."""
    if isinstance(content, str):
        return content
    texts = []
    for at, item in enumerate(read_list(content, what)):
        if isinstance(item, str):
            texts.append(item)
            continue
        block = read_object(item, f"{what}[{at}]")
        kind = block.get("type", "text")
        if kind not in text_types:
            raise refuse(f"{what}[{at}].type", f"{kind!r} is not supported: this model reads text")
        texts.append(read_text(block.get("text", block.get("refusal")), f"{what}[{at}].text"))
    return "\n".join(texts)


MAX_MESSAGES = 10_000
"""Of a conversation: where it goes on is found on the loop that serves all sessions of a worker."""


def read_conversation(messages: Sequence[ChatMessage], what: str) -> tuple[ChatMessage, ...]:
    """The messages of a request: at least one, and at most `MAX_MESSAGES`."""
    if not messages:
        raise RequestError(f"{what} must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"{what} holds {len(messages)} messages; at most {MAX_MESSAGES} are taken: send fewer")
    return tuple(messages)


LARGE_BODY_BYTES = 100_000
"""What is larger is read and rendered in a thread."""

MAX_JSON_MARKS = 500_000
"""Values of a body, about: to read JSON holds the interpreter, in a thread too."""

_SURROGATE = re.compile(rb"\\u[dD]")
"""An escape that may be half of a surrogate pair."""

T = TypeVar("T")


class TooManyValues(RequestError):
    """A body of more values than are read."""

    kind = "request_too_large"
    status = 413


async def read_body(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; RequestError where it is none."""
    return await parse_body(body, lambda value: value)


async def parse_body(body: bytes, parse: Callable[[Mapping[str, Any]], T], known: "KnownTools | None" = None) -> T:
    """What `parse` makes of the JSON object of a body; `known`: tools that are not read again."""
    read = _read_json if known is None else known.read
    if len(body) <= LARGE_BODY_BYTES:
        return parse(read(body))
    if sum(map(body.count, (b"[", b"{", b","))) > MAX_JSON_MARKS:
        raise TooManyValues(f"the body has more than {MAX_JSON_MARKS} brackets and commas")
    return await asyncio.to_thread(lambda: parse(read(body)))


def _read_json(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        if b"\\" in body and _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body holds half of a surrogate pair, which is not text") from None
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_MAX_LISTED_CHARS = 400
"""Of the names of tools in an error."""


def _read_short(before: bytes, after: bytes) -> Mapping[str, Any]:
    """A body with a mark in the place of a value that is known to be JSON; empty where it is no request."""
    try:
        return _read_json(b"".join((before, json.dumps(_KNOWN).encode(), after)))
    except RequestError:
        return {}


def _array_text(body: bytes, start: int, tools: Any) -> bytes:
    """The text of an array that begins at `start`, if it is these tools; empty if it is not, or not worth keeping."""
    if not isinstance(tools, list) or len(body) - start < MIN_KNOWN_BYTES:
        return b""
    try:
        text = body[start : start + MAX_KNOWN_BYTES].decode("utf-8", "ignore")
        value, end = json.JSONDecoder().raw_decode(text)
        is_same = json.dumps(value) == json.dumps(tools)  # of values, Python's 1 is True
    except (ValueError, RecursionError):
        return b""
    written = text[:end].encode()
    return written if is_same and len(written) >= MIN_KNOWN_BYTES else b""


KNOWN_TOOLS = 4
"""Sets of tools that a session keeps: its sub-agents have some of their own."""


def function_tool(name: Any, description: Any, parameters: Any) -> Tool:
    """A function's schema in OpenAI's shape."""
    if not isinstance(name, str) or not name:
        raise RequestError("a tool needs a name")
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    described = {"description": description} if isinstance(description, str) and description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


@dataclass(frozen=True, slots=True)
class ParsedTools:
    """The functions of a request under the names that the model is shown."""

    shown: tuple[Tool, ...] = ()
    deferred: Mapping[str, Tool] = field(default_factory=dict)
    """Those that the model is shown only when a search has found them."""
    namespaces: Mapping[str, NamespacedTool] = field(default_factory=dict)
    """Tools that came in a namespace, by the name that the model is shown."""
    notes: tuple[str, ...] = ()
    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Options of tools that have no effect, and the first value of each."""

    def check_choice(self, choice: Choice, forced: str) -> None:
        """The refusal of a `tool_choice` that these functions cannot meet."""
        if choice is not Choice.REQUIRED:
            return
        if not self.shown:
            raise refuse("tool_choice", "a call is required, and the request offers no function: send tools")
        names = [*(tool["function"]["name"] for tool in self.shown), *self.deferred]
        if forced and forced not in names:
            offered = ", ".join(names)[:_MAX_LISTED_CHARS]
            raise refuse("tool_choice", f"{forced[:80]!r} is none of the functions of this request: {offered}")

    def label(self, namespace: str, name: str) -> str:
        """What a tool is shown as."""
        asked = NamespacedTool(namespace, name)
        return next((label for label, tool in self.namespaces.items() if tool == asked), name)


_TOOLS = re.compile(rb'"tools"\s*:\s*')
_KNOWN = f"known tools {token_hex(16)}"
"""Stands for known tools in a body that is read: no client can know it."""

MIN_KNOWN_BYTES, MAX_KNOWN_BYTES = 1_000, 200_000
"""Of the text of tools that is kept: less is read as fast, and more would be much to keep for each session."""


class KnownTools:
    """Tools of the last requests of a session: as text, as JSON and as they were parsed."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, ParsedTools]] = []
        self._texts: list[tuple[bytes, Any]] = []

    def read(self, body: bytes) -> Mapping[str, Any]:
        """The JSON object of a body. Tools that came before, letter for letter, are the same objects, and not read."""
        place = _TOOLS.search(body)
        if place is None:
            return _read_json(body)
        start = place.end()
        for text, tools in self._texts:
            if body.startswith(text, start):
                found = _read_short(body[:start], body[start + len(text) :])
                if found.get("tools") == _KNOWN:
                    return {**found, "tools": tools}
                break  # they are a part of something else, or the body is none
        found = _read_json(body)
        text = _array_text(body, start, found.get("tools"))
        if text:
            self._texts = [(text, found["tools"]), *self._texts[: KNOWN_TOOLS - 1]]
        return found

    def parse(self, raw: Any, parse: Callable[[Any], ParsedTools]) -> ParsedTools:
        """RequestError for tools that cannot be shown. Threads may call it at the same time."""
        known = self._known
        for sent, parsed in known:
            if sent == raw:
                return parsed
        parsed = parse(raw)
        self._known = [(raw, parsed), *known[: KNOWN_TOOLS - 1]]
        return parsed
