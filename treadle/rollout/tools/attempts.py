"""One tool call, carried out: retried where the infrastructure failed, answered where the tool did.

This module draws the border between what a model may read and what it must not.

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
"""

import asyncio
import random
import sys
from dataclasses import dataclass
from typing import Any

from treadle.aio import is_from_outside, place
from treadle.errors import ToolFailure, TreadleError
from treadle.rollout.tools.spec import Expired, Invoke, ToolSpec
from treadle.types import ToolResult, ToolStatus

ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""OSErrors that say something about what the model asked for."""

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Policy:
    """How long one attempt may take, and how many may follow it."""

    timeout_s: float
    retries: int


async def perform(spec: ToolSpec, invoke: Invoke, arguments: dict[str, Any], policy: Policy) -> object:
    """What the tool returned, or a result that tells the model why not; ToolFailure when every attempt failed."""
    for attempt in range(policy.retries + 1):
        if attempt:
            await asyncio.sleep(backoff(attempt))
        try:
            return await invoke(arguments, policy.timeout_s)
        except Expired:
            words = f"{spec.name} gave no answer within {policy.timeout_s:g} s"
            return ToolResult(words, ToolStatus.TIMEOUT)
        except BaseException as error:
            if is_from_outside(error):
                raise
            if isinstance(error, Exception) and not is_infrastructure(error, spec):
                return ToolResult(_words(error), ToolStatus.ERROR)
            fault = error
    attempts = "1 attempt" if not policy.retries else f"{policy.retries + 1} attempts"
    raise ToolFailure(f"{spec.name} failed after {attempts}: {_words(fault)}{place(fault)}") from fault


def is_infrastructure(error: BaseException, spec: ToolSpec) -> bool:
    """On which side of the border an exception lies; raises it if it belongs to another boundary."""
    if isinstance(error, TreadleError):
        if not isinstance(error, ToolFailure):
            raise error
        return True
    if isinstance(error, OSError):
        return not isinstance(error, ANSWERS) or isinstance(error, spec.infrastructure)
    return isinstance(error, (MemoryError, *spec.infrastructure)) or _is_transport_error(error)


def backoff(attempt: int) -> float:
    """Seconds before the given retry: doubling, capped, and spread so that sessions do not return in step."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def _is_transport_error(error: BaseException) -> bool:
    httpx = sys.modules.get("httpx")  # who raises its errors has imported it
    return httpx is not None and isinstance(error, httpx.TransportError)


def _words(error: BaseException) -> str:
    if isinstance(error, ToolFailure):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
