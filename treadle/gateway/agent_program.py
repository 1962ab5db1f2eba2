"""Agent program and grader program: a process for one session, the directory it works in, what it is told of its task

Owns the directory's name, the process under its guard (`treadle/process/guard.py`), the end of what it writes, and the
templates of its command line, environment and files. Knows no HTTP. Invariant: the same sample of the same task has the
same directory in every start of a run, so that an agent which shows its directory to the model asks after a crash what
it asked before; two programs never share one. When `run` returns, nothing that the program started is left (Linux;
elsewhere, nothing of its process group). Waits: for the guard; ended from outside, everything gets TERM, and KILL
`TERM_S` later.

A grader gives the reward after the agent has ended. It gets the task, a directory with what the agent has made, the
address for rewards and notes in `TREADLE_NOTES_URL`, and the session's second key as the first line of its standard
input: every program of the same user can read an environment for as long as the process lives, and what was read from a
pipe is gone. Its home and its working directory are its own and empty: nothing that the agent has written is run or
imported by accident. Any status but 0 is a failure of the reward.
"""

import asyncio
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from treadle.errors import LoopFailure, RewardFailure, blame, nearest
from treadle.gateway.request import POLICY_MODEL
from treadle.gateway.server import NOTES, GatewaySession
from treadle.process import guard
from treadle.process.tree import kill_tree
from treadle.rollout.session import Session
from treadle.types import Task

TERM_S = guard.TERM_S
"""Between TERM and KILL; a worker waits a little longer for the end of a session."""

GUARD_S = guard.TERM_S + guard.KILL_S
"""How long a guard may take to end a program that is cancelled."""

MAX_OUTPUT_CHARS = 20_000
"""Of standard output and of standard error, that the journal keeps: the end of each."""

MAX_BLAMED_CHARS = 300
"""Of each, that the failure of a program repeats."""


class AgentDirectory:
    """The working directory of one session; its lock says to other processes that it is in use.

    The guard of its program has the lock too: of a killed worker, the directory is free when the program has ended.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self.lock = lock

    @classmethod
    def make(cls, uid: str, sample: int, *, keep: bool) -> "AgentDirectory":
        """An empty directory, named after the sample; with another name if it is kept, or that one is in use."""
        if keep:
            return cls(Path(tempfile.mkdtemp(prefix="treadle-agent-")), None)
        name = blake2b(f"{uid}/{sample}".encode(), digest_size=8).hexdigest()
        path = Path(tempfile.gettempdir()) / f"treadle-agent-{os.getuid()}-{name}"
        lock = _lock(path.with_suffix(".lock"))
        if lock is not None:
            try:
                if path.exists():  # of a run that was killed
                    shutil.rmtree(path)
                path.mkdir(mode=0o700)
                return cls(path, lock)
            except OSError:
                os.close(lock)
        return cls(Path(tempfile.mkdtemp(prefix="treadle-agent-")), None)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            with suppress(OSError):
                self.path.with_suffix(".lock").unlink()
            os.close(self.lock)


def _lock(path: Path) -> int | None:
    """A lock on a file, held until every copy is closed; None where another worker has it.

    Waits for the program of a worker that was killed: its guard ends it.
    """
    try:
        found = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    deadline = time.monotonic() + GUARD_S
    while True:
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(found).st_ino:  # else its last owner has just removed it
                os.pwrite(found, f"{os.getpid():<20}".encode(), 0)
                return found
            break
        except BlockingIOError:
            if _worker_lives(os.pread(found, 20, 0)) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        except OSError:
            break
    os.close(found)
    return None


def _worker_lives(written: bytes) -> bool:
    """Whether the worker that has locked a directory is there; one that has yet to write its name is."""
    if not written.strip().isdigit():
        return True
    try:
        os.kill(int(written), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class AgentProgram:
    """One process under its guard, and the end of what it writes."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], directory: Path, lock: int | None = None
    ) -> None:
        self._argv = argv
        self._environment = environment
        self._directory = directory
        self._lock = lock
        self._said = b""
        """By the guard."""
        self.stdout = ""
        self.stderr = ""

    async def run(self, stdin: bytes = b"") -> int:
        """Its exit status, when all that it started has ended: TERM, then KILL, for what is left or when cancelled.

        LoopFailure where it cannot be started, and where its guard was killed.
        """
        program = sys.executable if self._argv[0] == "python" else self._argv[0]
        channel, theirs = socket.socketpair()
        channel.setblocking(False)
        passed = (theirs.fileno(),) if self._lock is None else (theirs.fileno(), self._lock)
        with channel:
            with theirs, blame(LoopFailure):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guard.__file__, f"--channel={','.join(map(str, passed))}"),
                    *(program, *self._argv[1:]),
                    stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    cwd=self._directory,
                    env=dict(self._environment),
                    start_new_session=True,
                    pass_fds=passed,
                )
            await self._wait_and_read(process, channel, stdin)
        return self._read_status()

    async def _wait_and_read(self, process: asyncio.subprocess.Process, channel: socket.socket, stdin: bytes) -> None:
        """Read what it writes until it and all that it has started have ended."""
        assert process.stdout is not None and process.stderr is not None
        if process.stdin is not None:
            process.stdin.write(stdin)
            process.stdin.close()
        ending: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._read(process.stdout, "stdout")),
            asyncio.ensure_future(self._read(process.stderr, "stderr")),
            asyncio.ensure_future(process.wait()),
        ]
        try:
            await self._hear(channel)
        except asyncio.CancelledError:
            with suppress(OSError):
                channel.send(b".")  # the guard is to end it
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(GUARD_S):
                    await self._hear(channel)
            raise
        finally:
            self._end_without_guard(process)
            await asyncio.wait(ending, timeout=TERM_S)
            for task in ending:
                task.cancel()

    async def _hear(self, channel: socket.socket) -> None:
        """What the guard says, to its end."""
        with suppress(ConnectionError):
            while piece := await asyncio.get_running_loop().sock_recv(channel, 4096):
                self._said += piece

    def _words(self) -> Mapping[str, str]:
        """What the guard has said: its last word and, before it, the program's process id."""
        lines = self._said.decode("utf-8", "replace").splitlines()
        return {word: more for word, _, more in (line.partition(" ") for line in lines)}

    def _end_without_guard(self, process: asyncio.subprocess.Process) -> None:
        """Kill what can be found of a program whose guard was killed, or is stopped, and the guard with it."""
        said = self._words()
        if not {guard.ENDED, guard.BROKEN} & said.keys():
            if guard.STARTED in said:
                kill_tree(int(said[guard.STARTED]))
            with suppress(ProcessLookupError):
                process.kill()

    def _read_status(self) -> int:
        said = self._words()
        if guard.ENDED in said:
            return int(said[guard.ENDED])
        if guard.BROKEN in said:
            raise LoopFailure(f"{self._argv[0]} cannot be started: {said[guard.BROKEN]}")
        if guard.LEFT in said:
            raise LoopFailure(f"{self._argv[0]} has left processes that do not end: {said[guard.LEFT]}")
        raise LoopFailure(f"the guard of {self._argv[0]} was killed: what the program did since is not known")

    def explain(self, status: int) -> str:
        """How it ended, with the end of what it wrote: programs complain on either stream."""
        said = [f"{name}: {text[-MAX_BLAMED_CHARS:]}" for name in ("stderr", "stdout") if (text := self._end_of(name))]
        return f"{self._argv[0]} ended with status {status}; {'; '.join(said) or 'it wrote nothing'}"

    def _end_of(self, name: str) -> str:
        return str(getattr(self, name)).strip()

    async def _read(self, stream: asyncio.StreamReader, name: str) -> None:
        while piece := await stream.read(65_536):
            kept = getattr(self, name) + piece.decode("utf-8", "replace")
            setattr(self, name, kept[-MAX_OUTPUT_CHARS:])


