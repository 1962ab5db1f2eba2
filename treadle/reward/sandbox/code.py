"""Code that a model wrote, run in a process of its own behind the kernel's fences: `run_python`.

    from treadle.reward.sandbox import run_python

    def score(response: str, extra: dict) -> float:
        result = run_python(response, stdin=extra["input"], timeout_s=2)
        return float(result.status == 0 and result.stdout.strip() == extra["output"])

The score is computed by the function, in a process that never runs the code: what the code can do is print. `exec` in a
reward function lets the code answer for the function.
Invariant: it returns within `timeout_s` and a little; nothing the code started is left; output is bounded.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from treadle.process.tree import kill_tree
from treadle.reward.sandbox.limits import bound_score
from treadle.sandbox.confine import apply_restrictions, enter_empty_network, usual_secrets

MAX_OUTPUT = 1 << 20
"""Bytes of standard output, and of standard error, from which the code is ended."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from treadle.reward.sandbox.code import main; main()"


_HIDDEN: list[str] = [*usual_secrets()]
"""Paths that code cannot read."""


def hide_from_code(paths: Iterable[str]) -> None:
    """Hide these paths too, from code that is run after this."""
    _HIDDEN[:] = dict.fromkeys((*_HIDDEN, *paths))


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What became of the code: `status` 0 where it ended well, negative for the signal that killed it."""

    status: int
    stdout: str
    stderr: str
    timed_out: bool = False


def run_python(source: str, stdin: str = "", timeout_s: float = 5.0, memory_mb: int = 512) -> CodeResult:
    """Run a Python program. It may read files and compute, and may not write, connect, or see the environment; nor read
    the run directory and the usual files of keys, where Landlock is to be had."""
    arguments = (json.dumps(sys.path), str(timeout_s), str(memory_mb), str(len(source.encode())), json.dumps(_HIDDEN))
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr, ended = _exchange(process, (source + stdin).encode(), time.monotonic() + timeout_s)
    finally:
        kill_tree(process.pid)
        status = process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return CodeResult(status, stdout.decode(errors="replace"), stderr.decode(errors="replace"), not ended)


def _exchange(process: subprocess.Popen[bytes], data: bytes, deadline_s: float) -> tuple[bytes, bytes, bool]:
    """Write `data`, read both outputs up to their bound; the last is False where the deadline came first."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    read: dict[int, bytearray] = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    left = memoryview(data)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as ready:
        for descriptor in read:
            ready.register(descriptor, selectors.EVENT_READ)
        ready.register(process.stdin, selectors.EVENT_WRITE)
        while any(descriptor in ready.get_map() for descriptor in read):
            events = ready.select(max(0.0, deadline_s - time.monotonic()))
            if not events and time.monotonic() >= deadline_s:
                break
            for event, _ in events:
                if event.fd not in read:
                    left = _write(event.fd, left)
                    if not left:
                        ready.unregister(process.stdin)
                        process.stdin.close()
                    continue
                piece = os.read(event.fd, 65_536)
                read[event.fd] += piece
                if not piece or len(read[event.fd]) > MAX_OUTPUT:
                    ready.unregister(event.fd)
    for found in read.values():
        if len(found) > MAX_OUTPUT:
            kill_tree(process.pid)
            del found[MAX_OUTPUT:]
    stdout, stderr = read.values()
    return bytes(stdout), bytes(stderr), _has_ended(process, deadline_s)


def _write(descriptor: int, data: memoryview) -> memoryview:
    try:
        return data[os.write(descriptor, data[:65_536]) :]
    except BrokenPipeError:
        return data[:0]


def _has_ended(process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    try:
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def main() -> None:
    """The process: put up the fences, then be the program."""
    timeout_s, memory_mb, size, hidden = float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])
    source = bytearray()
    while len(source) < size:
        source += os.read(0, size - len(source))
    enter_empty_network()
    bound_score(timeout_s, memory_mb)
    apply_restrictions(hidden)
    sys.argv[:] = ["program"]
    exec(compile(bytes(source), "<program>", "exec"), {"__name__": "__main__"})
