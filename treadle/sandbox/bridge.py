"""Bridge into a box: a local socket of this machine, behind which programs in the box find one service by TCP.

    program in the box ─► 127.0.0.1:PORT ─► forwarder.py in the box ─► /run/bridge-N ─► UnixService here ─► the service

The box's network stays empty: nothing but this one address can be reached, and by nothing outside of the box.
Invariant: after `close` no connection is left, nor the socket, also where the start was cancelled.
"""

import asyncio
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from treadle.aio import abandon, run_whole

PIECE = 65_536

FORWARDER = Path(__file__).with_name("forwarder.py").read_text()
"""The program in the box: it listens first, then answers lines."""


class UnixService(ABC):
    """A local socket in a directory of its own, and a task for each of its connections."""

    max_line: ClassVar[int] = PIECE
    """Bytes that are held of a connection while the end of a line, or of a head, is looked for."""

    def __init__(self) -> None:
        self._folder = ""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def path(self) -> str:
        return f"{self._folder}/socket"

    async def start(self) -> None:
        await run_whole(self._listen())

    async def _listen(self) -> None:
        self._folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="treadle-bridge-")
        self._server = await asyncio.start_unix_server(self._accept, self.path, limit=self.max_line)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
            abandon(task)
        if self._folder:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection has a task"
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            await self.carry(reader, writer)
        finally:
            writer.close()

    @abstractmethod
    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, which is closed afterwards."""


class UnixBridge(UnixService):
    """A local socket that leads to a TCP service of this machine."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._host, self._port = host, port

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return
        await join_streams(reader, writer, far_reader, far_writer)


async def join_streams(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Carry both directions to their ends; the far side is closed afterwards. `moved` is called for each piece."""
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(reader, far_writer, moved))
            both.create_task(_pump(far_reader, writer, moved))
    finally:
        far_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: Callable[[], None]) -> None:
    with suppress(OSError):
        while data := await reader.read(PIECE):
            moved()
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
