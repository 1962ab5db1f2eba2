"""Box: the host's side of a sandbox whose commands are run by `init`, over one pair of pipes.

Owns requests, replies and their deadlines. What isolates is the command line that a provider starts, with `init` as its
last part; so bubblewrap, Landlock and containers differ in a few lines.
Waits: each request for its reply, at most for its own deadline and `GRACE_S`; then the box is ended, and fails.
Invariant: nothing that a box sends is trusted beyond bytes of bounded number; after `stop`, or a `start` that failed or
was cancelled at any point, no process of it is left, nor anything else that it took.
"""

import asyncio
import itertools
import os
import resource
import shlex
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from treadle.aio import abandon, run_whole
from treadle.errors import SandboxFailure
from treadle.process.tree import kill_tree
from treadle.sandbox.cgroup import BoxCgroup
from treadle.sandbox.init.processes import pack, unpack
from treadle.sandbox.init.server import NOT_STARTED
from treadle.sandbox.protocol import BoxSettings, ExecResult

START_S = 30.0
GRACE_S = 10.0
"""Beyond a command's deadline, for a reply: a machine may be busy."""
END_S = 2.0
STOP_S = 10.0
HOME = "/workspace"
MAX_FILE = 1 << 28
STDERR_KEPT = 4000
INIT = Path(__file__).with_name("init")
INIT_ROOT = "/run/treadle-init"
INIT_PLACE = f"{INIT_ROOT}/treadle/sandbox/init"
"""Where a box finds it, under the name that its modules import each other by."""
RUN_INIT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from treadle.sandbox.init.server import main; main(sys.argv[1:])"
)
"""Code for the interpreter; its first argument is the root."""


class _NamedCommand:
    """A command that is asked for by its id: run once, however many ask, ended where its last caller is cancelled."""

    def __init__(self, fields: list[bytes], result: "asyncio.Task[ExecResult]") -> None:
        self.fields, self.result = fields, result
        self.launched = False
        self._callers = 0
        result.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # seen

    async def wait(self) -> ExecResult:
        self._callers += 1
        try:
            return await asyncio.shield(self.result)
        finally:
            self._callers -= 1
            if not self._callers and not self.launched:
                self.result.cancel()


