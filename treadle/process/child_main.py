"""Child process entry point: receives what to serve, reports its start, and serves until the parent closes the channel.

    parent → child    the head (JSON): import path, names, what to do first; then setup and codec (a pickle)
    child → parent    started, with a value (JSON); or the error that kept it from starting
    both              whatever `serve` and the parent's end say to each other

Owns the first messages and what every child does: Ctrl-C is the parent's to handle, descriptors stay its own, and it
ends with its parent. `serve(parent, setup)` is a coroutine function with an asyncio end, or a plain one with a blocking
end. Imports nothing that takes long, so that a child may set limits before anything is loaded.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from treadle.errors import RunError, TreadleError
from treadle.process.channel import RAW, BlockingChannel, Channel, ChannelClosed, ChannelCodec, FrameCodec
from treadle.process.rpc import Handler, RpcError, RpcPeer
from treadle.process.tree import adopt_orphans, die_with_parent, kill_children

MAX_STARTED_BYTES = 1 << 20
"""Of the first message of a child."""

STARTED = FrameCodec(bytes, bytes, max_bytes=MAX_STARTED_BYTES)
"""How it is read."""


@dataclass(frozen=True, slots=True)
class ChildHead:
    """The first thing a child is told."""

    path: list[str]
    """Where the parent finds modules, so that the child finds the same."""
    name: str
    serve: str
    """`module:function`."""
    reap: bool = False
    """Adopt what descendants leave behind, and kill it at the end."""
    trace: int = -1
    """A descriptor for where every thread is, on SIGUSR1."""
    max_stall_s: float = 0.0
    """End where the event loop has not run for so long. 0: never."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "ChildHead":
        return cls(**json.loads(data))


def write_started(value: Any) -> bytes:
    """The child's first message: it serves from now on. `value` is JSON."""
    return json.dumps({"value": value}).encode()


def write_not_started(error: BaseException, where: str) -> bytes:
    """The child's first message: why it does not serve. Cut to what the parent reads."""
    carried = RpcError.of(error, where)
    data = json.dumps(asdict(carried)).encode()
    if len(data) > MAX_STARTED_BYTES:
        data = json.dumps(asdict(RpcError(RunError.__name__, carried.message[:10_000], where))).encode()
    return data


def read_started(data: bytes) -> Any:
    """The value of a child that started; raises the error of one that did not, ValueError for anything else."""
    try:
        fields = json.loads(data)
        if "value" in fields:
            return fields["value"]
        mistakes = tuple(tuple(map(str, mistake)) for mistake in fields["mistakes"])
        error = RpcError(str(fields["kind"]), str(fields["message"]), str(fields["where"]), mistakes).rebuild()
    except (TypeError, KeyError, RecursionError) as problem:
        raise ValueError(f"no first message of a process: {problem}") from problem
    raise error


class ParentConnection:
    """The parent, as the asyncio end of a child sees it."""

    handle: Handler
    """What handles the parent's requests, once there is a peer."""

    def __init__(self, channel: Channel, name: str, codec: ChannelCodec) -> None:
        self.name = name
        self._channel, self._codec = channel, codec
        self.has_started = False

    def peer(self, handle: Handler, expected: type[Exception] = TreadleError) -> RpcPeer:
        """The other end of the parent's RPC. Nothing is sent before `started`."""
        self.handle = handle
        return RpcPeer(self._channel, handle, expected, name="the parent", where=self.name)

    def started(self, value: Any = None) -> None:
        """Tell the parent that this process serves."""
        self._channel.use(RAW, self._codec.to_child)
        self._channel.send(write_started(value))
        self._channel.use(self._codec.to_parent, self._codec.to_child)
        self.has_started = True

    def fail(self, error: BaseException) -> None:
        """Tell the parent why this process does not serve."""
        self._channel.use(RAW, RAW)
        self._channel.send(write_not_started(error, self.name))

    def close(self) -> None:
        self._channel.close()


