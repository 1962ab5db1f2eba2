"""Worker: the process that runs reward functions.

Imports its functions, then answers one score at a time until its channel closes. Imports no torch.

    plain function          runs here, and keeps what it keeps in memory between scores
    built-in of a sandbox   runs here, behind the kernel's fences
    your function there     runs in a child of this process, one for each score, which has no channel but a pipe for its
                            one result; this process reads it, kills what is left, and answers with the request's number

Owns nothing that lasts: the parent may kill it at any moment.
Invariant: one reply per function and score, as JSON; standard input is empty. In a sandbox no code of a score outlives
it, changes a later one, or holds the channel.

Results leave on a channel of their own, so a function may print what it likes: lines go to the run's console and log.
"""

import asyncio
import gc
import inspect
import os
import pickle
import signal
import socket
import sys
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NoReturn

from treadle.context_vars import restore
from treadle.errors import ConfigError, Mistake
from treadle.process.channel import RAW, BlockingChannel, ChannelClosed, FrameCodec
from treadle.process.child_main import BlockingParent
from treadle.process.rpc import RpcReply, RpcRequest
from treadle.process.tree import kill_tree, list_children
from treadle.reward.function import RewardFunction, load_function
from treadle.reward.result import (
    MAX_RESULT_BYTES,
    Fault,
    ScoreFailure,
    blame_function,
    encode,
    encode_failure,
    name_function,
)
from treadle.reward.sandbox.code import hide_from_code
from treadle.reward.sandbox.limits import bound_memory, bound_score, kill_leftovers, limit_cpu
from treadle.reward.sandbox.protocol import (
    FunctionReply,
    FunctionScore,
    LabelledOutput,
    RewardWorkerSetup,
    explain_status,
    past_cpu_time,
    write_report,
)
from treadle.sandbox.confine import apply_restrictions, die_with_starter, enter_empty_network, hide


def serve_rewards(parent: BlockingParent, packed: bytes) -> None:
    """Load, say what was loaded, then score until the parent hangs up."""
    setup: RewardWorkerSetup = pickle.loads(packed)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a function does to itself ends its process
    sys.stdout = sys.stderr = _OUTPUT
    missing = [enter_empty_network()] if setup.sandbox else []
    bound_memory(setup.memory_mb)
    functions, mistakes = _load(setup)
    kept = list_children(os.getpid())
    hide_from_code(setup.hidden)
    if setup.sandbox:
        hide()
        missing += apply_restrictions(setup.hidden)
        gc.freeze()  # pages that children share stay shared
    parent.started(write_report(list(functions.values()), mistakes, [item for item in missing if item]))
    arguments = b""
    with asyncio.Runner() as runner, suppress(ChannelClosed):
        while True:
            request: RpcRequest = parent.channel.receive()
            order: FunctionScore = request.body
            arguments = arguments if order.arguments is None else order.arguments
            reply = _score_one(functions[order.function], arguments, setup, runner, kept)
            kill_leftovers(kept)
            parent.channel.send(RpcReply(request.number, FunctionReply(reply)))


_OUTPUT = LabelledOutput(1)
"""What functions print."""


def _load(setup: RewardWorkerSetup) -> tuple[dict[str, RewardFunction], dict[str, tuple[Mistake, ...]]]:
    """Every function that can be used, and every mistake; with mistakes the parent hangs up after the report."""
    functions: dict[str, RewardFunction] = {}
    mistakes: dict[str, tuple[Mistake, ...]] = {}
    for name, path, kwargs, scope, python in setup.functions:
        _OUTPUT.label = name
        try:
            functions[name] = load_function(name, path, kwargs, scope, python=python)
        except ConfigError as error:
            mistakes[name] = error.mistakes
    return functions, mistakes


def _score_one(
    function: RewardFunction, payload: bytes, setup: RewardWorkerSetup, runner: asyncio.Runner, kept: set[int]
) -> bytes:
    """A function's reply: its score or its failure, as JSON."""
    _OUTPUT.label = function.name
    try:
        if setup.sandbox and function.builtin is None:
            return _score_in_child(function, payload, setup, kept)
        with limit_cpu(setup.cpu_time_s):
            return _score(function, payload, runner)
    except ScoreFailure as failure:
        return encode_failure(failure)
    finally:
        _OUTPUT.end()


def _score(function: RewardFunction, payload: bytes, runner: asyncio.Runner) -> bytes:
    """One function's score as JSON. Each unpacks its own arguments, so none sees what another did to them."""
    with blame_function(function.name):
        values, variables = pickle.loads(payload)
        context = copy_context()
        context.run(restore, variables)
        result = context.run(function, values)
        if inspect.isawaitable(result):
            result = runner.run(_wait_for(result), context=context)
        return encode(function.read(result))


async def _wait_for(result: Any) -> Any:
    return await result


def _score_in_child(function: RewardFunction, payload: bytes, setup: RewardWorkerSetup, kept: set[int]) -> bytes:
    """One function's reply, from a child that does nothing else and is gone afterwards with all it started."""
    ours, theirs = socket.socketpair()
    result = BlockingChannel(ours, RAW, FrameCodec(bytes, bytes, max_bytes=MAX_RESULT_BYTES))
    child = os.fork()
    if child == 0:
        _run_child(function, payload, setup, theirs.fileno())
    theirs.close()
    try:
        with name_function(function.name):
            reply = _read_result(result)
            if reply is not None:
                kill_tree(child)
            _, ended, used = os.wait4(child, 0)
            kill_leftovers(kept)
            if reply is None and used.ru_utime + used.ru_stime > 0.9 * setup.cpu_time_s:
                raise past_cpu_time(setup.cpu_time_s)
            if reply is None:
                raise explain_status(os.waitstatus_to_exitcode(ended), setup.cpu_time_s)
            if ours.recv(1):
                raise ScoreFailure(Fault.CRASH, "gave more than one result")
            return reply
    finally:
        kill_tree(child)
        ours.close()


def _read_result(result: BlockingChannel) -> bytes | None:
    """What a child says; None where it ended without a word."""
    try:
        reply: bytes = result.receive()
        return reply
    except ChannelClosed:
        if result.problem is not None:
            raise ScoreFailure(Fault.TOO_LARGE, "flooded its worker's channel") from None
        return None


def _run_child(function: RewardFunction, payload: bytes, setup: RewardWorkerSetup, result: int) -> NoReturn:
    """The child: close every descriptor but output and the result's, put up the fences, score, end."""
    try:
        die_with_starter()
        os.dup2(result, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") > 0 else 65_536)
        os.set_inheritable(3, False)
        bound_score(setup.cpu_time_s, setup.memory_mb)
        apply_restrictions()
        try:
            with asyncio.Runner() as runner:
                reply = _score(function, payload, runner)
        except ScoreFailure as failure:
            reply = encode_failure(failure)
        _OUTPUT.end()
        BlockingChannel(socket.socket(fileno=3), RAW).send(reply)
    finally:
        os._exit(0)
