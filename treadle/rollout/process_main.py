"""The worker's end: `python -m treadle.rollout.process_main FD TRACE`. Started by `ProcessWorker`, never by hand.

Ends whatever its tools started and left running, also where that made itself independent of this process.
"""

import asyncio
import ctypes
import faulthandler
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

from treadle.engine.channel import Channel, ChannelClosed, Peer
from treadle.errors import ConfigError, Failure, TreadleError
from treadle.observe import Wait
from treadle.reward.sandbox.limits import kill_tree, list_children
from treadle.rollout.distant import run_sent, serve_jobs
from treadle.rollout.process import Setup
from treadle.rollout.serialization import WORKER_END, Ready, WaitReport
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import Completion, Request


class UpstreamEngine:
    """Generates by asking the manager."""

    peer: Peer

    async def generate(self, request: Request) -> Completion:
        completion: Completion = await self.peer.ask(request)
        return completion

    def announce(self, wait: Wait) -> None:
        """Say where a session is going, before it goes there: it may not come back."""
        with suppress(ChannelClosed):
            self.peer.tell(WaitReport((replace(wait, since=0.0),)))


async def serve(end: socket.socket) -> None:
    """Set up a worker, then run jobs until the manager's end closes."""
    channel = await Channel.open(end, WORKER_END)
    setup: Setup = await channel.receive()
    sys.path[:] = setup.path
    engine = UpstreamEngine()
    try:
        worker = await AgentLoopWorker.create(
            rollout=setup.rollout, model=setup.model, engine=engine, announce=engine.announce
        )
    except ConfigError as error:
        return channel.send(Ready(error))
    except (TreadleError, OSError) as error:
        return channel.send(Ready(f"{type(error).__name__}: {error}"))
    engine.peer = Peer(channel, partial(run_sent, worker), Failure)
    channel.send(Ready())
    await serve_jobs(worker, engine.peer)


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind, so that it can be found; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


_PR_SET_CHILD_SUBREAPER = 36


def main(channel: int, trace: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the manager decides what ends when
    for end in (channel, trace):
        os.set_inheritable(end, False)  # nothing that a tool starts reaches them
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
    adopt_orphans()
    try:
        asyncio.run(serve(socket.socket(fileno=channel)))
    finally:
        while children := list_children(os.getpid()):
            for child in children:
                kill_tree(child)
                os.waitpid(child, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
