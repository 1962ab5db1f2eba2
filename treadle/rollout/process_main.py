"""The worker's end: `python -m treadle.rollout.process_main FD`. Started by `ProcessWorker`, never by hand."""

import asyncio
import signal
import socket
import sys

from treadle.engine.channel import Channel, Peer
from treadle.errors import ConfigError, Failure, TreadleError
from treadle.rollout.process import Ready, Setup
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import Completion, Request


class UpstreamEngine:
    """Generates by asking the manager."""

    peer: Peer

    async def generate(self, request: Request) -> Completion:
        completion: Completion = await self.peer.ask(request)
        return completion


async def serve(end: socket.socket) -> None:
    """Set up a worker, then run jobs until the manager's end closes."""
    channel = await Channel.open(end)
    setup: Setup = await channel.receive()
    sys.path[:] = setup.path
    engine = UpstreamEngine()
    try:
        worker = await AgentLoopWorker.create(rollout=setup.rollout, model=setup.model, engine=engine)
    except ConfigError as error:
        return channel.send(Ready(error))
    except (TreadleError, OSError) as error:
        return channel.send(Ready(f"{type(error).__name__}: {error}"))
    engine.peer = Peer(channel, worker.run, Failure)
    channel.send(Ready())
    try:
        await engine.peer.serve()
    finally:
        await worker.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the manager decides what ends when
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
