"""Ends of boxes that nobody stops: their starter is killed, or their start cancelled, and nothing of them is left."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.boxes import each_provider, image_of, why_not
from treadle.process.tree import list_tree
from treadle.sandbox.init.processes import pack
from treadle.sandbox.landlock import _BOOT as LANDLOCK_BOOT

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]

STARTER = """
import asyncio, sys
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import open_box

async def main() -> None:
    box = await open_box(BoxSettings(sys.argv[1], sys.argv[2] or None))
    await box.launch(["sh", "-c", "setsid sleep 1000 & touch begun; exec sleep 1000"])
    await box.exec(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"])
    print(box.home, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def started(command: list[str], **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=ROOT, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def watched(pids: list[int]) -> Iterator[dict[int, int]]:
    """A descriptor of each process, which can be read once it has ended, whatever gets its number then."""
    held: dict[int, int] = {}
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
        yield held
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def wait_for_ends(held: dict[int, int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    for pid, descriptor in held.items():
        left = max(0.0, deadline - time.monotonic())
        assert select.select([descriptor], [], [], left)[0], f"process {pid} of the box still runs"


@each_provider
def test_a_box_ends_with_the_process_that_started_it(provider):
    if why_not(provider) is not None:
        pytest.skip(f"{provider}: {why_not(provider)}")
    command = [sys.executable, "-c", STARTER, provider, image_of(provider) or ""]
    with started(command, stdout=subprocess.PIPE) as starter:
        home = starter.stdout.readline().decode().strip()
        assert home, "the box did not start"
        with watched(list_tree(starter.pid)[1:]) as held:
            assert len(held) >= 3, "init and two commands"
            starter.kill()
            wait_for_ends(held)
    if provider == "landlock":
        until(lambda: not os.path.exists(home), f"{home} is left")


def test_init_ends_its_commands_where_a_reply_finds_no_reader(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    reader, sink = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", LANDLOCK_BOOT, str(ROOT), "/usr:/bin:/lib:/lib64", str(home)]
    with started(command, stdin=subprocess.PIPE, stdout=sink) as init:
        os.close(sink)
        assert os.read(reader, 100) == pack([b"ready"])

        def run(number: bytes, script: str) -> None:
            words = [b"sh", b"-c", script.encode()]
            head = [b"exec", number, b"600000", b"1000", str(home).encode(), b"", b"3"]
            init.stdin.write(pack([*head, *words, b"PATH=/usr/bin:/bin"]))
            init.stdin.flush()

        run(b"1", "setsid sleep 1000 & exec sleep 1000")
        until(lambda: len(list_tree(init.pid)) == 3, "the command did not start")
        with watched(list_tree(init.pid)[1:]) as held:
            os.close(reader)
            run(b"2", "true")
            wait_for_ends(held)
        until(lambda: not home.exists(), f"{home} is left")
        assert init.wait(LIMIT_S) == 0
