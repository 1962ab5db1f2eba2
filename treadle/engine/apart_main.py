"""The engine's end: `python -m treadle.engine.apart_main FD`. Started by `EngineApart`, never by hand."""

import asyncio
import signal
import socket
import sys
from typing import Any

from treadle.engine.apart import Call, Ready, Start
from treadle.engine.channel import Channel, Peer
from treadle.errors import ConfigError, TreadleError


async def serve(end: socket.socket) -> None:
    """Start an engine, then do as told until the other end closes."""
    channel = await Channel.open(end)
    sys.path[:] = await channel.receive()
    try:
        start: Start = await channel.receive()
        engine = await start()
    except ConfigError as error:
        return channel.send(Ready(problem=error))
    except (TreadleError, OSError, RuntimeError, ImportError, AttributeError) as error:
        return channel.send(Ready(problem=f"{type(error).__name__}: {error}"))

    async def answer(call: Call) -> Any:
        return await getattr(engine, call.method)(*call.arguments)

    channel.send(Ready(engine.version))
    try:
        await Peer(channel, answer, TreadleError).serve()
    finally:
        await engine.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process decides when it ends
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
