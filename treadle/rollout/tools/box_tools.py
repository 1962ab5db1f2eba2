"""Tools in a box: `python`, `bash`, `edit` and `submit`, which share one sandbox for each session.

    rollout: {multi_turn: {tools: [python, bash, edit, submit]}, sandbox: {memory_mb: 512}}

A row lays files into its box, and may run a command there before the first call:

    {"prompt": "Fix add.", "tool_kwargs": {"box": {"files": {"add.py": "def add(a, b): …"}, "setup": "git init -q"}}}

Owns what a model reads of a command. An exit status is an observation, and so is a file that cannot be written and a
box that is full of files or processes; a box that breaks is a ToolFailure.
Invariant: a session has one interpreter and one shell, whose state lasts until the session ends or a call is late.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from treadle.config.rollout import BOX_TOOLS
from treadle.config.sandbox import SandboxConfig
from treadle.errors import SandboxFailure, ToolFailure
from treadle.rollout.tools.function import FunctionTool, tool
from treadle.sandbox.egress import count_refused
from treadle.sandbox.pool import BoxPool
from treadle.sandbox.protocol import BoxSettings, ExecResult, Sandbox
from treadle.types import ToolResult, ToolStatus

MAX_FILE = 1 << 20
BOX = "box"
"""The name under which a row's `tool_kwargs` has the files and the setup of its box."""

_PYTHON = r"""
import ast, os, sys, traceback
source, done, scope = os.fdopen(os.dup(0), "rb"), os.dup(3), {"__name__": "__main__"}
os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.close(3), sys.path.insert(0, "")
while head := source.readline():
    number, size = map(int, head.split())
    status = 1
    try:
        tree = ast.parse(source.read(size).decode())
        last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<call>", "exec"), scope)
        value = eval(compile(last, "<call>", "eval"), scope) if last else None
        if value is not None:
            print(repr(value))
        status = 0
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    sys.stdout.flush(), sys.stderr.flush()
    os.write(done, b"%d %d\n" % (number, status))
"""

_BASH = r"""
while IFS= read -r __number && IFS= read -r -d '' __command; do
    eval "$__command" </dev/null 2>&1 3>&-
    printf '%s %s\n' "$__number" "$?" >&3
done
"""


