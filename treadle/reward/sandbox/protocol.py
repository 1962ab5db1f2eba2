"""Protocol between the parent and a worker: frames, the first messages, numbered requests and replies.

    parent → worker    Setup (pickle), then for each score: number and token, names (JSON), arguments (pickle)
    worker → parent    a report (JSON), then for each function: number and token, its score or failure (JSON)

Owns the forms and their reading. The parent never unpickles what a worker sent, and reads at most `MAX_RESULT_BYTES`.
Invariant: a reply belongs to the request whose number and token it has, once and in order; any other ends the worker.
"""

import asyncio
import copyreg
import json
import os
import pickle
import signal
import struct
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from types import MappingProxyType
from typing import Any, cast

from treadle.errors import Mistake
from treadle.exit_status import describe_exit
from treadle.reward.function import RewardFunction
from treadle.reward.result import MAX_RESULT_BYTES, Fault, ScoreFailure

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from treadle.reward.sandbox.worker import main; main()"
"""The program text of a worker. Arguments: the parent's import path, the channel, the lifeline."""

HEADER = struct.Struct("!I")
STAMP = struct.Struct("!Q16s")
"""The number of a request or reply, and the token that the parent drew for the request."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker: what to load (name, path, kwargs, scope), the limits, the kind."""

    functions: tuple[tuple[str, str, Mapping[str, Any], str], ...]
    cpu_time_s: float
    memory_mb: int
    sandbox: bool


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The first message from a worker: the arguments its functions need, or what is wrong with them, by name; and the
    fences that a sandbox does without here."""

    needs: tuple[str, ...]
    mistakes: Mapping[str, tuple[Mistake, ...]]
    missing: tuple[str, ...]


def write_report(
    functions: Sequence[RewardFunction], mistakes: Mapping[str, Sequence[Mistake]], missing: Sequence[str]
) -> bytes:
    """A report as JSON."""
    needs = sorted({need for function in functions for need in function.needs})
    listed = {
        name: [[item.key, item.problem, item.fix, item.missing, str(item.value)] for item in found]
        for name, found in mistakes.items()
    }
    return json.dumps({"needs": needs, "mistakes": listed, "missing": list(missing)}).encode()


def read_report(data: bytes) -> WorkerReport:
    """A report as its parent reads it. Nothing in it is trusted: nonsense is a failure."""
    try:
        fields = json.loads(data)
        mistakes = {
            name: tuple(
                Mistake(key, problem, value, fix=fix, missing=missing) for key, problem, fix, missing, value in found
            )
            for name, found in fields["mistakes"].items()
        }
        return WorkerReport(tuple(fields["needs"]), mistakes, tuple(map(str, fields["missing"])))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ScoreFailure(Fault.CRASH, "garbled its worker's first answer") from error


def stamp(number: int, token: bytes, message: bytes = b"") -> bytes:
    """A message with the number and token of what it belongs to."""
    return STAMP.pack(number, token) + message


def read_stamped(data: bytes) -> tuple[int, bytes, bytes]:
    """Number, token and message."""
    if len(data) < STAMP.size:
        raise ScoreFailure(Fault.CRASH, "garbled its worker's answer")
    number, token = STAMP.unpack_from(data)
    return number, token, data[STAMP.size :]


def explain_status(status: int, cpu_time_s: float, *, ours: bool = False) -> ScoreFailure:
    """What the exit status of a process that ran a score means; `ours`: it was killed from here."""
    if status in (-signal.SIGPROF, -signal.SIGXCPU):
        return past_cpu_time(cpu_time_s)
    if status < 0:
        return ScoreFailure(Fault.CRASH, "was killed" if ours else f"was {describe_exit(status)}")
    return ScoreFailure(Fault.CRASH, f"ended its process with status {status}")


def past_cpu_time(cpu_time_s: float) -> ScoreFailure:
    problem = f"used more CPU than reward.cpu_time_s={cpu_time_s:g}"
    return ScoreFailure(Fault.CPU_TIME, problem, past_deadline=True, computed=True)


def _unfreeze(mapping: Mapping[str, Any]) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
    return dict, (dict(mapping),)


def pack(value: Any) -> bytes:
    """A value as bytes for one of our own workers, as a pickle that holds plain dicts."""
    from treadle.config.validate import FrozenDict  # only the parent packs, and has the config already

    # Read-only maps become dicts: one kind cannot be pickled, the other would bring the config along.
    table: ChainMap[Any, Any] = ChainMap(
        {MappingProxyType: _unfreeze, FrozenDict: _unfreeze}, cast(dict[Any, Any], copyreg.dispatch_table)
    )
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = table
    pickler.dump(value)
    return buffer.getvalue()


def copy(value: Any) -> Any:
    """What a worker would unpack, for functions that run in this process."""
    return pickle.loads(pack(value))


def write_frame(channel: int, message: bytes) -> None:
    """Send one message, waiting as long as it takes."""
    data = memoryview(HEADER.pack(len(message)) + message)
    while data:
        data = data[os.write(channel, data) :]


def read_frame(channel: int, limit: int | None = None) -> bytes | None:
    """The next message; None when the other end is closed. ScoreFailure for one above `limit` bytes."""
    header = _read_exactly(channel, HEADER.size)
    if header is None:
        return None
    size = HEADER.unpack(header)[0]
    if limit is not None and size > limit:
        raise ScoreFailure(Fault.TOO_LARGE, "flooded its worker's channel")
    return _read_exactly(channel, size)


def _read_exactly(channel: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = os.read(channel, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


class FrameStream(asyncio.Protocol):
    """The parent's end. One reader at a time; what arrives while nothing is asked fails the stream."""

    def __init__(self) -> None:
        self.asked = True
        """A message is due: at first the report."""
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._reader: asyncio.Future[bytes] | None = None
        self._failure: ScoreFailure | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self.asked:
            self.fail(ScoreFailure(Fault.CRASH, "answered without being asked"))
        elif len(self._buffer) > MAX_RESULT_BYTES + HEADER.size + STAMP.size:
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