# --- templates

TEMPLATE_NAMES = ("base_url", "root_url", "api_key", "model", "directory", "prompt", "messages", "task")
"""What `{{name}}` may be: the address with and without /v1, the key, the model's name, the session's directory, the
text of the last user message, all messages as JSON, and fields of the task as `task.uid` or `task.extra.repository`."""

_SLOT = re.compile(r"\{\{\s*([\w.]+)\s*\}\}")


def template_problems(text: str) -> Iterator[str]:
    """What is wrong with a template."""
    for name in _SLOT.findall(text):
        first = name.split(".")[0]
        if first not in TEMPLATE_NAMES or ("." in name) != (first == "task"):
            hint = nearest(first, TEMPLATE_NAMES) or f"there are {', '.join(TEMPLATE_NAMES[:-1])}, task.FIELD"
            yield f"{{{{{name}}}}} is unknown; {hint}"


def template_values(task: Task, url: str, key: str, directory: Path) -> Mapping[str, Any]:
    users = [message["content"] for message in task.messages if message["role"] == "user"]
    return {
        "base_url": f"{url}/v1",
        "root_url": url,
        "api_key": key,
        "model": POLICY_MODEL,
        "directory": str(directory),
        "prompt": users[-1] if users else "",
        "messages": [dict(message) for message in task.messages],
        "task": {
            "uid": task.uid,
            "ground_truth": task.ground_truth,
            "data_source": task.data_source,
            "extra": dict(task.extra),
        },
    }


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The text with its slots filled; what is not text is written as JSON. LoopFailure where a task lacks a field."""

    def replace_slot(found: re.Match[str]) -> str:
        value: Any = values
        for part in found[1].split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise LoopFailure(f"the task has no {found[1]}, which the agent's config asks for")
            value = value[part]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _SLOT.sub(replace_slot, template)


def default_environment(url: str, key: str, directory: Path) -> Mapping[str, str]:
    """What SDKs and command-line agents read of their own accord."""
    return {
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": POLICY_MODEL,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": POLICY_MODEL,
        "PYTHONUNBUFFERED": "1",
    }


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class GraderProgram:
    """One grader, for all sessions of a loop."""

    def __init__(self, argv: Sequence[str], inherited: Mapping[str, str]) -> None:
        self._argv = [str(word) for word in argv]
        self._inherited = inherited

    async def run(self, session: Session, opened: GatewaySession, url: str, directory: Path) -> None:
        """Grade what an agent has left in its directory; what it posts is in `opened` then."""
        values = template_values(session.task, url, "", directory)
        home = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="treadle-grader-")
        environment = {
            **self._inherited,
            "HOME": home.name,
            "TMPDIR": home.name,
            "PYTHONUNBUFFERED": "1",
            "TREADLE_NOTES_URL": f"{url}{NOTES}",
        }
        program = AgentProgram([fill(word, values) for word in self._argv], environment, Path(home.name))
        try:
            status = await program.run(stdin=f"{opened.notes_key}\n".encode())
        except LoopFailure as failure:
            raise RewardFailure(f"the grader: {failure}") from failure
        finally:
            await asyncio.to_thread(home.cleanup)
        if status != 0:
            raise RewardFailure(f"the grader: {program.explain(status)}")

    async def run_on_files(
        self, session: Session, opened: GatewaySession, url: str, files: Mapping[str, bytes]
    ) -> None:
        """Grade files that came out of a box, in a directory that holds these alone."""
        with await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="treadle-graded-") as directory:
            await asyncio.to_thread(_write_bytes, Path(directory), files)
            await self.run(session, opened, url, Path(directory))


def _write_bytes(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