class BoxTools:
    """The tools of one session; `of` gives the class of a rollout, whose instances take boxes from a pool."""

    pool: ClassVar[BoxPool]
    timeout_s: ClassVar[float] = 60.0

    @classmethod
    def of(cls, sandbox: SandboxConfig, tool_timeout_s: float) -> "type[BoxTools]":
        """A class whose boxes have these settings. A command ends a little before its call does, to be read."""
        pool = BoxPool(BoxSettings.of(sandbox), sandbox.warm)
        return type(BOX, (cls,), {"pool": pool, "timeout_s": min(sandbox.timeout_s, 0.9 * tool_timeout_s)})

    def __init__(self, files: Mapping[str, str] | None = None, setup: str = "") -> None:
        self._files, self._setup = dict(files or {}), setup
        self._box: Sandbox | None = None
        self._processes: dict[str, str] = {}
        self._calls = itertools.count(1)

    async def open(self) -> None:
        try:
            self._box = await self.pool.take()
        except SandboxFailure as failure:
            raise ToolFailure(f"no box: {failure}") from failure
        await self._lay_out(self._box)

    async def _lay_out(self, box: Sandbox) -> None:
        """Write the task's files and run its setup; what goes wrong is a mistake in the task, and fails it."""
        try:
            for path, text in self._files.items():
                if Path(path).is_absolute() or ".." in Path(path).parts:
                    raise ToolFailure(f"tool_kwargs.{BOX}.files: {path!r} is not a path inside the box")
                await box.write_file(path, text.encode())
            if self._setup:
                done = await box.exec(["bash", "-c", self._setup], timeout_s=self.timeout_s)
                if done.code != 0 or done.timed_out:
                    how = "took too long" if done.timed_out else f"ended with {done.code}"
                    raise ToolFailure(f"tool_kwargs.{BOX}.setup {how}: {done.text.strip()[-500:]}")
        except SandboxFailure as failure:
            raise ToolFailure(f"no box: {failure}") from failure
        except (OSError, AttributeError, ValueError) as error:
            raise ToolFailure(f"tool_kwargs.{BOX}.files: {error}") from error

    async def close(self) -> None:
        if self._box is not None:
            await self._box.stop()

    @tool
    async def python(self, code: str) -> ToolResult:
        """Run Python code. Variables stay for the next call; the value of a last expression is printed.

        Args:
            code: the code.
        """
        data, number = code.encode(errors="replace"), next(self._calls)
        sent = b"%d %d\n%b" % (number, len(data), data)
        return await self._ask("python", ["python3", "-I", "-c", _PYTHON], number, sent)

    @tool
    async def bash(self, command: str) -> ToolResult:
        """Run a command in a shell. Its directory and variables stay for the next call.

        Args:
            command: the command, of one or more lines.
        """
        data, number = command.replace("\0", "").encode(errors="replace"), next(self._calls)
        argv = ["bash", "--norc", "--noprofile", "-c", _BASH]
        return await self._ask("bash", argv, number, b"%d\n%b\0" % (number, data))

    @tool
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace text in a file, or write a new file where `old` is empty.

        Args:
            path: the file.
            old: text that occurs in it exactly once; empty for a new file.
            new: what it becomes.
        """
        with _seen_by_the_model("edit"):
            box = self._started()
            if not old:
                await box.write_file(_valid(path), new.encode(errors="replace"))
                return f"wrote {path}"
            text = (await box.read_file(_valid(path), MAX_FILE)).decode()
            if text.count(old) != 1:
                raise ValueError(f"{path} has the text {text.count(old)} times, not once")
            await box.write_file(path, text.replace(old, new).encode(errors="replace"))
            return f"changed {path}"

    @tool
    async def submit(self, files: list[str]) -> ToolResult:
        """Hand in files and end the task.

        Args:
            files: the files that hold the result.
        """
        with _seen_by_the_model("submit"):
            found = {path: (await self._started().read_file(_valid(path), MAX_FILE)).decode() for path in files}
        return ToolResult(f"submitted {', '.join(files) or 'nothing'}", extra={"submitted": True, "files": found})

    def _started(self) -> Sandbox:
        assert self._box is not None, "a session opens its tools before it calls one"
        return self._box

    async def _ask(self, name: str, argv: list[str], number: int, data: bytes) -> ToolResult:
        """What an interpreter that stays makes of this; one that ended is started anew at the next call.

        It ends its answer with the call's number and a status. A line without that is the model's: it found the
        descriptor, and nothing that follows on it could be trusted to belong to its call.
        """
        with _seen_by_the_model(name):
            box = self._started()
            if name not in self._processes:
                self._processes[name] = await box.spawn(argv)
            process = self._processes[name]
            before = count_refused(box)
            result = await box.ask(process, data, self.timeout_s)
            extra = _asked_in_vain(before, count_refused(box))
            found, _, status = result.line.partition(b" ")
            if found != b"%d" % number or not status.strip().isdigit():
                del self._processes[name]
                await box.end(process)
                return replace(_broken_off(name, result, self.timeout_s), extra=extra)
            return replace(_to_result(name, result, int(status)), extra=extra)


@contextmanager
def _seen_by_the_model(name: str) -> Iterator[None]:
    """What a box refuses is for the model to read; a box that breaks fails the call."""
    try:
        yield
    except SandboxFailure as failure:
        raise ToolFailure(f"{name}: {failure}") from failure
    except OSError as error:
        hint = "; end what runs in the background first" if "cannot start a process" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is no text: {error}") from None


def _asked_in_vain(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """What a call was refused of the network, for the trajectory's record."""
    more = {target: count - before.get(target, 0) for target, count in after.items() if count != before.get(target, 0)}
    return {"egress_refused": more} if more else {}


def _valid(path: str) -> str:
    """A path that a file can have."""
    if "\0" in path:
        raise ValueError("a path has no NUL")
    return path.encode(errors="replace").decode()


def _broken_off(name: str, result: ExecResult, timeout_s: float) -> ToolResult:
    """The result of a call that its interpreter did not end as it should."""
    text = _read_text(result)
    if result.timed_out:
        return ToolResult(f"{text}\n[ended after {timeout_s:g} s; {name} starts anew]".lstrip(), ToolStatus.TIMEOUT)
    how = f"was ended: the code wrote to a descriptor of {name}'s own" if result.line else f"ended with {result.code}"
    return ToolResult(f"{text}\n[{name} {how}, and starts anew]".lstrip(), ToolStatus.ERROR)


def _read_text(result: ExecResult) -> str:
    text = result.text.removesuffix("\n")
    return f"{text}\n[{result.dropped} bytes cut]" if result.dropped else text


def _to_result(name: str, result: ExecResult, status: int) -> ToolResult:
    text = _read_text(result)
    if status and name == "bash":
        text += f"\n[exit status {status}]"
    return ToolResult(text.lstrip("\n") if not text.strip() else text, ToolStatus.ERROR if status else ToolStatus.OK)


def load_box_tools(names: list[str], owner: type[BoxTools]) -> list[FunctionTool]:
    """The tools of these names, which share a session's box."""
    return [FunctionTool.of_method(owner, name, f"treadle's {name}") for name in BOX_TOOLS if name in names]