class BlockingParent:
    """The parent, as the blocking end of a child sees it."""

    def __init__(self, end: socket.socket, name: str, codec: ChannelCodec) -> None:
        self.name = name
        self.channel = BlockingChannel(end, codec.to_parent, codec.to_child)
        self.has_started = False

    def started(self, value: Any = None) -> None:
        """Tell the parent that this process serves."""
        BlockingChannel(self.channel.end, RAW).send(write_started(value))
        self.has_started = True

    def fail(self, error: BaseException) -> None:
        """Tell the parent why this process does not serve."""
        BlockingChannel(self.channel.end, RAW).send(write_not_started(error, self.name))


Received = tuple[ChildHead, Any, Any, ChannelCodec]
"""The head, the `serve` function, its setup, and the codec."""


async def receive_setup(channel: Channel) -> Received:
    """What a parent sends first, for a process that was not started as `python -m treadle.process`."""
    head = ChildHead.from_json(await channel.receive())
    packed = await channel.receive()
    try:
        return head, *_unpack(head, packed)
    except Exception as error:
        ParentConnection(channel, head.name, ChannelCodec()).fail(error)
        raise


def _unpack(head: ChildHead, packed: bytes) -> tuple[Any, Any, ChannelCodec]:
    module, _, name = head.serve.partition(":")
    serve = getattr(import_module(module), name)
    setup, codec = pickle.loads(packed)
    return serve, setup, codec


async def serve_async(serve: Any, parent: ParentConnection, setup: Any) -> None:
    """Run a `serve` coroutine; an error before it has started is the parent's to raise."""
    try:
        await serve(parent, setup)
    except Exception as error:
        if parent.has_started:
            raise
        _print_bug(error)
        parent.fail(error)
    finally:
        parent.close()


def main(arguments: Sequence[str]) -> None:
    """`arguments`: the descriptors of the channel and of the lifeline (-1: none), and the name, for `ps`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what ends when
    channel, lifeline = int(arguments[0]), int(arguments[1])
    if lifeline >= 0:
        die_with_parent(lifeline)
        os.set_inheritable(lifeline, False)
    end = socket.socket(fileno=channel)
    end.set_inheritable(False)  # nothing that is started here reaches it
    try:
        head = ChildHead.from_json(BlockingChannel(end, RAW, RAW).receive())
    except ChannelClosed:
        return  # the parent has gone
    sys.path[:] = head.path
    if isinstance(sys.stdout, TextIOWrapper):  # a pipe to the parent, which shows whole lines
        sys.stdout.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")
    if head.trace >= 0:
        os.set_inheritable(head.trace, False)
        trace_on_signal(head.trace)
    if head.reap:
        adopt_orphans()
    try:
        _serve(end, head)
    finally:
        if head.reap:
            kill_children()


def trace_on_signal(trace: int) -> None:
    """Write where every thread is into this descriptor on SIGUSR1, also while one of them holds the interpreter."""
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)


def _serve(end: socket.socket, head: ChildHead) -> None:
    packed = BlockingChannel(end, RAW, RAW).receive()
    try:
        serve, setup, codec = _unpack(head, packed)
    except Exception as error:  # noqa: BLE001  whatever it is, the parent must hear it
        return BlockingParent(end, head.name, ChannelCodec()).fail(error)
    if inspect.iscoroutinefunction(serve):
        return asyncio.run(_serve_async(end, head, serve, setup, codec))
    parent = BlockingParent(end, head.name, codec)
    try:
        serve(parent, setup)
    except Exception as error:
        if parent.has_started:
            raise
        _print_bug(error)
        parent.fail(error)


async def _serve_async(end: socket.socket, head: ChildHead, serve: Any, setup: Any, codec: ChannelCodec) -> None:
    if head.max_stall_s:
        end_when_stalled(asyncio.get_running_loop(), head.max_stall_s)
    channel = await Channel.open(end, RAW, codec.to_child)
    await serve_async(serve, ParentConnection(channel, head.name, codec), setup)


def end_when_stalled(loop: asyncio.AbstractEventLoop, max_stall_s: float) -> None:
    """End this process where its event loop stands still for so long, by a thread that needs no interpreter."""
    faulthandler.dump_traceback_later(max_stall_s, exit=True)
    loop.call_later(max_stall_s / 4, end_when_stalled, loop, max_stall_s)


def _print_bug(error: Exception) -> None:
    """The traceback of an error that is not treadle's own, for the log of the parent."""
    if not isinstance(error, TreadleError | OSError | ImportError):
        traceback.print_exception(error)
