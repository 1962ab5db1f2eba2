"""Processes that work for this one: requests and replies, starts that fail, ends of both sides, restarts."""

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from treadle.errors import DeadlineError, EngineFailure, RunError
from treadle.process import child_handle
from treadle.process.channel import Channel, ChannelClosed
from treadle.process.child_handle import DiedWhileStarting, ProcessSpec
from treadle.process.launcher import BlockingLaunch, LocalProcess, SubprocessLauncher
from treadle.process.rpc import RpcCancel, RpcPeer, RpcReply, RpcRequest
from treadle.process.supervisor import RestartFailed, RestartPolicy, Supervisor, restart, restart_blocking

START_S = 60.0


def spec(serve: str = "serve_echo", setup: object = None, **fields) -> ProcessSpec:
    return ProcessSpec("helper", f"tests.process_children:{serve}", setup, **{"start_timeout_s": START_S, **fields})


async def refuse(body: object) -> object:
    raise AssertionError(f"it asks nothing: {body}")


async def launch(**fields) -> LocalProcess:
    return await SubprocessLauncher().launch(spec(**fields), refuse)


def play(body) -> None:
    asyncio.run(asyncio.wait_for(body, 120))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_answers_fails_and_ends():
    async def main() -> None:
        process = await launch(setup=[1, 2])
        assert process.started == {"setup": [1, 2], "pid": process.pid}
        assert await process.peer.request("hello") == "hello"
        with pytest.raises(EngineFailure, match="as it was told") as caught:
            await process.peer.request("fail")
        assert caught.value.__notes__ == ["raised in helper"]
        with pytest.raises(DeadlineError, match=r"helper did not answer within 0[.]1 s"):
            await process.peer.request("wait", timeout_s=0.1)
        assert await process.peer.request("and more") == "and more"
        await process.end(30.0)
        assert process.over and not is_alive(process.pid)
        assert await process.cause() == "exit status 0"

    play(main())


def test_a_crash_fails_what_is_open_and_says_what_was_printed_last(capfd):
    async def main() -> None:
        process = await launch()
        with pytest.raises(ChannelClosed):
            await process.peer.request("crash")
        assert await process.gone() == "exit status 3; its last output: the last thing it said"
        await process.end()

    play(main())
    assert "the last thing it said" in capfd.readouterr().err, "what a process prints is passed on"


def test_what_a_process_prints_is_shown_without_control_characters(capfd):
    """Its standard output is no way to the terminal: a tool prints what a model wrote."""

    async def main() -> None:
        process = await launch()
        assert await process.peer.request("print") == "print"
        await process.end(30.0)

    play(main())
    shown = capfd.readouterr().out
    assert shown.splitlines() == ["\\x1b]52;c;eA==\\x07 one", "two\\x1b[2J", "\\x1b]0;title\\x07 three"]


