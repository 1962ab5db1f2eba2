"""A run that is killed in the middle of its sessions goes on from their tokens, in another process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests import rollouts
from tests.chatter import STOPS, chatting, speaking
from treadle.journal import Journal, JournalReader, RunStatus, read_starts
from treadle.rollout.completion_log import CompletionLog
from treadle.rollout.protocol import Job
from treadle.rollout.worker import AgentLoopWorker
from treadle.trainer.resume import RunHistory
from treadle.types import Completion, Request, SamplingParams, Trajectory

NUM_SAMPLES = 8
TURNS = 6
INTERVAL_S = 0.1
TURN_S = 0.06
NUM_KILLS = 4


class Counting:
    """Says on standard output how many tokens the engine was really asked for."""

    def __init__(self) -> None:
        self.engine = rollouts.engine(speaking(20), latency_s=TURN_S, latency_tail=2.0)

    async def generate(self, request: Request) -> Completion:
        completion = await self.engine.generate(request)
        os.write(1, f"{request.sample} {request.position} {len(completion.ids)}\n".encode())
        return completion


async def work(run_dir: Path) -> None:
    """One process of the run: whatever is left to do, with every finished trajectory in the journal."""
    engine, history = Counting(), None
    journal = Journal.open(run_dir, max_mb=16)
    recall = CompletionLog(engine, journal, interval_s=INTERVAL_S)
    rollout = chatting(1000, turns=TURNS)
    model: Any = None
    worker = await AgentLoopWorker.create(rollout=rollout, model=model, engine=recall, renderer=rollouts.renderer())
    history = RunHistory.read(run_dir, scored=False)
    past = history.past("chat", NUM_SAMPLES, version=0, oldest=0)
    history.close()
    recall.recover(past.parts)
    done = {trajectory.sample for trajectory in past.finished}

    async def run(sample: int) -> None:
        sampling = SamplingParams(1000, stop_token_ids=STOPS, seed=5)
        result = await worker.run(Job(rollouts.task("chat"), sample, sampling, past.attempt))
        assert isinstance(result, Trajectory) and result.outcome.ok
        journal.add(result)
        recall.forget(f"chat/{sample}")

    async def keep() -> None:
        """What a run does before it saves: interrupt, and have it all on disk."""
        while True:
            await asyncio.sleep(0.13)
            await engine.engine.pause()
            await recall.flush()
            await engine.engine.resume()

    keeping = asyncio.ensure_future(keep())
    await asyncio.gather(*(run(sample) for sample in range(NUM_SAMPLES) if sample not in done))
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    recall.close()
    await journal.close()


def begin(run_dir: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.integration.test_completion_log_crash", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])


def asked(said: bytes) -> dict[int, int]:
    """How many tokens an engine gave, by sample; a last line that death cut short does not count."""
    counts = dict.fromkeys(range(NUM_SAMPLES), 0)
    for line in said.decode().split("\n")[:-1]:
        sample, _, count = line.split()
        counts[int(sample)] += int(count)
    return counts


def finish(run_dir: Path) -> dict[int, int]:
    with begin(run_dir) as child:
        said, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return asked(said)


def kill(run_dir: Path, num_answers: int, after_s: float = 0.0) -> dict[int, int]:
    """Kill a process so long after its engine's first answers."""
    with begin(run_dir) as child:
        assert child.stdout is not None
        first = b"".join(child.stdout.readline() for _ in range(num_answers))
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        said = first + child.stdout.read()
    assert child.returncode == -signal.SIGKILL
    return asked(said)


def results(run_dir: Path) -> dict[int, list[Any]]:
    """The tokens of every sample; each has ended exactly once."""
    with JournalReader.open(run_dir) as reader:
        entries = reader.attempts("chat")
        assert reader.parts("chat") == ()
    assert [entry.headline.sample for entry in entries] == list(range(NUM_SAMPLES))
    return {
        entry.headline.sample: [(row.prompt_ids, row.ids, row.mask, row.logprobs) for row in entry.trajectory.rows]
        for entry in entries
    }


def recorded(run_dir: Path) -> dict[int, int]:
    """Tokens in the journal, by sample: of finished ones, or of parts."""
    with JournalReader.open(run_dir) as reader:
        found = {entry.headline.sample: entry.headline.num_sampled for entry in reader.attempts("chat")}
        counts = dict.fromkeys(range(NUM_SAMPLES), 0) | found
        for entry in reader.parts("chat"):
            if entry.part.sample not in found:
                counts[entry.part.sample] += len(entry.part.completion.ids)
    return counts


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    run_dir = tmp_path_factory.mktemp("whole")
    finish(run_dir)
    return results(run_dir)


def sampled(whole: dict[int, list[Any]]) -> dict[int, int]:
    return {sample: sum(sum(mask) for _, _, mask, _ in rows) for sample, rows in whole.items()}


def test_after_kill_9_the_same_tokens_come_out_and_the_engine_gives_only_the_rest(
    tmp_path: Path, uninterrupted: dict[int, list[Any]]
) -> None:
    before = kill(tmp_path, 4 * NUM_SAMPLES)
    there = recorded(tmp_path)
    assert sum(there.values()) > 0
    assert all(there[sample] <= before[sample] for sample in there)
    after = finish(tmp_path)
    assert results(tmp_path) == uninterrupted
    assert {sample: there[sample] + after[sample] for sample in there} == sampled(uninterrupted)


def test_killed_again_and_again_nothing_that_was_written_is_sampled_twice(
    tmp_path: Path, uninterrupted: dict[int, list[Any]]
) -> None:
    moments = Random(3)
    most = dict.fromkeys(range(NUM_SAMPLES), 0)
    for _ in range(NUM_KILLS):
        kill(tmp_path, 1, moments.uniform(0.02, 0.25))
        there = recorded(tmp_path)
        assert all(there[sample] >= most[sample] for sample in there), "what was kept stays kept"
        most = there
    after = finish(tmp_path)
    assert results(tmp_path) == uninterrupted
    assert {sample: most[sample] + after[sample] for sample in most} == sampled(uninterrupted)
    assert [start.status for start in read_starts(tmp_path)] == [RunStatus.CRASHED] * NUM_KILLS + [RunStatus.FINISHED]


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1])))
