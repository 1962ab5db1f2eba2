"""`serve` functions of processes that tests start."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from treadle.errors import EngineFailure
from treadle.process.channel import ChannelClosed
from treadle.process.child_main import BlockingParent, ParentConnection
from treadle.process.rpc import RpcError, RpcReply, RpcRequest


async def serve_echo(parent: ParentConnection, setup: Any) -> None:
    """Answers with what it was asked; some words are orders."""

    async def handle(body: Any) -> Any:
        if body == "wait":
            await asyncio.sleep(600)
        if body == "fail":
            raise EngineFailure("as it was told")
        if body == "hold":
            re.match(r"(a+)+$", "a" * 60 + "b")  # in C, and never lets go of the interpreter
        if body == "print":
            print("\x1b]52;c;eA==\x07 one", "two\x1b[2J", sep="\n")
            os.write(1, b"\x1b]0;title\x07 three\n")
        if body == "crash":
            print("the last thing it said", file=sys.stderr, flush=True)
            os._exit(3)
        return body

    peer = parent.peer(handle)
    parent.started({"setup": setup, "pid": os.getpid()})
    await peer.serve()


async def serve_late(parent: ParentConnection, setup: Any) -> None:
    print("loading for ever", file=sys.stderr, flush=True)
    await asyncio.sleep(600)


def serve_blocking(parent: BlockingParent, setup: Any) -> None:
    """Answers twice what it was asked once, if the setup says so."""
    parent.started(setup)
    while True:
        message = parent.channel.receive()
        assert isinstance(message, RpcRequest)
        for _ in range(2 if setup == "twice" else 1):
            parent.channel.send(RpcReply(message.number, message.body))
        time.sleep(0)


async def serve_closed(parent: ParentConnection, setup: Any) -> None:
    """Lives on behind a channel that it has closed, as code that closes every descriptor does."""
    if setup == "started":
        parent.started()
        await asyncio.sleep(0.1)
    parent.close()
    await asyncio.sleep(600)


def serve_closed_blocking(parent: BlockingParent, setup: Any) -> None:
    parent.channel.close()
    time.sleep(600)


async def serve_odd_error(parent: ParentConnection, setup: Any) -> None:
    """Replies with an error that is none of treadle's."""
    parent.started()
    message = await parent._channel.receive()
    parent._channel.send(RpcReply(message.number, error=RpcError("ConfigError", "odd", mistakes=(("a", "b"),))))
    await asyncio.sleep(600)


async def serve_leaver(parent: ParentConnection, setup: Any) -> None:
    """Starts a process in a session of its own, tells its number, and is killed with SIGKILL."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
    parent.started(child.pid)
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


async def serve_tidy(parent: ParentConnection, setup: Any) -> None:
    """Tells the number of an orphan in a session of its own; once its channel closes, it writes into a file, slowly."""
    shell = subprocess.run(  # noqa: ASYNC221
        ["sh", "-c", "sleep 600 >&- & echo $!"], start_new_session=True, stdout=subprocess.PIPE, check=True
    )
    parent.started(int(shell.stdout))
    with suppress(ChannelClosed):
        await parent._channel.receive()
    await asyncio.sleep(0.5)
    Path(setup).write_text("closed in order")  # noqa: ASYNC240