def test_a_process_goes_on_where_nobody_reads_what_it_prints(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    async def main() -> None:
        process = await launch()
        for _ in range(2):
            assert await process.peer.request("print") == "print"
        assert len([thread for thread in threading.enumerate() if thread.name == "helper"]) == 3
        await process.end(30.0)

    monkeypatch.setattr(sys, "stdout", Gone())
    play(main())


def test_a_process_whose_interpreter_is_held_ends_by_itself():
    """Its parent may be gone by then, and it could not see that."""

    async def main() -> None:
        process = await launch(max_stall_s=5.0, kill_with_parent=False)
        assert await process.peer.request("hello") == "hello"
        with pytest.raises(ChannelClosed):
            await process.peer.request("hold")
        assert "exit status 1" in await process.gone()
        await process.end()

    play(main())


def test_a_start_has_a_deadline_that_names_its_key():
    with pytest.raises(DeadlineError, match=r"helper did not start within rollout.limits.launch_timeout_s = 2"):
        play(
            launch(
                serve="serve_late", start_timeout_s=2.0, start_timeout_key="rollout.limits.launch_timeout_s", quiet=True
            )
        )


def test_what_cannot_be_served_is_said():
    with pytest.raises(RunError, match=r"helper: AttributeError: .*has no attribute 'serve_nothing'"):
        play(launch(serve="serve_nothing"))


PARENT = """
import asyncio, os, signal
from tests.integration.test_process import launch

async def main():
    process = await launch()
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's lifeline is Linux's")
def test_a_process_ends_with_its_parent_however_that_ends():
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 60
    while is_alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(int(done.stdout))


async def ends() -> tuple[RpcPeer, Channel, Channel]:
    """A peer, its channel, and the other end of that."""
    ours, theirs = socket.socketpair()
    channel, other = await Channel.open(ours), await Channel.open(theirs)
    return RpcPeer(channel, refuse), channel, other


@pytest.mark.parametrize("numbers", [[7], [0, 0]], ids=["unknown", "second"])
def test_a_reply_to_nothing_that_is_open_closes_the_channel(numbers):
    async def main() -> None:
        peer, channel, other = await ends()
        serving, asked = asyncio.ensure_future(peer.serve()), asyncio.ensure_future(peer.request("a"))
        assert await other.receive() == RpcRequest(0, "a")
        for number in numbers:
            other.send(RpcReply(number, "b"))
        await serving
        assert channel.problem == f"a reply to request {numbers[-1]}, which is not open"
        await asyncio.wait({asked})
        assert (asked.exception() is None) == (len(numbers) == 2)
        other.close()

    play(main())


def test_the_reply_to_a_cancelled_request_is_dropped_once():
    async def main() -> None:
        peer, channel, other = await ends()
        serving, asked = asyncio.ensure_future(peer.serve()), asyncio.ensure_future(peer.request("a"))
        assert await other.receive() == RpcRequest(0, "a")
        asked.cancel()
        assert await other.receive() == RpcCancel(0)
        other.send(RpcReply(0, "late"))
        again = asyncio.ensure_future(peer.request("b"))
        assert await other.receive() == RpcRequest(1, "b")
        other.send(RpcReply(1, "in time"))
        assert await again == "in time" and channel.problem is None
        other.send(RpcReply(0, "once more"))
        await serving
        assert channel.problem is not None
        other.close()

    play(main())


def test_a_blocking_end_makes_requests_from_any_thread():
    process = BlockingLaunch.begin(spec("serve_blocking", "once")).ready()
    assert process.started == "once"
    assert [future.result(30) for future in [process.peer.submit(at) for at in range(20)]] == list(range(20))
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        process.peer.submit("anyone").result(30)
    assert process.cause() == "killed by SIGKILL"
    process.end()


def test_a_second_reply_ends_a_blocking_peer_too():
    process = BlockingLaunch.begin(spec("serve_blocking", "twice")).ready()
    assert process.peer.submit("a").result(30) == "a"
    process.peer.gone.result(30)
    assert process.cause() == "killed, because it sent what is no message (a reply to nothing that was asked)"
    process.end()


class Helper:
    """A process as a supervisor sees it."""

    over = False

    async def end(self) -> None:
        self.over = True


def test_a_process_that_is_over_is_started_again_when_it_is_needed():
    async def main() -> None:
        problems: list[Exception] = []
        started: list[Helper] = []

        async def start() -> Helper:
            if problems:
                raise problems.pop(0)
            started.append(Helper())
            return started[-1]

        supervisor = Supervisor(start, RestartPolicy(attempts=3, first_wait_s=0.001))
        first = await supervisor.current()
        assert await supervisor.current() is first
        first.over = True
        problems += [RunError("no memory"), RunError("no memory")]
        second, same = await asyncio.gather(supervisor.current(), supervisor.current())
        assert second is same is started[1] and not problems
        second.over = True
        problems += [RunError("no memory")] * 3
        with pytest.raises(RunError, match="no memory"):
            await supervisor.current()
        assert not problems and await supervisor.current() is started[2]
        await supervisor.end()

    play(main())


def test_the_first_start_fails_as_it_fails():
    async def start() -> Helper:
        calls.append(None)
        raise RunError("wrong path")

    calls: list[None] = []
    with pytest.raises(RunError, match="wrong path"):
        play(Supervisor(start, RestartPolicy(attempts=3)).current())
    assert len(calls) == 1


def test_restarts_back_off_and_give_up(monkeypatch):
    waits: list[float] = []
    starts: list[None] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def start() -> None:
        starts.append(None)
        raise EngineFailure(f"attempt {len(starts)}")

    async def main() -> None:
        monkeypatch.setattr("treadle.process.supervisor.asyncio.sleep", sleep)
        with pytest.raises(RestartFailed, match="attempt 4"):
            await restart(start, RestartPolicy(attempts=4, first_wait_s=1.0))
        assert waits == [0.0, 1.0, 2.0, 4.0]
        with pytest.raises(RestartFailed, match="it died 5 times in a row, each time within 60 s"):
            await restart(start, RestartPolicy(attempts=4), quick_exits=5)

    play(main())


def test_restarts_of_code_that_does_not_await_back_off_and_give_up_alike():
    waits, starts = list[float](), list[None]()

    def start() -> None:
        starts.append(None)
        raise EngineFailure(f"attempt {len(starts)}")

    with pytest.raises(RestartFailed, match="attempt 3"):
        restart_blocking(start, RestartPolicy(attempts=3, first_wait_s=1.0), wait=waits.append)
    assert waits == [0.0, 1.0, 2.0]
    with pytest.raises(EngineFailure, match="attempt 4"):
        restart_blocking(start, RestartPolicy(), retry=KeyError, wait=waits.append)


def test_a_process_that_closes_its_channel_and_lives_on_is_killed(monkeypatch):
    monkeypatch.setattr(child_handle, "END_S", 0.5)

    async def main() -> None:
        process = await launch(serve="serve_closed", setup="started")
        assert await process.gone() == "killed, because it closed its channel and went on"
        await process.end()
        assert not is_alive(process.pid)
        with pytest.raises(
            DiedWhileStarting, match="helper died while it started: killed, because it closed its channel"
        ):
            await launch(serve="serve_closed")

    play(main())
    with pytest.raises(DiedWhileStarting, match="helper died while it started: killed, because it closed its channel"):
        BlockingLaunch.begin(spec("serve_closed_blocking")).ready()


def test_an_error_that_cannot_be_rebuilt_ends_the_process_and_nothing_else():
    async def main() -> None:
        process = await launch(serve="serve_odd_error")
        with pytest.raises(ChannelClosed):
            await process.peer.request("anything", timeout_s=30)
        assert "killed, because it sent what is no message (an error with fields of none" in await process.gone()
        await process.end()

    play(main())


def test_what_a_killed_process_started_in_a_session_of_its_own_ends_with_it():
    async def main() -> None:
        process = await launch(serve="serve_leaver", reap=True)
        assert await process.gone() == "killed by SIGKILL"
        await process.end()
        for _ in range(100):
            if not is_alive(process.started):
                return
            await asyncio.sleep(0.1)
        pytest.fail("it is still there")

    play(main())
