"""The server process of one vLLM replica: `python -m treadle.engine.vllm.server LISTENER`.

Owns the socket it was handed, the clients that connect to it, and vLLM itself. What to serve comes first on standard
input, which then stays open as long as the server is needed: it ends when that closes, however the other side
ended. When vLLM dies the server dies with it, and leaves its requests unanswered: the owner then reads the last output
of both from standard output and error.
"""

import asyncio
import itertools
import os
import pickle
import socket
import sys
from collections.abc import Callable
from typing import Any

from treadle.engine.protocol import ConfirmedWeights
from treadle.engine.vllm.protocol import (
    FrameKind,
    ReplicaSocket,
    ReplicaSocketClosed,
    SampleRequest,
    ServerHello,
    VLLMServerSetup,
)
from treadle.engine.vllm.request_tracker import RequestTracker
from treadle.errors import TreadleError


class ClientConnection:
    """One client."""

    def __init__(self, link: ReplicaSocket, number: int, serving: RequestTracker[Any], dead: asyncio.Event) -> None:
        self._link = link
        self._dead = dead
        self._number = number
        self._serving = serving
        self._working: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Work until the client goes; what it still had running ends with it."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._handle(*await self._link.receive(), group)
        except* ReplicaSocketClosed:
            self._link.close()

    def _handle(self, kind: FrameKind, number: int, body: bytes, group: asyncio.TaskGroup) -> None:
        if kind is FrameKind.CANCEL:
            if task := self._working.get(number):
                task.cancel()
            return
        work = self._answer(number, body) if kind is FrameKind.REQUEST else self._call(number, body)
        task = self._working[number] = group.create_task(work)
        task.add_done_callback(lambda _: self._working.pop(number))

    async def _answer(self, number: int, body: bytes) -> None:
        try:
            answer = await self._serving.generate((self._number, number), SampleRequest.unpack(body))
        except TreadleError as error:
            await self._fail(number, error)
        else:
            self._link.send(FrameKind.SAMPLED, number, answer.pack())

    async def _call(self, number: int, body: bytes) -> None:
        name, *arguments = pickle.loads(body)
        try:
            result = await getattr(self, f"_call_{name}")(*arguments)
        except TreadleError as error:
            await self._fail(number, error)
        else:
            self._link.send_object(FrameKind.RESULT, number, result)

    async def _fail(self, number: int, error: TreadleError) -> None:
        if await self._serving.is_dead():
            self._dead.set()
        else:
            self._link.send_object(FrameKind.FAILURE, number, error)

    async def _call_abort(self, numbers: tuple[int, ...]) -> None:
        await self._serving.abort([(self._number, number) for number in numbers])

    async def _call_update(self, version: int, transfer: bytes | None, expected: str = "") -> ConfirmedWeights:
        return await self._serving.update(version, transfer, expected)

    async def _call_sleep(self, level: int) -> None:
        await self._serving.sleep(level)

    async def _call_wake(self) -> None:
        await self._serving.wake()

    async def _call_serve_openai(self, served_as: str, host: str, port: int, api_key: str) -> str:
        return await self._serving.serve_openai(served_as, host, port, api_key)

    async def _call_health(self) -> None:
        await self._serving.health()


async def serve(listener: socket.socket, setup: VLLMServerSetup) -> int:
    """Start vLLM, report the outcome to the first client, and serve until standard input closes; the exit status."""
    try:
        from treadle.engine.vllm.async_llm import AsyncLLMSampler  # takes seconds; the socket listens meanwhile

        sampler = await AsyncLLMSampler.start(setup.rollout, setup.model, setup.directory)
    except TreadleError as error:
        return await _reject_clients(listener, error)
    limits = setup.rollout.limits
    serving = RequestTracker(sampler, timeout_s=limits.request_timeout_s)
    dead = asyncio.Event()
    try:
        await _accept_clients(listener, serving, sampler.vocabulary, dead)
    finally:
        sampler.close(limits.close_timeout_s / 2)
    return int(dead.is_set())


async def _accept_clients(
    listener: socket.socket, serving: RequestTracker[Any], vocabulary: int, dead: asyncio.Event
) -> None:
    numbers = itertools.count()
    hello = ServerHello(vocabulary, os.getpid())

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = ReplicaSocket(reader, writer)
        link.send_object(FrameKind.RESULT, 0, hello)
        await ClientConnection(link, next(numbers), serving, dead).run()

    await _accept(listener, meet, dead)


async def _accept(listener: socket.socket, meet: Callable[..., Any], dead: asyncio.Event) -> None:
    """Accept clients until vLLM is dead, or standard input closes."""
    async with await asyncio.start_unix_server(meet, sock=listener):
        ends = [asyncio.ensure_future(_until_shutdown()), asyncio.ensure_future(dead.wait())]
        _, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()


async def _reject_clients(listener: socket.socket, error: TreadleError) -> int:
    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ReplicaSocket(reader, writer).send_object(FrameKind.FAILURE, 0, error)

    await _accept(listener, meet, asyncio.Event())
    return 1


async def _until_shutdown() -> None:
    """Wait until standard input closes."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1 << 12):
        continue


def main() -> int:
    setup: VLLMServerSetup = pickle.load(sys.stdin.buffer)
    sys.path[:] = setup.path
    listener = socket.socket(fileno=int(sys.argv[1]))
    return asyncio.run(serve(listener, setup))


if __name__ == "__main__":
    sys.exit(main())
