"""Sandbox protocol: what a box for commands can do, the result of a command, and the settings of a box.

A command's exit status is a result; a box that does not start, dies or does not answer is a SandboxFailure, and the
boundary that uses the box says which failure of a trajectory that is. Knows no provider.
Invariant: a result has at most `max_output` bytes of each output, and comes within its deadline and a little.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # settings reach processes that do without the config
    from treadle.config.sandbox import SandboxConfig


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What became of a command: `code` is negative for the signal that ended it, 127 where there is no such program."""

    code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    dropped: int = 0
    """Bytes of output beyond the bound."""
    line: bytes = b""
    """What a process that stays wrote to end its answer."""

    @property
    def text(self) -> str:
        """Both outputs, as a terminal shows them."""
        return (self.stdout + self.stderr).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class BoxSettings:
    """Limits of a box, and what it may see and reach."""

    provider: str = "auto"
    image: str | None = None
    memory_mb: int = 1024
    processes: int = 64
    disk_mb: int = 256
    cpu_time_s: int = 120
    timeout_s: float = 60.0
    max_output: int = 1 << 20
    read_only: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    """Directories whose programs come before those of the system."""
    warm: int = 0
    """Boxes that are started ahead."""
    egress: tuple[str, ...] = ()
    """Hosts that the box reaches through a proxy of this machine; treadle.config.sandbox has the grammar."""
    bridges: tuple[tuple[int, str], ...] = ()
    """Local sockets of this machine that programs in the box reach as a TCP port of 127.0.0.1."""

    @classmethod
    def of(cls, sandbox: "SandboxConfig") -> "BoxSettings":
        return cls(
            sandbox.provider,
            sandbox.image,
            sandbox.memory_mb,
            sandbox.processes,
            sandbox.disk_mb,
            sandbox.cpu_time_s,
            sandbox.timeout_s,
            sandbox.max_output_kb << 10,
            tuple(sandbox.read_only),
            tuple(sandbox.path),
            sandbox.warm,
            tuple(sandbox.egress),
        )


class Sandbox(Protocol):
    """A box: started once, used by one session or one grading, stopped once. Paths start from its `home`."""

    @property
    def home(self) -> str:
        """The directory in which commands start, and the only one that they may write to."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it still takes commands, as far as is known without asking it."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """End everything in the box and lose its files. May be called at any time, and twice."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        id: str | None = None,
    ) -> ExecResult:
        """Run a command to its end or its deadline. The same id again gives the same result, and runs nothing; with
        another command it is a ValueError."""
        ...

    async def launch(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None,
        timeout_s: float | None = None, id: str | None = None,
    ) -> str:  # fmt: skip
        """Start a long command and return its id at once: yours, or one that is made."""
        ...

    async def poll(self, id: str, wait_s: float = 0.0) -> ExecResult | None:
        """The result of a launched command; None where it still runs after so many seconds."""
        ...

    async def spawn(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
        """Start an interpreter that stays, and return its id; OSError where the box has no room for a process."""
        ...

    async def ask(self, process: str, data: bytes, timeout_s: float | None = None) -> ExecResult:
        """Write to the input of such a process; it ends its answer with a line on descriptor 3."""
        ...

    async def end(self, process: str) -> None:
        """End such a process, with all that it started."""
        ...

    async def read_file(self, path: str, most: int = 1 << 24) -> bytes:
        """A file; OSError where it cannot be read or is longer."""
        ...

    async def write_file(self, path: str, data: bytes, executable: bool = False) -> None:
        """Make or replace a file; OSError where it cannot be written."""
        ...

    async def snapshot(self) -> bytes:
        """The files of the box as a tar archive; OSError where they cannot be packed, or are more than 256 MB."""
        ...

    async def restore(self, snapshot: bytes) -> None:
        """Lay the files of a snapshot into this box; OSError where they do not fit."""
        ...
