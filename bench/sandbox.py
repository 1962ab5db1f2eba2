"""Boxes, measured: sessions with a shell, warm interpreters, and code gradings beside plain subprocesses.

    PYTHONPATH=. python bench/sandbox.py [--provider bubblewrap] [--sessions 256] [--calls 8] [--gradings 1000]

CPU is that of this process and all it started, user and system. "Over the command itself" is the difference to the same
command in a shell of this machine. Ratios are of one run; a busy machine lengthens times, and CPU less.
"""

import argparse
import asyncio
import resource
import subprocess
import time
from collections.abc import Awaitable, Callable

from treadle.config import MultiTurnConfig, SandboxConfig
from treadle.reward.builtin import code_tests
from treadle.rollout.tools import Toolbox
from treadle.sandbox.box import interpreter
from treadle.sandbox.protocol import BoxSettings
from treadle.types import Task, ToolCall

COMMAND = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); done; echo $i"
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
TESTS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
AT_ONCE = 4


def cpu_s() -> float:
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


async def measure(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Wall clock and CPU seconds."""
    started, used = time.perf_counter(), cpu_s()
    await work()
    return time.perf_counter() - started, cpu_s() - used


async def sessions(provider: str, count: int, calls: int) -> None:
    """Sessions that each call bash, at most `AT_ONCE` of them at a time."""
    turns = MultiTurnConfig(tools=("bash", "python"), tool_timeout_s=120)
    limit = asyncio.Semaphore(AT_ONCE)

    async with await Toolbox.create(turns, SandboxConfig(provider=provider)) as toolbox:

        async def session(number: int) -> None:
            async with limit, toolbox.open(Task(uid=str(number), messages=())) as tools:
                for _ in range(calls):
                    result = await tools.call(ToolCall("bash", {"command": COMMAND}))
                    assert result.text == "200", result

        async def all_sessions() -> None:
            await asyncio.gather(*map(session, range(count)))

        wall_s, used_s = await measure(all_sessions)
        plain_s = plain_shell(calls)
        per_call = used_s / (count * calls)
        print(
            f"sessions   {count} × {calls} bash calls: {wall_s:.1f} s, {1000 * per_call:.2f} ms CPU a call with its box"
        )
        print(f"           the command itself {1000 * plain_s:.2f} ms; {1000 * (per_call - plain_s):.2f} ms over it")
        async with toolbox.open(Task(uid="warm", messages=())) as tools:
            await warm_python(tools.call)


def plain_shell(calls: int) -> float:
    """CPU seconds of the command in a shell that stays, without a box."""
    used = cpu_s()
    subprocess.run(["bash"], input=f"{COMMAND}\n" * calls * 20, text=True, capture_output=True, check=True)
    return (cpu_s() - used) / (calls * 20)


async def warm_python(call: Callable[[ToolCall], Awaitable[object]]) -> None:
    times = []
    for at in range(220):
        started = time.perf_counter()
        await call(ToolCall("python", {"code": f"x = {at}\nx + 1"}))
        times.append(time.perf_counter() - started)
    ordered = sorted(times[20:])
    print(f"python     warm call: median {1000 * ordered[100]:.2f} ms, 90 % below {1000 * ordered[180]:.2f} ms")


async def gradings(provider: str, count: int) -> None:
    """Programs graded in a fresh box each, and the same programs as plain subprocesses."""
    limit, settings = asyncio.Semaphore(AT_ONCE), BoxSettings(provider)
    answer = f"```python\n{PROGRAM}```"

    async def grade() -> None:
        async with limit:
            assert (await code_tests.score(answer, TESTS, box=settings)).value == 1.0

    async def plain() -> None:
        async with limit:
            process = await asyncio.create_subprocess_exec(
                interpreter(), "-c", PROGRAM, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert (await process.communicate(b"1 2\n"))[0] == b"3\n"

    async def many(one: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    boxed_s, boxed_cpu_s = await measure(lambda: many(grade))
    plain_s, plain_cpu_s = await measure(lambda: many(plain))
    print(f"gradings   {count} in fresh boxes: {boxed_s:.1f} s, {1000 * boxed_cpu_s / count:.1f} ms CPU each")
    print(f"           plain subprocesses: {plain_s:.1f} s, {1000 * plain_cpu_s / count:.1f} ms CPU each")
    print(f"           ratio {boxed_s / plain_s:.2f} in time, {boxed_cpu_s / plain_cpu_s:.2f} in CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="bubblewrap")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--gradings", type=int, default=1000)
    asked = parser.parse_args()
    print(f"provider   {asked.provider}")
    asyncio.run(sessions(asked.provider, asked.sessions, asked.calls))
    asyncio.run(gradings(asked.provider, asked.gradings))


if __name__ == "__main__":
    main()
