"""Protocol between the parent and a reward worker, on top of `process`: setup, report, requests and replies.

    parent → worker    setup, then for each function: its name, and the arguments where they are new (pickles)
    worker → parent    a report (JSON), then for each function: its score or failure (JSON)

Owns the forms and their reading. The parent never unpickles what a worker sent, and reads at most `MAX_REPLY_BYTES`.
Invariant: a reply belongs to the request whose number it has, and numbers cannot be guessed; any other ends the worker.
What a function prints goes to the console and the log: in the worker every line gets the name of the function; in the
parent lines are cut, counted and shown as foreign text. Printing never ends a score, and a flood of lines is cut short.
"""

import copyreg
import io
import logging
import os
import pickle
import signal
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from types import MappingProxyType
from typing import Any, cast

from treadle.errors import Mistake
from treadle.exit_status import describe_exit
from treadle.process.channel import ChannelCodec
from treadle.process.codec import RecordCodec
from treadle.reward.function import RewardFunction
from treadle.reward.result import MAX_RESULT_BYTES, Fault, ScoreFailure
from treadle.terminal import printable, warn

MAX_REPLY_BYTES = MAX_RESULT_BYTES + 4096


@dataclass(frozen=True, slots=True)
class FunctionScore:
    """Asks for what one function says of the arguments that were sent last."""

    function: str
    arguments: bytes | None
    """A pickle; None: those of the request before."""


@dataclass(frozen=True, slots=True)
class FunctionReply:
    """A score or a failure, as `treadle.reward.result` writes it."""

    data: bytes


WORKER_CODEC = ChannelCodec(to_parent=RecordCodec(replies=(FunctionReply,), max_bytes=MAX_REPLY_BYTES).frames())
"""What a worker sends: nothing else is read."""


@dataclass(frozen=True, slots=True)
class RewardWorkerSetup:
    """What a worker is told first: what to load (name, path, kwargs, scope, interpreter), the limits, the kind, and
    what code of a model must not read."""

    functions: tuple[tuple[str, str, Mapping[str, Any], str, str | None], ...]
    cpu_time_s: float
    memory_mb: int
    sandbox: bool
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FunctionNeeds:
    """The parameters of a function that are filled, and those of them without a default."""

    filled: tuple[str, ...]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The first message from a worker: the arguments its functions need, or what is wrong with them, by name; and the
    fences that a sandbox does without here."""

    needs: Mapping[str, FunctionNeeds]
    mistakes: Mapping[str, tuple[Mistake, ...]]
    missing: tuple[str, ...]


def write_report(
    functions: Sequence[RewardFunction], mistakes: Mapping[str, Sequence[Mistake]], missing: Sequence[str]
) -> dict[str, Any]:
    """A report as JSON."""
    needs = {function.name: [list(function.needs), list(function.required)] for function in functions}
    listed = {
        name: [[item.key, item.problem, item.fix, item.missing, str(item.value)] for item in found]
        for name, found in mistakes.items()
    }
    return {"needs": needs, "mistakes": listed, "missing": list(missing)}


def read_report(fields: Any) -> WorkerReport:
    """A report as its parent reads it. Nothing in it is trusted: nonsense is a failure."""
    try:
        mistakes = {
            name: tuple(
                Mistake(key, problem, value, fix=fix, missing=missing) for key, problem, fix, missing, value in found
            )
            for name, found in fields["mistakes"].items()
        }
        needs = {
            name: FunctionNeeds(tuple(map(str, filled)), tuple(map(str, required)))
            for name, (filled, required) in fields["needs"].items()
        }
        return WorkerReport(needs, mistakes, tuple(map(str, fields["missing"])))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ScoreFailure(Fault.CRASH, "garbled its worker's first answer") from error


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


log = logging.getLogger(__name__)

MAX_LINE_CHARS = 2_000
"""Of a line that are shown."""

MAX_LINES_PER_S = 100
"""Of one worker that are shown."""


class LabelledOutput(io.TextIOBase):
    """Standard output of a worker: whole lines, each with the name of the function that is running."""

    def __init__(self, descriptor: int) -> None:
        self.label = ""
        self._descriptor = descriptor
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if len(self._line) > MAX_LINE_CHARS:
            lines, self._line = [*lines, self._line], ""
        for line in lines:
            self._send(line)
        return len(text)

    def end(self) -> None:
        """Send what stands on a line that was not ended."""
        if self._line:
            self._send(self._line)
            self._line = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def _send(self, line: str) -> None:
        os.write(self._descriptor, f"{self.label}: {line[:MAX_LINE_CHARS]}\n".encode(errors="replace"))


class PrintedLines:
    """The lines of one worker, as they arrive."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rest = b""
        self._second = 0
        self._shown = 0
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """Show the lines that are complete."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[: 4 * MAX_LINE_CHARS]
        for line in lines:
            self._show(line.decode(errors="replace"))

    def end(self) -> None:
        """Show what is left: the worker has gone."""
        if self._rest:
            self._show(self._rest.decode(errors="replace"))
            self._rest = b""
        self._say_left_out()

    def _show(self, line: str) -> None:
        second = int(self._clock())
        if second != self._second:
            self._say_left_out()
            self._second, self._shown = second, 0
        if self._shown >= MAX_LINES_PER_S:
            self._left_out += 1
            return
        self._shown += 1
        _say(line[: 2 * MAX_LINE_CHARS])

    def _say_left_out(self) -> None:
        if self._left_out:
            _say(f"{self._left_out:,} more printed lines left out: at most {MAX_LINES_PER_S} a second are shown")
        self._left_out = 0


def _say(line: str) -> None:
    text = f"printed by reward {line}"
    warn(text)
    log.info("%s", printable(text))
