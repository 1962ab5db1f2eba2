"""Loops, tools, environments and rewards that misbehave, each in one way that its name says."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from treadle.rollout.agent_loop import AgentLoopBase
from treadle.rollout.environment import Reply
from treadle.rollout.session import Session
from treadle.rollout.tools import tool
from treadle.types import ToolResult


def _cancel_current() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def _raise(error: BaseException) -> None:
    raise error


DEEDS = {
    "exit": lambda: sys.exit(0),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "cancelled": lambda: _raise(asyncio.CancelledError()),
    "cancel_task": _cancel_current,
    "base_exception": lambda: _raise(BaseException("nobody catches me")),
}
"""By name; `cancel_task` needs the event loop."""

PLAIN = [name for name in DEEDS if name != "cancel_task"]


class HostileLoop(AgentLoopBase):
    def __init__(self, rollout: Any, deed: str = "exit") -> None:
        super().__init__(rollout)
        self.deed = deed

    async def run(self, session: Session) -> None:
        await session.generate()
        if session.task.uid == "task1":
            DEEDS[self.deed]()
            await asyncio.sleep(0)


class ExitsInATask(AgentLoopBase):
    """Whoever starts tasks of their own gets no shelter from us; the event loop must live on all the same."""

    async def run(self, session: Session) -> None:
        await session.generate()
        if session.task.uid == "task1":
            await asyncio.create_task(_exit_later())


async def _exit_later() -> None:
    await asyncio.sleep(0)
    sys.exit(0)


class SwallowsCancellation(AgentLoopBase):
    async def run(self, session: Session) -> None:
        await session.generate()
        while session.task.uid == "task1":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                continue


async def hostile_tool(deed: str) -> str:
    """Does a deed.

    Args:
        deed: which
    """
    DEEDS[deed]()
    await asyncio.sleep(0)
    return "did it"


def hostile_plain_tool(deed: str) -> str:
    """Does a deed in a thread.

    Args:
        deed: which
    """
    DEEDS[deed]()
    return "did it"


@tool
async def harmless(text: str) -> str:
    """Says what it was told.

    Args:
        text: what
    """
    await asyncio.sleep(0)
    return text


class HostileEnvironment:
    def __init__(self, task: Any, deed: str = "exit", at: str = "step") -> None:
        self.deed, self.at, self.uid = deed, at, task.uid
        self._do("open")

    def _do(self, at: str) -> None:
        if self.uid == "task1" and self.at == at:
            DEEDS[self.deed]()

    def step(self, messages: Any) -> Reply:
        self._do("step")
        return Reply()

    def close(self) -> None:
        self._do("close")


class HostileAsyncEnvironment:
    def __init__(self, task: Any, deed: str = "exit") -> None:
        self.deed, self.uid = deed, task.uid

    async def step(self, messages: Any) -> Reply:
        if self.uid == "task1":
            DEEDS[self.deed]()
            await asyncio.sleep(0)
        return Reply()


class Meeting:
    """Its steps end only when as many run at once as meet."""

    barrier = threading.Barrier(16)

    def __init__(self, task: Any) -> None:
        Meeting.barrier.wait(60)

    def step(self, messages: Any) -> Reply:
        Meeting.barrier.wait(60)
        return Reply("go on" if len(messages) < 3 else None)

    def close(self) -> None:
        Meeting.barrier.wait(60)


class HangsOnce:
    """Hangs in its first step ever, then works."""

    hung = threading.Event()
    release = threading.Event()

    def __init__(self, task: Any) -> None:
        pass

    def step(self, messages: Any) -> Reply:
        if not HangsOnce.hung.is_set():
            HangsOnce.hung.set()
            HangsOnce.release.wait(600)
        return Reply(reward=1.0)


async def hostile_reward(task: Any, deed: str) -> float:
    if task.uid == "task1":
        DEEDS[deed]()
        await asyncio.sleep(0)
    return 1.0


CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


def hold_the_interpreter(text: str) -> str:
    """Matches an expression that takes for ever, in C code that never lets go.

    Args:
        text: what
    """
    if text == "task1":
        re.match(r"(a+)+$", "a" * 60 + "b")
    return text


async def hold_asynchronously(text: str) -> str:
    """Matches the same expression, and awaits nothing.

    Args:
        text: what
    """
    return hold_the_interpreter(text)


class HoldsTheInterpreter(AgentLoopBase):
    async def run(self, session: Session) -> None:
        await session.generate()
        hold_the_interpreter(session.task.uid)


async def start_child_asynchronously(text: str) -> str:
    """Starts a process, in a session of its own, and forgets it.

    Args:
        text: what
    """
    child = await asyncio.create_subprocess_exec("sleep", "611", start_new_session=True)
    return str(child.pid)


def leave(text: str) -> str:
    """Ends the process, as if all were well.

    Args:
        text: what
    """
    if text == "task1":
        os._exit(0)
    return text


def start_child(text: str) -> str:
    """Starts a process that outlives it, in a session of its own.

    Args:
        text: what
    """
    child = "subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3)"
    script = f"import subprocess; print({child}.pid)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout


def wait_long(text: str) -> str:
    """Waits.

    Args:
        text: what
    """
    time.sleep(4)
    return text


def whose(text: str) -> str:
    """Who called.

    Args:
        text: what
    """
    return CALLER.get()


class DiesThenDiesWhileStarting(AgentLoopBase):
    """Kills its process once, and the next one before it has started."""

    def __init__(self, rollout: Any, folder: str) -> None:
        super().__init__(rollout)
        self.folder = Path(folder)

    async def run(self, session: Session) -> None:
        await session.generate()
        if not (self.folder / "died").exists():
            (self.folder / "died").touch()
            (self.folder / "die_at_start").touch()
            os.kill(os.getpid(), signal.SIGKILL)


FORGERY = "TREADLE_TEST_FORGERY"
"""A file with the bytes that `forge` writes; it removes the file, so that it happens once."""


def forge(text: str) -> str:
    """Write foreign bytes to every socket that this process has.

    Args:
        text: the task's uid
    """
    path = Path(os.environ[FORGERY])
    if text == "task1" and path.exists():
        data = path.read_bytes()
        path.unlink()
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                    os.write(int(descriptor), data)
            except OSError:
                continue
        time.sleep(60)
    return "did it"


class UnsendableLoop(AgentLoopBase):
    """Keeps something that only Python can hold."""

    async def run(self, session: Session) -> None:
        await session.generate()
        session.extra["what"] = object() if session.task.uid == "task1" else {"numbers": (1, 2.5)}


class TakesOurNames(AgentLoopBase):
    """Gives task 1 what only sessions may give: an extra value by the name of one of ours, or a reward of no number."""

    def __init__(self, rollout: Any, name: str = "", reward: Any = None) -> None:
        super().__init__(rollout)
        self.name, self.reward = name, reward

    async def run(self, session: Session) -> None:
        await session.generate()
        if session.task.uid == "task1":
            if self.name:
                session.extra[self.name] = "mine"
            session.score_turn(self.reward)


def rewards_nothing(text: str) -> ToolResult:
    """A tool that gives no number.

    Args:
        text: the task's uid
    """
    return ToolResult("done", reward=float("nan") if text == "task1" else 0.5)


async def hostile_parser(text: str, task: Any) -> float:
    """Reads a judge's answer; does what the text says about task 1."""
    if task.uid == "task1":
        DEEDS[text]()
        await asyncio.sleep(0)
    return 1.0


def parser_that_holds(text: str, task: Any) -> float:
    """Never gives the interpreter back."""
    while task.uid == "task1":
        pass
    return 1.0
