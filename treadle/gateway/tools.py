"""Gateway tools: the tools of a request in OpenAI's shape, as the model is shown them, and those of earlier requests.

Owns what is kept of a dialect's tools: the functions, the names by which programs know them, and what was left out.
Invariant: requests of a session whose tools are the same JSON get the same objects: agents send tens of kilobytes of
them with every request, and they are read and hashed once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.gateway.request import NamespacedTool, RequestError, Tool

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

    def label(self, namespace: str, name: str) -> str:
        """What a tool is shown as."""
        asked = NamespacedTool(namespace, name)
        return next((label for label, tool in self.namespaces.items() if tool == asked), name)


class KnownTools:
    """Tools of the last requests of a session, as they were sent and as they were parsed."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, ParsedTools]] = []

    def parse(self, raw: Any, parse: Callable[[Any], ParsedTools]) -> ParsedTools:
        """RequestError for tools that cannot be shown. Threads may call it at the same time."""
        known = self._known
        for sent, parsed in known:
            if sent == raw:
                return parsed
        parsed = parse(raw)
        self._known = [(raw, parsed), *known[: KNOWN_TOOLS - 1]]
        return parsed
