"""Boxes of each provider: commands, files, interpreters that stay, deadlines, and failures apart from exit codes."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable

import pytest

from tests.boxes import each_provider, in_box
from treadle.config.sandbox import SandboxConfig
from treadle.errors import ConfigError, SandboxFailure
from treadle.process.tree import list_tree
from treadle.sandbox.box import InitBox
from treadle.sandbox.cgroup import BoxCgroup
from treadle.sandbox.container import DockerBox, PodmanBox
from treadle.sandbox.init.processes import pack, unpack
from treadle.sandbox.pool import BoxPool
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import check_provider


@each_provider
def test_a_command_gives_its_status_and_both_outputs(provider):
    async def work(box: InitBox) -> None:
        result = await box.exec(["sh", "-c", "cat; echo $MOOD >&2; pwd; exit 3"], stdin=b"in\n", env={"MOOD": "good"})
        assert (result.code, result.stdout, result.stderr) == (3, f"in\n{box.home}\n".encode(), b"good\n")
        assert (await box.exec(["no-such-program"])).code == 127
        assert (await box.exec(["sh", "-c", "kill -9 $$"])).code == -9
        assert (await box.exec(["sh", "-c", "yes | head -n 1"])).stdout == b"y\n"

    in_box(provider, work)


@each_provider
def test_the_same_id_runs_a_command_once(provider):
    async def work(box: InitBox) -> None:
        twice = [await box.exec(["sh", "-c", "echo x >> log; cat log"], id="first") for _ in range(2)]
        assert twice[0].stdout == twice[1].stdout == b"x\n"
        both = await asyncio.gather(*(box.exec(["sh", "-c", "echo y >> log; cat log"], id="next") for _ in range(2)))
        assert both[0].stdout == both[1].stdout == b"x\ny\n"

        for _ in range(70):
            await box.exec(["true"])
        assert (await box.exec(["sh", "-c", "echo x >> log; cat log"], id="first")).stdout == b"x\n"
        assert await box.read_file("log") == b"x\ny\n"
        with pytest.raises(ValueError, match="the id 'first' belongs to another command"):
            await box.exec(["echo", "other"], id="first")

    in_box(provider, work)


@each_provider
def test_a_command_with_an_id_ends_with_its_last_caller(provider):
    async def work(box: InitBox) -> None:
        argv = ["sh", "-c", "echo begun >> log; until [ -e go ]; do sleep 0.01; done; echo went"]
        callers = [asyncio.ensure_future(box.exec(argv, id="a")) for _ in range(2)]
        await box.exec(["sh", "-c", "until [ -e log ]; do sleep 0.01; done"])
        callers[0].cancel()
        await asyncio.wait(callers[:1])
        await box.write_file("go", b"")
        assert (await callers[1]).stdout == b"went\n"

    in_box(provider, work)


@each_provider
def test_a_long_command_is_launched_and_polled(provider):
    async def work(box: InitBox) -> None:
        name = await box.launch(["sh", "-c", "cat go; echo done"])
        assert (await box.poll(name, wait_s=30)).stdout == b"done\n"
        waiting = await box.launch(["sh", "-c", "until [ -e go ]; do sleep 0.01; done; echo went"])
        assert await box.poll(waiting) is None
        await box.write_file("go", b"")
        assert (await box.poll(waiting, wait_s=30)).stdout == b"went\n"
        assert await box.launch(["echo", "mine"], id="job") == "job"
        assert (await box.poll("job", wait_s=30)).stdout == b"mine\n"
        with pytest.raises(SandboxFailure, match="no command"):
            await box.poll("unknown")

    in_box(provider, work)


@each_provider
def test_a_late_command_is_ended_with_all_it_started(provider):
    async def work(box: InitBox) -> None:
        left = "echo begun; (setsid sh -c 'while :; do echo x >> alive; sleep 0.02; done' &) ; sleep 100"
        result = await box.exec(["sh", "-c", left], timeout_s=0.5)
        assert result.timed_out and result.stdout == b"begun\n"
        size = len(await box.read_file("alive"))
        await box.exec(["sleep", "0.2"])
        assert len(await box.read_file("alive")) == size

    in_box(provider, work)


@each_provider
def test_output_is_bounded(provider):
    async def work(box: InitBox) -> None:
        result = await box.exec(["sh", "-c", "head -c 100000 /dev/zero; head -c 5000 /dev/zero >&2"])
        assert len(result.stdout) == 1000 and len(result.stderr) == 1000 and result.dropped == 103_000

    in_box(provider, work, max_output=1000)


@each_provider
def test_files_are_written_and_read(provider):
    async def work(box: InitBox) -> None:
        data = bytes(range(256)) * 2000
        await box.write_file("a/b/data", data)
        assert await box.read_file("a/b/data") == data
        await box.write_file("run", b"#!/bin/sh\necho ran\n", executable=True)
        assert (await box.exec(["./run"])).stdout == b"ran\n"
        with pytest.raises(OSError, match="No such file"):
            await box.read_file("nothing")
        with pytest.raises(OSError, match="longer than 10"):
            await box.read_file("a/b/data", most=10)
        await box.exec(["mkfifo", "pipe"])
        assert await box.read_file("pipe") == b""

    in_box(provider, work)


@each_provider
def test_an_interpreter_that_stays_keeps_its_state(provider):
    async def work(box: InitBox) -> None:
        shell = await box.spawn(["sh", "-c", 'while read line; do eval "$line"; echo $? >&3; done'])
        await box.ask(shell, b"x=4\n")
        answer = await box.ask(shell, b"echo $x; false\n")
        assert (answer.stdout, answer.line) == (b"4\n", b"1\n")
        other = await box.exec(["sleep", "100"], timeout_s=0.1)
        assert other.timed_out
        assert (await box.ask(shell, b"echo $x\n")).stdout == b"4\n"
        assert (await box.ask(shell, b"sleep 100\n", timeout_s=0.1)).timed_out
        assert (await box.ask(shell, b"echo $x\n")).code == 126

    in_box(provider, work)


@each_provider
def test_a_snapshot_restores_the_files(provider):
    async def first(box: InitBox) -> bytes:
        await box.write_file("deep/file", b"kept")
        return await box.snapshot()

    saved = in_box(provider, first)

    async def second(box: InitBox) -> bytes:
        await box.restore(saved)
        return await box.read_file("deep/file")

    assert in_box(provider, second) == b"kept"


@each_provider
def test_a_snapshot_is_whole_or_an_error(provider):
    async def work(box: InitBox) -> None:
        await box.exec(["sh", "-c", "head -c 20000000 /dev/urandom > a; cp a b"])
        assert len(await box.snapshot()) > 40_000_000
        await box.exec(["sh", "-c", "mkdir locked; chmod 0 a"])
        if (await box.exec(["cat", "a"])).code != 0:
            with pytest.raises(OSError, match=r"cannot be packed: .*a"):
                await box.snapshot()

    in_box(provider, work, disk_mb=48)


def ungrouped(monkeypatch) -> None:
    """As for a user to whom no control group is delegated."""
    monkeypatch.setattr(BoxCgroup, "create", classmethod(lambda cls, settings: (None, ("none",))))


async def wait_until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110  processes of a box send no event
            await asyncio.sleep(0.05)


@each_provider
def test_limits_hold_for_what_is_left_in_the_background(provider, monkeypatch):
    ungrouped(monkeypatch)

    async def work(box: InitBox) -> None:
        started = "(until [ -e go ]; do sleep 0.1; done; for i in $(seq 60); do sleep 500 & done; touch all; wait)"
        await box.exec(["sh", "-c", f"{started} > /dev/null 2>&1 & echo started"])
        await box.write_file("go", b"")
        await wait_until(lambda: len(list_tree(box._process.pid)) > 20)
        await wait_until(lambda: len(list_tree(box._process.pid)) < 4)
        told = await box.exec(["echo", "works"])
        assert told.stdout == b"works\n"
        assert b"all processes of the box were ended: " in told.stderr and b"processes, and 16 may run" in told.stderr

    in_box(provider, work, processes=16)


def test_a_box_with_too_many_files_can_be_emptied():
    async def work(box: InitBox) -> None:
        fill = "for i in 1 2 3 4 5 6; do head -c 8000000 /dev/zero > f$i; done; sleep 50"
        filled = await box.exec(["sh", "-c", fill])
        assert filled.code == -9 and b"MB of files, and 16 may be written" in filled.stderr
        refused = await box.exec(["sh", "-c", "echo more > more"])
        assert refused.code != 0 and await box.read_file("more") == b""
        with pytest.raises(OSError, match="File too large"):
            await box.write_file("host", b"data")
        shell = await box.spawn(["sh", "-c", 'while read line; do eval "$line"; echo $? >&3; done'])
        assert (await box.ask(shell, b"cat more; rm f*\n")).line == b"0\n"
        assert (await box.exec(["sh", "-c", "echo more > more; cat more"])).stdout == b"more\n"

    in_box("landlock", work, disk_mb=16)


DIG = """
import os, sys
for at in range(int(sys.argv[1])):
    os.mkdir("d")
    os.chdir("d")
