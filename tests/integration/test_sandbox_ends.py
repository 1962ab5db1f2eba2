"""Ends of boxes that nobody stops: their starter is killed, or their start cancelled, and nothing of them is left."""

import asyncio
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.boxes import each_provider, image_of, why_not
from treadle.process.tree import list_children, list_tree
from treadle.sandbox.bridge import UnixBridge
from treadle.sandbox.cgroup import ROOT as GROUPS
from treadle.sandbox.container import PodmanBox
from treadle.sandbox.init.processes import pack
from treadle.sandbox.landlock import _BOOT as LANDLOCK_BOOT
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import open_box

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


def left_over(folder: Path) -> list[str]:
    """What boxes of this process leave: processes, groups, folders for sockets and files, and descriptors."""
    groups = [str(path) for path in GROUPS.rglob(f"treadle-box-{os.getpid()}-*")]
    children = [f"process {pid}" for pid in list_children(os.getpid())]
    return [*groups, *children, *map(str, folder.iterdir())]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@each_provider
def test_a_start_that_is_cancelled_leaves_nothing(provider, monkeypatch, tmp_path):
    if why_not(provider) is not None:
        pytest.skip(f"{provider}: {why_not(provider)}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = BoxSettings(provider, image=image_of(provider))
    if provider == "bubblewrap":
        settings = replace(settings, egress=("pypi.org",))

    async def cancel_starts() -> None:
        began = time.monotonic()
        box = await open_box(settings)
        whole_s = time.monotonic() - began
        await box.stop()
        before, at_rest = num_descriptors(), left_over(tmp_path)
        assert not at_rest
        for at in range(24):
            starting = asyncio.ensure_future(open_box(settings))
            await asyncio.wait({starting}, timeout=whole_s * at / 20)
            starting.cancel()
            await asyncio.sleep(0)
            starting.cancel()  # as a second Ctrl-C does
            await asyncio.wait({starting})
            if not starting.cancelled():
                await starting.result().stop()
        assert not left_over(tmp_path)
        async with asyncio.timeout(LIMIT_S):
            while num_descriptors() > before:  # noqa: ASYNC110  a transport that closes sends no event
                await asyncio.sleep(0.01)

    asyncio.run(cancel_starts())


@each_provider
def test_a_stop_that_is_cancelled_stops_the_box(provider):
    if why_not(provider) is not None:
        pytest.skip(f"{provider}: {why_not(provider)}")

    async def run() -> None:
        box = await open_box(BoxSettings(provider, image=image_of(provider)))
        await box.launch(["sleep", "1000"])
        stopping = asyncio.ensure_future(box.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})
        assert not list_children(os.getpid())

    asyncio.run(run())


def test_a_bridge_whose_start_is_cancelled_is_closed_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run() -> None:
        await asyncio.to_thread(int)  # the threads that are there anyway
        before = num_descriptors()
        for turns in range(12):
            bridge = UnixBridge("127.0.0.1", 9)
            starting = asyncio.ensure_future(bridge.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait({starting})
            await bridge.close()
        assert num_descriptors() == before and not list(tmp_path.iterdir())

    asyncio.run(run())


ENGINE = """#!/bin/sh
echo "$1" >> "$0.log"
[ "$1" = run ] && exec sleep 1000
exit 0
"""


def test_a_container_whose_start_is_cancelled_is_removed_with_its_client(monkeypatch, tmp_path):
    program, asked = tmp_path / "podman", tmp_path / "podman.log"
    program.write_text(ENGINE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    async def run() -> None:
        starting = asyncio.ensure_future(PodmanBox(BoxSettings("podman", "an-image")).start())
        async with asyncio.timeout(LIMIT_S):
            while not asked.exists():  # noqa: ASYNC110  the program sends no event
                await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled() and not list_children(os.getpid())

    asyncio.run(run())
    assert asked.read_text().split() == ["run", "rm", "rm"], "before its client ended, and what that made after it"
