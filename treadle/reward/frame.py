"""Messages between the parent and a worker: four bytes of length, then the message.

Owns the frame and both ends of it: blocking for the worker, event-driven for the parent.
Invariant: neither end reads past a message, and the parent never holds more than one message of the largest size.
"""

import asyncio
import os
import struct
from typing import cast

from treadle.reward.failure import Fault, ScoreFailure
from treadle.reward.verdict import MAX_RESULT_BYTES

HEADER = struct.Struct("!I")


def write_frame(channel: int, message: bytes) -> None:
    """Send one message, waiting as long as it takes."""
    data = memoryview(HEADER.pack(len(message)) + message)
    while data:
        data = data[os.write(channel, data) :]


def read_frame(channel: int) -> bytes | None:
    """The next message; None when the other end is closed."""
    header = _read_exactly(channel, HEADER.size)
    return None if header is None else _read_exactly(channel, HEADER.unpack(header)[0])


def _read_exactly(channel: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = os.read(channel, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


class FrameStream(asyncio.Protocol):
    """The parent's end. One reader at a time; a message that nobody waits for stays until somebody does."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._reader: asyncio.Future[bytes] | None = None
        self._failure: ScoreFailure | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > MAX_RESULT_BYTES + HEADER.size:
            self.fail(ScoreFailure(Fault.TOO_LARGE, "flooded its worker's channel"))
        self._deliver()

    def send(self, message: bytes) -> None:
        assert self._transport is not None
        self._transport.write(HEADER.pack(len(message)) + message)

    async def receive(self) -> bytes:
        """The next message, or the failure that ended the stream."""
        assert self._reader is None, "two readers on one worker"
        self._reader = asyncio.get_running_loop().create_future()
        try:
            self._deliver()
            return await self._reader
        finally:
            self._reader = None

    def fail(self, failure: ScoreFailure) -> None:
        """End the stream: the reader, now or later, gets this failure."""
        self._failure = self._failure or failure
        self.abort()
        self._deliver()

    def abort(self) -> None:
        """Close at once; unsent data is dropped."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def quiet(self) -> bool:
        """Nothing is left unread, and the stream has not failed."""
        return not self._buffer and self._failure is None

    def _deliver(self) -> None:
        if self._reader is None or self._reader.done():
            return
        message = self._take()
        if message is not None:
            self._reader.set_result(message)
        elif self._failure is not None:
            self._reader.set_exception(self._failure)

    def _take(self) -> bytes | None:
        if len(self._buffer) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return message