class InitBox:
    """A sandbox whose commands `init` runs. A provider says how `init` is started, in `command`."""

    provider: ClassVar[str]
    not_protected: ClassVar[tuple[str, ...]] = ()
    """What this provider does not protect from, in words."""
    reaches_out: ClassVar[bool] = False
    """Whether its boxes have `settings.bridges` and `settings.egress`."""

    def __init__(self, settings: BoxSettings) -> None:
        self.settings = settings
        self.home = HOME
        self.missing: tuple[str, ...] = ()
        """Limits that are not to be had on this machine, in words."""
        self._process: asyncio.subprocess.Process | None = None
        self._cgroup: BoxCgroup | None = None
        self._waiting: dict[str, asyncio.Future[ExecResult]] = {}
        self._named: dict[str, _NamedCommand] = {}
        """Commands that were launched, or that have an id."""
        self._numbers = itertools.count(1)
        self._reading: list[asyncio.Task[None]] = []
        self._said = bytearray()
        self._over: str | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """What starts `init` behind this provider's walls."""

    def init_arguments(self) -> list[str]:
        """The box's directory, limits of single processes, and what `init` has to count since no group does."""
        settings = self.settings
        limits: dict[int | str, int] = {
            resource.RLIMIT_DATA: settings.memory_mb << 20,
            resource.RLIMIT_CPU: settings.cpu_time_s,
            resource.RLIMIT_FSIZE: settings.disk_mb << 20,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 1024,
        }
        if self._cgroup is None and self.uses_groups():
            limits |= {"memory": settings.memory_mb << 20, "processes": settings.processes}
        return [self.home, *(f"{name}={value}" for name, value in (limits | self.more_limits()).items())]

    def more_limits(self) -> dict[int | str, int]:
        """Further limits of this provider."""
        return {}

    def starter_environment(self) -> dict[str, str]:
        """What the program that makes the box sees."""
        return {"PATH": os.defpath}

    def uses_groups(self) -> bool:
        """Whether control groups of ours hold it; a container engine has its own."""
        return True

    @property
    def alive(self) -> bool:
        """Whether it takes commands: it was started, and neither stopped nor ended."""
        return self._process is not None and self._process.returncode is None and self._over is None

    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that the command is given, closed here once it has started."""
        return ()

    def environment(self) -> dict[str, str]:
        """What every command has."""
        system = (os.path.dirname(interpreter()), "/usr/local/bin", "/usr/bin", "/bin")
        path = ":".join(dict.fromkeys((*self.settings.path, *system)))
        return {"PATH": path, "HOME": self.home, "TMPDIR": f"{self.home}/.tmp", "LANG": "C.UTF-8"}

    # --- start and stop

    async def start(self) -> None:
        if self._process is not None:
            return
        try:
            ready = await run_whole(self._make())
            async with asyncio.timeout(START_S):
                await ready
            await self.complete()
        except TimeoutError:
            await self.stop()
            raise SandboxFailure(
                f"a {self.provider} box did not start within {START_S:g} s{self._last_words()}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def _make(self) -> "asyncio.Future[ExecResult]":
        """Take what the box is made of and start its process, at once; done when `init` answers."""
        await self.prepare()
        if self.uses_groups():
            self._cgroup, missing = await asyncio.to_thread(BoxCgroup.create, self.settings)
            self.missing += missing
        given = self.descriptors()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._within_cgroup(self.command()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self.starter_environment(),
                pass_fds=given,
                start_new_session=True,
                limit=1 << 20,
            )
        except OSError as error:
            raise SandboxFailure(f"{self.provider}: {error}") from error
        finally:
            for descriptor in given:
                os.close(descriptor)
        if self._over is not None:
            raise SandboxFailure(self._over)
        ready = self._waiting["ready"] = asyncio.get_running_loop().create_future()
        self._reading = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._read_stderr())]
        return ready

    async def prepare(self) -> None:
        """Take what this provider's command line needs."""

    async def complete(self) -> None:
        """What this provider does in a box whose `init` runs; SandboxFailure where that cannot be done."""

    def _within_cgroup(self, command: list[str]) -> list[str]:
        """The command, moved into its groups before it starts anything: what it starts is born there."""
        if self._cgroup is None:
            return command
        moves = "".join(f"echo $$ > {shlex.quote(str(path / 'cgroup.procs'))} && " for path in self._cgroup.paths)
        return ["/bin/sh", "-c", f'{moves}exec "$@"', "sh", *command]

    async def stop(self) -> None:
        await run_whole(self.release())

    async def release(self) -> None:
        """End the process and give back what the box took; what is not there yet, or no more, is passed over."""
        process, self._process = self._process, None
        self._end("the box was stopped")
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            with suppress(TimeoutError):  # `init` ends all of its own accord when its channel closes
                async with asyncio.timeout(END_S):
                    await process.wait()
            kill_tree(process.pid)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        for task in self._reading:
            task.cancel()
            abandon(task)
        self._reading = []
        if self._cgroup is not None:
            cgroup, self._cgroup = self._cgroup, None
            await asyncio.to_thread(cgroup.remove)

    # --- requests

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
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        fields = self._exec_fields(argv, cwd, env, stdin, timeout_s)
        if id is None:
            return await self._request(self._number(), timeout_s, fields)
        return await self._start_named(id, timeout_s, fields).wait()

    async def launch(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        id: str | None = None,
    ) -> str:
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        name = f"launched-{self._number()}" if id is None else id
        self._start_named(name, timeout_s, self._exec_fields(argv, cwd, env, b"", timeout_s)).launched = True
        return name

    def _start_named(self, id: str, timeout_s: float, fields: list[bytes]) -> "_NamedCommand":
        """The command of this id, started unless it was; its result is kept until the box is stopped."""
        named = self._named.get(id)
        if named is None or named.result.cancelled():
            result = asyncio.ensure_future(self._request(self._number(), timeout_s, fields))
            named = self._named[id] = _NamedCommand(fields, result)
        elif named.fields != fields:
            raise ValueError(f"the id {id!r} belongs to another command of this box; give each command its own")
        return named

    async def poll(self, id: str, wait_s: float = 0.0) -> ExecResult | None:
        if id not in self._named:
            raise SandboxFailure(f"the box has no command {id!r}")
        done, _ = await asyncio.wait({self._named[id].result}, timeout=wait_s)
        return done.pop().result() if done else None

    async def spawn(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
        number = self._number()
        words = [word.encode() for word in argv]
        fields = [b"spawn", self.home.encode(), b"%d" % len(words), *words, *self._variables(env)]
        result = await self._request(number, START_S, fields)
        if result.code == NOT_STARTED:
            raise OSError(f"{argv[0]} did not start: {result.text.strip()}")
        return number

    async def ask(self, process: str, data: bytes, timeout_s: float | None = None) -> ExecResult:
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        fields = [b"call", process.encode(), _milliseconds(timeout_s), b"%d" % self.settings.max_output, data]
        return await self._request(self._number(), timeout_s, fields)

    async def end(self, process: str) -> None:
        if self._process is not None and self._process.stdin is not None and self._over is None:
            self._process.stdin.write(pack([b"kill", process.encode()]))

    async def read_file(self, path: str, most: int = 1 << 24) -> bytes:
        fields = [b"read", _milliseconds(GRACE_S), b"%d" % min(most, MAX_FILE), self._place(path)]
        result = await self._request(self._number(), GRACE_S, fields)
        if result.code != 0:
            raise _file_error(path, result)
        return result.stdout

    async def write_file(self, path: str, data: bytes, executable: bool = False) -> None:
        mode = b"%d" % (0o755 if executable else 0o644)
        fields = [b"write", _milliseconds(GRACE_S), self._place(path), mode, data]
        result = await self._request(self._number(), GRACE_S, fields)
        if result.code != 0:
            raise _file_error(path, result)

    async def snapshot(self) -> bytes:
        argv, timeout_s = ["tar", "-cf", "-", "--exclude=./.tmp", "."], self.settings.timeout_s
        fields = self._exec_fields(argv, None, None, b"", timeout_s, MAX_FILE)
        result = await self._request(self._number(), timeout_s, fields)
        if result.dropped:
            raise OSError(f"the files of the box are more than {MAX_FILE >> 20} MB")
        if result.code != 0 or result.timed_out:
            said = result.stderr.decode(errors="replace").strip()[-200:]
            raise OSError(f"the files of the box cannot be packed: {said or f'status {result.code}'}")
        return result.stdout

    async def restore(self, snapshot: bytes) -> None:
        result = await self.exec(["tar", "-xmf", "-", "--no-same-owner", "--no-same-permissions"], stdin=snapshot)
        if result.code != 0:
            raise OSError(f"the snapshot cannot be unpacked: {result.text[:200]}")

    def _number(self) -> str:
        return str(next(self._numbers))

    def _place(self, path: str) -> bytes:
        return os.path.join(self.home, path).encode()

    def _variables(self, env: Mapping[str, str] | None) -> list[bytes]:
        return [f"{name}={value}".encode() for name, value in {**self.environment(), **(env or {})}.items()]

    def _exec_fields(
        self,
        argv: Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | None,
        stdin: bytes,
        timeout_s: float,
        max_output: int | None = None,
    ) -> list[bytes]:
        words = [word.encode() for word in argv]
        most = self.settings.max_output if max_output is None else max_output
        head = [b"exec", _milliseconds(timeout_s), b"%d" % most, self._place(cwd or "."), stdin]
        return [*head, b"%d" % len(words), *words, *self._variables(env)]

    async def _request(self, number: str, timeout_s: float, fields: list[bytes]) -> ExecResult:
        """The reply to a request; a caller that is cancelled ends its command."""
        process = self._process
        if process is None or process.stdin is None or self._over is not None:
            raise SandboxFailure(self._over or "the box was not started")
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        verb, *rest = fields
        try:
            process.stdin.write(pack([verb, number.encode(), *rest]))
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await asyncio.shield(reply)
        except TimeoutError:
            await self.stop()
            late = f"a {self.provider} box gave no answer within {timeout_s + GRACE_S:g} s"
            raise SandboxFailure(f"{late}, and was ended") from None
        except asyncio.CancelledError:
            if self._over is None:
                process.stdin.write(pack([b"kill", number.encode()]))
            raise

    # --- replies

    async def _read(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        most = 2 * self.settings.max_output + MAX_FILE
        try:
            while True:
                size = int.from_bytes(await process.stdout.readexactly(4), "big")
                if size > most:
                    raise ValueError(f"a reply of {size} bytes")
                self._settle(unpack(await process.stdout.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.sleep(0)  # its last words may be on their way
            self._end(f"a {self.provider} box ended{self._last_words()}")
        except (ValueError, IndexError) as error:
            self._end(f"a {self.provider} box sent what is no reply: {error}")
            kill_tree(process.pid)

    def _settle(self, fields: list[bytes]) -> None:
        if fields[0] == b"ready":
            number, result = "ready", ExecResult(0)
        else:
            _, name, code, timed_out, dropped, stdout, stderr, line = fields
            number = name.decode()
            result = ExecResult(int(code), stdout, stderr, timed_out == b"1", int(dropped), line)
        reply = self._waiting.pop(number, None)
        if reply is not None and not reply.done():
            reply.set_result(result)

    async def _read_stderr(self) -> None:
        process = self._process
        assert process is not None and process.stderr is not None
        while data := await process.stderr.read(4096):
            self._said += data
            del self._said[:-STDERR_KEPT]

    def _last_words(self) -> str:
        said = self._said.decode(errors="replace").strip()
        return f": {said[-400:]}" if said else ""

    def _end(self, why: str) -> None:
        self._over = self._over or why
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(SandboxFailure(self._over))
                reply.exception()  # seen: a launched command may never be asked for
        self._waiting.clear()


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, int(seconds * 1000))


def _file_error(path: str, result: ExecResult) -> OSError:
    return OSError(f"{path}: {result.stderr.decode(errors='replace').strip() or f'status {result.code}'}")


def interpreter() -> str:
    """The Python that boxes have: the one that runs treadle, without its virtual environment."""
    return os.path.realpath(sys.executable)
