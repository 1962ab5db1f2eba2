"""`serve` functions of processes that tests start."""

import asyncio
import os
import sys
import time
from typing import Any

from treadle.errors import EngineFailure
from treadle.process.main import BlockingParent, ParentConnection
from treadle.process.rpc import RpcReply, RpcRequest


async def serve_echo(parent: ParentConnection, setup: Any) -> None:
    """Answers with what it was asked; some words are orders."""

    async def handle(body: Any) -> Any:
        if body == "wait":
            await asyncio.sleep(600)
        if body == "fail":
            raise EngineFailure("as it was told")
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
