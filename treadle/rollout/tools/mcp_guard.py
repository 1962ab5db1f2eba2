"""Guard of an MCP server over standard input and output: a small process around it, and around what it starts.

Owns the server's process group. When the server ends, or the run does, however it ends, everything in the group is
killed, and so is what left it (`setsid`): on Linux orphans come to the guard. So a helper that a server has started
does not outlive it. Standard input, output and error are the server's.
Run by its path, without our package: it starts in milliseconds.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_ROUNDS = 100


def _end_group(number: int = 0, frame: FrameType | None = None) -> None:
    for _ in range(_MAX_ROUNDS):  # the children of what is killed come here
        children = _children()
        for child in children:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        if not children:
            break
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _children() -> list[int]:
    """Direct children, adopted ones too; none where the system does not tell."""
    pid = os.getpid()
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _pass(number: int, frame: FrameType | None) -> None:
    """The server has this signal, too, and may end in order."""


def guard(command: list[str]) -> int:
    """Run the command as the leader of a group of its own, to its end and that of the group."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _pass)
    signal.signal(signal.SIGUSR1, _end_group)
    parent = os.getppid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() == parent:  # else it has ended before we asked to hear of it
        try:
            subprocess.call(command)
        except OSError as error:
            sys.stderr.write(f"{command[0]}: {error.strerror}\n")
            return 127
    _end_group()
    return 0


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
