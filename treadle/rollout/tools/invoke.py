"""Tool call: its invocation with deadline, retries and output limit; what the model reads, and what it must not.

Owns the text form of returned values (a string is itself, a `ToolResult` keeps its reward and extra fields, everything
else is JSON), the limit on its length, and the border between an answer and a fault of the infrastructure.

The model reads (status in brackets):
- what the tool returned (ok), or whatever status the tool put into a `ToolResult` of its own;
- an exception of the tool's own logic (error): ValueError, KeyError, ZeroDivisionError, any Exception not named below;
- an OSError about the thing that was asked for (error): file not found, exists, is or is not a directory, permission;
- that the tool gave no answer within `tool_timeout_s` (timeout): a model may well have asked for too much.

The model never reads, and the call is tried again `tool_retries` times, then fails the trajectory as `ToolFailure`:
- `ToolFailure`, raised by the tool or by what runs it: a dead MCP server, a stateful tool that cannot be set up;
- every other OSError: connections, DNS, a TimeoutError of the tool's own transport, a full disk;
- transport errors of httpx, MemoryError, and every BaseException that is no Exception: `sys.exit()`, KeyboardInterrupt,
  a cancellation that came from inside the tool;
- the exceptions that the tool's author names: `@tool(infrastructure=(ClientError,))`.

A failure of another boundary (an engine a tool asks, for example) passes through untouched. The deadline holds for each
attempt. A tool may therefore run more than once for one call, after a fault only.
Invariant: the text can be encoded as UTF-8.
"""

import asyncio
import json
import random
import sys
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal

from treadle.aio import Expired, error_location, is_external_stop
from treadle.errors import ToolFailure, TreadleError
from treadle.rollout.tools.base import Invoke, ToolSpec
from treadle.rollout.trajectory_checks import finite_reward
from treadle.types import ToolResult, ToolStatus

TruncateSide = Literal["left", "middle", "right"]


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """Limit on the characters of a result, and which part of a longer one is cut out."""

    characters: int
    side: TruncateSide

    def cut(self, text: str) -> str:
        """The kept part of an over-long text, with a mark where the rest was that says how much is gone."""
        gone = len(text) - self.characters
        mark = f"[{gone} characters cut]"
        if self.side == "left":
            return f"{mark}\n{text[gone:]}"
        if self.side == "right":
            return f"{text[: self.characters]}\n{mark}"
        head = (self.characters + 1) // 2
        return f"{text[:head]}\n{mark}\n{text[head + gone :]}"


def to_result(returned: object, name: str, limit: OutputLimit, seconds: float) -> ToolResult:
    """The typed result of a call that took so many seconds."""
    result = returned if isinstance(returned, ToolResult) else None
    text = result.text if result else returned if type(returned) is str else to_text(returned, name)
    if not text.isascii():
        text = _encodable(text)
    truncated = len(text) > limit.characters
    if truncated:
        text = limit.cut(text)
    if result is None:
        return ToolResult(text, seconds=seconds, truncated=truncated)
    reward = result.reward
    if reward is not None:
        reward = finite_reward(reward, ToolFailure, f"{name} returned a ToolResult whose reward")
    return ToolResult(text, result.status, reward, result.extra, seconds, truncated or result.truncated)


def to_text(value: object, name: str) -> str:
    """A returned value as text; a ToolFailure names the tool if there is no such text."""
    if isinstance(value, str):
        return str(value)
    try:
        return str(value) if type(value) is int else _WRITER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailure(f"{name} returned a {type(value).__name__} that is no JSON: {error}") from error


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"a {type(value).__name__} is no str, number, list, dict, dataclass or ToolResult")


_WRITER = json.JSONEncoder(ensure_ascii=False, default=_plain)


def _encodable(text: str) -> str:
    """The text with what UTF-8 cannot encode, such as odd bytes of a file name, replaced."""
    return text.encode(errors="replace").decode()


MODEL_VISIBLE_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""OSErrors about what the model asked for."""

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class ToolRetryPolicy:
    """How long one attempt may take, and how many may follow it."""

    timeout_s: float
    retries: int


async def perform_call(spec: ToolSpec, invoke: Invoke, arguments: dict[str, Any], policy: ToolRetryPolicy) -> object:
    """What the tool returned, or a result with the reason for the model; ToolFailure when every attempt failed."""
    for attempt in range(policy.retries + 1):
        if attempt:
            await asyncio.sleep(backoff(attempt))
        try:
            return await invoke(arguments, policy.timeout_s)
        except Expired:
            text = f"{spec.name} gave no answer within {policy.timeout_s:g} s"
            return ToolResult(text, ToolStatus.TIMEOUT)
        except BaseException as error:
            if is_external_stop(error):
                raise
            if isinstance(error, Exception) and not is_infrastructure(error, spec):
                return ToolResult(_error_text(error), ToolStatus.ERROR)
            fault = error
    attempts = "1 attempt" if not policy.retries else f"{policy.retries + 1} attempts"
    raise ToolFailure(f"{spec.name} failed after {attempts}: {_error_text(fault)}{error_location(fault)}") from fault


def is_infrastructure(error: BaseException, spec: ToolSpec) -> bool:
    """On which side of the border an exception lies; raises it if it belongs to another boundary."""
    if isinstance(error, TreadleError):
        if not isinstance(error, ToolFailure):
            raise error
        return True
    if isinstance(error, OSError):
        return not isinstance(error, MODEL_VISIBLE_ERRORS) or isinstance(error, spec.infrastructure)
    return isinstance(error, (MemoryError, *spec.infrastructure)) or _is_transport_error(error)


def backoff(attempt: int) -> float:
    """Seconds before the given retry: doubling, capped, and spread so that sessions do not return in step."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def _is_transport_error(error: BaseException) -> bool:
    httpx = sys.modules.get("httpx")  # code that raises its errors has imported it
    return httpx is not None and isinstance(error, httpx.TransportError)


def _error_text(error: BaseException) -> str:
    if isinstance(error, ToolFailure):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
