"""Gateway request and reply: one form for what the three API dialects ask, and for what the model answered

Owns the internal records, the canonical form of a message, the tools of a request, and the errors of a request. Knows
no dialect, no token and no HTTP.
Invariants: two messages have the same `key` exactly if they mean the same to a chat template: a list of text blocks is
its text, null is "", arguments are JSON values, caching hints are left out, and of ids there is which call a result
answers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b, sha256
from typing import Any, Literal

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


_MAX_LISTED_CHARS = 400
"""Of the names of tools in an error."""


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
