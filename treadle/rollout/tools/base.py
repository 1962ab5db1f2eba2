"""Tool protocol: a name, a schema, a validator, and a way to bind the tool to a session.

Owns the records that functions, stateful classes and MCP servers are all reduced to. Knows none of them.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from treadle.rollout.tools.validators import ArgumentValidator
from treadle.types import Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it, and where it came from."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    origin: str
    validate: ArgumentValidator
    """Arguments in the types of `parameters`, or InvalidArgument."""
    infrastructure: tuple[type[BaseException], ...] = ()
    """Exceptions of this tool that are faults of its infrastructure, on top of those that always are."""
    needs_task: bool = False
    """Whether the task must supply arguments."""

    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's shape."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}


Invoke = Callable[[dict[str, Any], float], Awaitable[object]]
"""Runs a tool on checked arguments for at most so many seconds; raises Expired when they are over."""


class Scope(Protocol):
    """Session scope: what a tool uses of one session."""

    @property
    def task(self) -> Task: ...

    def instance(self, cls: type) -> Callable[[float], Awaitable[Any]]:
        """Returns the session's one instance of a stateful tool, built within so many seconds."""
        ...

    def lease(self, pool: Any) -> Any:
        """Returns the session's one lease of a pool, which is closed with the session."""
        ...

    async def run_in_thread(self, function: Callable[[], object], timeout_s: float) -> object:
        """Runs blocking code beside the event loop."""
        ...


class Tool(Protocol):
    """Something a model can call."""

    @property
    def spec(self) -> ToolSpec: ...

    def bind(self, scope: Scope) -> Invoke:
        """The tool, ready to be called by one session."""
        ...
