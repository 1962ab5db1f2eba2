"""A rollout that stands alone with the native engine: the engine is a process, and the caller's loop stays free."""

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import asyncio, gc, json, os, signal, sys
from pathlib import Path
from tests.heartbeat import longest_stall_s
from treadle.config import load
from treadle.data.tasks import load_training_tasks
from treadle.rollout.manager import AgentLoopManager

config = load("calculator")
source = load_training_tasks(config.data)
tasks = [source.at(at) for at in range(16)]
found = {}

def engines():
    lines = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    own = [int(pid) for pid, line in lines.items() if b"treadle.process" in line and b"native-0" in line]
    return [pid for pid in own if f"PPid:\\t{os.getpid()}\\n" in Path(f"/proc/{pid}/status").read_text()]

async def main():
    made = []

    async def create():
        made.append(await AgentLoopManager.create(rollout=config.rollout, model=config.model, reward=config.reward))

    async def sample():
        batch = await made[0].generate_sequences(tasks)
        found["batches"].append([trajectory.response_text for trajectory in batch.trajectories])

    found["batches"] = []
    gc.collect()
    found["create_s"] = await longest_stall_s(create)
    found["generate_s"] = await longest_stall_s(sample)
    (engine,) = engines()
    os.kill(engine, signal.SIGKILL)
    await sample()
    await made[0].close()
    found["left"] = engines()
    found["torch"] = "torch" in sys.modules
    narrow = load("calculator", ["rollout.max_num_seqs=1", "rollout.n=4"]).rollout
    async with await AgentLoopManager.create(rollout=narrow, model=config.model, reward=config.reward) as manager:
        batch = await manager.generate_sequences(tasks[:1])
    timings = [trajectory.timing for trajectory in batch.trajectories]
    found["timings"] = [(timing.total_s, timing.generate_s, timing.queue_s) for timing in timings]
    ends = [timing.started_at + timing.total_s for timing in timings]
    found["span_s"] = max(ends) - min(timing.started_at for timing in timings)

asyncio.run(main())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_torch_stays_out_of_the_callers_process(found: dict[str, Any]) -> None:
    assert not found["torch"]


def test_neither_create_nor_generate_stalls_the_callers_loop(found: dict[str, Any]) -> None:
    assert found["create_s"] < 0.05 and found["generate_s"] < 0.05, found


def test_an_engine_that_is_killed_is_started_again_and_samples_the_same(found: dict[str, Any]) -> None:
    first, second = found["batches"]
    assert first == second and any(first)
    assert found["left"] == []


def test_time_in_the_engines_queue_is_queue_time_and_not_generation(found: dict[str, Any]) -> None:
    """Four samples share one row of the engine: their generation is one after another, and the last has waited for it.

    It does not wait between its turns, while the others go on: so it is not all of theirs. Answers on their way count
    as generation, too, so a little of it is side by side; with the wait for the row it would be three times the whole.
    """
    total, generate, queue = zip(*found["timings"], strict=True)
    assert sum(generate) < 1.5 * found["span_s"] < sum(generate) + sum(queue)
    assert max(queue) > (sum(generate) - max(generate)) / 2 > 0
    assert all(whole >= part for whole, part in zip(total, generate, strict=True))