with open("bottom", "wb") as file:
    file.write(bytes(int(sys.argv[2])))
"""


def test_folders_in_folders_end_no_box_and_are_removed_with_it():
    homes = []

    async def work(box: InitBox) -> None:
        homes.append(box.home)
        assert (await box.exec(["python3", "-c", DIG, "1100", "0"], timeout_s=600)).code == 0
        assert (await box.exec(["sh", "-c", "mkdir -m 0 shut; echo works"])).text == "works\n"

    in_box("landlock", work)
    assert not os.path.exists(homes[0])


def test_folders_too_deep_to_be_counted_are_too_many_files():
    async def work(box: InitBox) -> None:
        await box.exec(["python3", "-c", DIG, "2100", "20000000"], timeout_s=600)
        refused = await box.exec(["sh", "-c", "echo more > more"])
        assert refused.code != 0 and await box.read_file("more") == b""
        await box.exec(["rm", "-r", "d"], timeout_s=600)  # ended as soon as there is room
        assert (await box.exec(["sh", "-c", "echo more > more; cat more"])).stdout == b"more\n"

    in_box("landlock", work, disk_mb=16)


@each_provider
def test_a_box_without_room_for_a_process_says_so(provider):
    async def work(box: InitBox) -> None:
        shell = await box.spawn(["sh", "-c", 'while read line; do eval "$line"; echo $? >&3; done'])
        hold = "import subprocess, time\nwhile True:\n    try: subprocess.Popen(['sleep', '500'])\n"
        hold += "    except OSError: time.sleep(0.01)"
        await box.write_file("hold.py", hold.encode())
        await box.ask(shell, b"python3 hold.py > /dev/null 2>&1 &\n")
        if box._cgroup is None:
            pytest.skip("needs a control group")
        async with asyncio.timeout(60):
            while (full := await box.exec(["true"])).code == 0:  # noqa: ASYNC110  processes of a box send no event
                await asyncio.sleep(0.05)
        assert full.code == 126 and b"cannot start a process" in full.stderr
        with pytest.raises(OSError, match="python3 did not start: the box cannot start a process"):
            await box.spawn(["python3"])
        await box.ask(shell, b"exit\n")  # what it left is init's now, and gives way
        await box.launch(["sleep", "500"])
        room = await box.exec(["echo", "room"])
        assert room.stdout == b"room\n" and room.stderr.startswith(b"\nprocesses in the background were ended")

    in_box(provider, work, processes=12)


@each_provider
def test_a_box_that_dies_is_a_failure_and_no_exit_code(provider):
    async def work(box: InitBox) -> None:
        running = asyncio.ensure_future(box.exec(["sleep", "100"]))
        await box.exec(["true"])
        box._process.kill()
        with pytest.raises(SandboxFailure, match=f"a {provider} box ended"):
            await running
        with pytest.raises(SandboxFailure):
            await box.exec(["true"])

    in_box(provider, work)


@each_provider
def test_a_cancelled_call_ends_its_command(provider):
    async def work(box: InitBox) -> None:
        loop = "while :; do echo x >> alive; sleep 0.01; done"
        running = asyncio.ensure_future(box.exec(["sh", "-c", loop]))
        await box.exec(["sh", "-c", "until [ -e alive ]; do sleep 0.01; done"])
        running.cancel()
        await asyncio.wait({running})
        await box.exec(["true"])
        size = len(await box.read_file("alive"))
        await box.exec(["sleep", "0.1"])
        assert len(await box.read_file("alive")) == size

    in_box(provider, work)


@each_provider
def test_warm_boxes_are_taken_once(provider):
    async def run(_: InitBox) -> None:
        pool = BoxPool(BoxSettings(provider), warm=2)
        first, second = await pool.take(), await pool.take()
        await first.write_file("mine", b"")
        assert (await second.exec(["ls"])).stdout == b""
        await first.stop()
        await second.stop()
        await pool.close()
        with pytest.raises(SandboxFailure, match="closed"):
            await pool.take()

    in_box(provider, run)


@each_provider
def test_a_warm_box_that_ended_meanwhile_is_not_given_away(provider):
    async def run(_: InitBox) -> None:
        pool = BoxPool(BoxSettings(provider), warm=1)
        waiting = await pool._warm[0]
        assert isinstance(waiting, InitBox) and waiting.alive
        os.kill(waiting._process.pid, signal.SIGKILL)
        await waiting._process.wait()
        box = await pool.take()
        assert box is not waiting and (await box.exec(["true"])).code == 0
        await box.stop()
        await pool.close()

    in_box(provider, run)


class Stopped:
    """As much of a box as a pool needs."""

    alive = True

    async def stop(self) -> None:
        self.alive = False


def test_a_warm_box_that_did_not_start_is_started_anew(monkeypatch):
    opened: list[Stopped] = []

    async def open_box(settings: BoxSettings) -> Stopped:
        opened.append(Stopped())
        if len(opened) == 1:
            raise SandboxFailure("no room just now")
        return opened[-1]

    async def run() -> Stopped:
        pool = BoxPool(BoxSettings(), warm=1)
        box = await pool.take()
        await pool.close()
        return box

    monkeypatch.setattr("treadle.sandbox.pool.open_box", open_box)
    box = asyncio.run(run())
    assert [one is box for one in opened] == [False, False, True], "failed, warm in its place, and the taker's own"
    assert [one.alive for one in opened[1:]] == [False, True]


def test_a_box_that_is_waited_for_is_stopped_with_the_pool(monkeypatch):
    async def run() -> None:
        let_start = asyncio.Event()
        box = Stopped()

        async def open_box(settings: BoxSettings) -> Stopped:
            await let_start.wait()
            return box

        monkeypatch.setattr("treadle.sandbox.pool.open_box", open_box)
        pool = BoxPool(BoxSettings(), warm=1)
        pool._num_warm = 0  # nothing in place of what is taken
        taking = asyncio.ensure_future(pool.take())
        await asyncio.sleep(0)
        await pool.close()
        taking.cancel()
        let_start.set()
        await asyncio.wait({taking})
        assert not box.alive

    asyncio.run(run())


@pytest.mark.skipif(shutil.which("podman") is None, reason="needs podman")
def test_isolation_that_cannot_be_had_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"rollout.sandbox.provider: podman cannot be had: .*no-such-image"):
        check_provider("rollout.sandbox", SandboxConfig(provider="podman", image="localhost/no-such-image:0"))


def test_a_container_engine_that_is_not_installed_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"rollout.sandbox.provider: podman cannot be had: podman is not installed"):
        check_provider("rollout.sandbox", SandboxConfig(provider="podman", image="localhost/of-no-engine:0"))


@pytest.mark.parametrize("kind", [PodmanBox, DockerBox])
def test_containers_have_no_network_no_capabilities_and_limits(kind, monkeypatch, tmp_path):
    program = tmp_path / kind.program
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = kind(BoxSettings(kind.provider, "an-image", memory_mb=100, disk_mb=10, processes=20)).command()
    joined = " ".join(command)
    for words in ("--network none", "--cap-drop ALL", "--read-only", "no-new-privileges", "--pids-limit 24"):
        assert words in joined
    assert (
        "--memory 110m --memory-swap 110m" in joined
        and "size=9m" in joined
        and "--shm-size 1m" in joined
        and "seccomp=" in joined
        and "--pull never" in joined
    )
    assert "nproc" not in joined, (
        "it counts every process of that user on the machine, and --pids-limit those of the box"
    )
    assert ("--read-only-tmpfs=false" in command) is (kind is PodmanBox), "podman's --read-only leaves /tmp writable"
    assert joined.index("--entrypoint python3") < joined.index(" an-image -I -S -c ")


def test_messages_are_read_as_they_were_written():
    fields = [b"done", b"", b"\x00" * 300, "ä".encode()]
    assert unpack(pack(fields)[4:]) == fields
    with pytest.raises(ValueError, match="longer"):
        unpack(b"\x00\x00\x00\x09ab")
