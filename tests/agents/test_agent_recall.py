"""Command-line agents in a run that is killed: started again in the same directory, they meet the recorded answers."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from tests import rollouts
from tests.agents.test_command_line_agents import FINISH, every_agent, example, results_of, shell
from tests.integration.test_gateway_recall import Counting, sampled
from treadle.config import AgentLoopConfig
from treadle.journal import Journal, JournalReader
from treadle.rollout.completion_log import CompletionLog
from treadle.rollout.protocol import Job
from treadle.rollout.worker import AgentLoopWorker
from treadle.trainer.resume import RunHistory
from treadle.types import Request, SamplingParams, Trajectory

TURNS = 4

SAMPLED_AGAIN = {"claude_code": 0, "mini_swe_agent": 0, "codex": TURNS - 2}
"""Recorded turns that a restarted agent does not meet: Codex gives every result of a command an id, drawn anew."""


def count(name: str) -> Any:
    def script(request: Request, rng: Random) -> str:
        turns = rollouts.turns_of(request)
        if turns < TURNS - 1:
            return shell(name, f"echo no.{turns} >> made.txt; cat made.txt")
        return "It is done." if name != "mini_swe_agent" else "It is done.\n" + shell(name, FINISH)

    return script


async def work(name: str, run_dir: Path, hold_after: int) -> None:
    """One session; says on standard output what the engine samples, and holds it after so many answers."""
    journal = Journal.open(run_dir, max_mb=16)
    counting = Counting(hold_after)
    counting.engine = rollouts.engine(count(name))
    recall = CompletionLog(counting, journal, interval_s=0.05)
    loops = {"program_agent": AgentLoopConfig(kwargs=example(name))}
    section = rollouts.rollout(
        default_agent_loop="program_agent", loops=loops, response_length=20_000, max_model_len=40_000
    )
    model: Any = None
    worker = await AgentLoopWorker.create(rollout=section, model=model, engine=recall, renderer=rollouts.renderer())
    history = RunHistory.read(run_dir, scored=False)
    recall.recover(history.past(name, 1, version=0, oldest=0).parts)
    history.close()
    stops = rollouts.renderer().stop_token_ids
    result = await worker.run(Job(rollouts.task(name), 0, SamplingParams(20_000, stop_token_ids=stops, seed=5)))
    assert isinstance(result, Trajectory) and result.outcome.ok, result
    journal.add(result)
    recall.forget(f"{name}/0")
    await worker.close()
    recall.close()
    await journal.close()


def start(name: str, run_dir: Path, hold_after: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.agents.test_agent_recall", name, str(run_dir), str(hold_after)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], env=dict(os.environ))


@every_agent
def test_a_killed_command_line_agent_goes_on_from_its_recorded_answers(name: str, tmp_path: Path) -> None:
    with start(name, tmp_path, TURNS - 1) as child:
        assert child.stdout is not None
        said = b""
        while b"held" not in said and (line := child.stdout.readline()):
            said += line
        with JournalReader.open(tmp_path) as reader:
            while sum(len(entry.part.completion.ids) for entry in reader.parts(name)) < sampled(said):
                pass
        child.kill()
    with start(name, tmp_path, 1000) as child:
        rest, _ = child.communicate(timeout=300)
    assert child.returncode == 0
    with JournalReader.open(tmp_path) as reader:
        trajectory = reader.trajectory(name, 0).trajectory  # type: ignore[union-attr]
    results = [re.findall(r"no\.(\d)", text) for text in results_of(trajectory)]
    assert results[:3] == [["0"], ["0", "1"], ["0", "1", "2"]], "its commands ran again, in a directory that was empty"
    anew = SAMPLED_AGAIN[name]
    assert rest.count(b"sampled") == 1 + anew, "the last turn, which was held, and those whose prompt is another"
    (row,) = trajectory.rows
    lengths = [turn.sampled_end - turn.start for turn in row.turns]
    assert len(lengths) == TURNS and sampled(rest) == sum(lengths[-1 - anew :]), (
        "what was met again is not sampled again"
    )


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
