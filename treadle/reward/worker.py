"""The process that runs reward functions which are not trusted to end.

Imports its functions, then answers one score at a time until its channel closes. Imports no torch.
Owns nothing that lasts: the parent may kill it at any moment.
Invariant: one reply per function and score, as JSON; standard input is empty.

Results leave on a channel of their own, so a function may print what it likes: lines go to the run's console and log.
"""

import asyncio
import inspect
import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

from treadle.context import restore
from treadle.errors import ConfigError, Mistake
from treadle.reward.failure import ScoreFailure, blame_function
from treadle.reward.fence import fence
from treadle.reward.frame import read_frame, write_frame
from treadle.reward.function import Function, load_function
from treadle.reward.handshake import Setup, write_report
from treadle.reward.kin import list_children
from treadle.reward.limits import confine, die_with_parent, end_strays, limit_cpu
from treadle.reward.printed import LabelledOutput
from treadle.reward.verdict import encode, encode_failure


def main() -> None:
    """Load, say what was loaded, then score until the parent hangs up."""
    channel, lifeline = int(sys.argv[2]), int(sys.argv[3])
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)
    die_with_parent(lifeline)
    setup: Setup = pickle.loads(read_frame(channel) or b"")
    sys.stdout = sys.stderr = _OUTPUT
    confine(setup.memory_mb)
    functions = _load(channel, setup)
    kept = list_children(os.getpid())
    with asyncio.Runner() as runner:
        while (names := read_frame(channel)) is not None and (payload := read_frame(channel)) is not None:
            asked = set(json.loads(names))
            with limit_cpu(setup.cpu_time_s):
                for reply in _score_all([item for item in functions if item.name in asked], payload, runner):
                    end_strays(kept)
                    write_frame(channel, reply)


_OUTPUT = LabelledOutput(1)
"""What functions print."""


def _load(channel: int, setup: Setup) -> list[Function]:
    """Load every function and report what they need, or every mistake; with mistakes the parent then hangs up."""
    functions: list[Function] = []
    mistakes: dict[str, tuple[Mistake, ...]] = {}
    for name, path, kwargs, scope in setup.functions:
        _OUTPUT.label = name
        try:
            functions.append(load_function(name, path, kwargs, scope))
        except ConfigError as error:
            mistakes[name] = error.mistakes
    write_frame(channel, write_report(functions, mistakes))
    return functions


def _score_all(functions: list[Function], payload: bytes, runner: asyncio.Runner) -> Iterator[bytes]:
    """A reply from each function, up to the first that fails: the parent reads no further."""
    try:
        for function in functions:
            reply = _score(function, payload, runner)
            _OUTPUT.end()
            yield reply
    except ScoreFailure as failure:
        yield encode_failure(failure)


def _score(function: Function, payload: bytes, runner: asyncio.Runner) -> bytes:
    """One function's score as JSON. Each unpacks its own arguments, so none sees what another did to them."""
    _OUTPUT.label = function.name
    with blame_function(function.name):
        values, variables = pickle.loads(payload)
        context = copy_context()
        context.run(restore, variables)
        with fence(function.fenced):
            result = context.run(function, values)
            if inspect.isawaitable(result):
                result = runner.run(_wait_for(result), context=context)
            return encode(function.read(result))


async def _wait_for(result: Any) -> Any:
    return await result
