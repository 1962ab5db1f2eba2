"""Agent program: one process for one session, the directory it works in, and what it is told of its task.

Owns the directory's name, the start and the end of the process with all it started, the end of what it writes, and the
templates of its command line, environment and files. Knows no session and no HTTP.
Invariant: the same sample of the same task has the same directory in every start of a run, so that an agent which shows
its directory to the model asks after a crash what it asked before; two programs never share one.
Waits: for the process; ended from outside, its group gets TERM, and KILL `TERM_S` later.
"""

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from treadle.errors import LoopFailure, blame, nearest
from treadle.gateway.request import POLICY_MODEL
from treadle.process.tree import kill_group_at_close
from treadle.types import Task

TERM_S = 2.0
"""Between TERM and KILL; a worker waits a little longer for the end of a session."""

MAX_OUTPUT_CHARS = 20_000
"""Of standard output and of standard error, that the journal keeps: the end of each."""

MAX_BLAMED_CHARS = 300
"""Of each, that the failure of a program repeats."""


class AgentDirectory:
    """The working directory of one session; its lock says to other processes that it is in use."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock

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
        if self._lock is not None:
            with suppress(OSError):
                self.path.with_suffix(".lock").unlink()
            os.close(self._lock)


def _lock(path: Path) -> int | None:
    """A lock on a file, held until it is closed or its process ends; None where another has it."""
    try:
        found = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(found).st_ino:  # else its last owner has just removed it
            return found
    except OSError:
        pass
    os.close(found)
    return None


class AgentProgram:
    """One process, in a group of its own, and the end of what it writes."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
        self._argv = argv
        self._environment = environment
        self._directory = directory
        self.stdout = ""
        self.stderr = ""

    async def run(self) -> int:
        """Its exit status. Cancelled, or when it has ended, its whole group is ended: TERM, then KILL."""
        program = sys.executable if self._argv[0] == "python" else self._argv[0]
        theirs, lifeline = os.pipe()
        try:
            with blame(LoopFailure):
                process = await asyncio.create_subprocess_exec(
                    program,
                    *self._argv[1:],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    cwd=self._directory,
                    env=dict(self._environment),
                    start_new_session=True,
                    pass_fds=(theirs,),
                )
            kill_group_at_close(theirs, process.pid)
            return await self._wait_and_read(process)
        finally:
            os.close(theirs)
            os.close(lifeline)

    async def _wait_and_read(self, process: asyncio.subprocess.Process) -> int:
        """Read what it writes until it ends; then end what it has started."""
        assert process.stdout is not None and process.stderr is not None
        reading = [asyncio.ensure_future(self._read(process.stdout, "stdout"))]
        reading.append(asyncio.ensure_future(self._read(process.stderr, "stderr")))
        try:
            return await process.wait()
        finally:
            await self._end(process)
            await asyncio.wait(reading, timeout=TERM_S)
            for task in reading:
                task.cancel()

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

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End the group. What the program left running is its own no more."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(TERM_S):
                await process.wait()
                while _group_lives(process.pid):  # noqa: ASYNC110  the system tells of no group's end
                    await asyncio.sleep(0.05)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


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
        path.write_text(text)
