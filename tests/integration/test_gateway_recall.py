"""An agent whose run is killed starts again, and its requests meet the answers that were recorded."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests import rollouts
from tests.chatter import STOPS, speaking
from treadle.config import AgentLoopConfig, FailureConfig
from treadle.journal import Journal, JournalReader
from treadle.rollout.completion_log import CompletionLog
from treadle.rollout.protocol import Job
from treadle.rollout.worker import AgentLoopWorker
from treadle.trainer.resume import RunHistory
from treadle.types import Completion, Request, SamplingParams, Trajectory

TURNS = 5


async def two_at_once(base_url: str, api_key: str, task: Any) -> None:
    """Two conversations side by side, in no fixed order; waits for a line on standard input after each turn."""
    headers = {"authorization": f"Bearer {api_key}"}

    async def talk(client: httpx.AsyncClient, name: str) -> None:
        history: list[Any] = [{"role": "user", "content": f"You are {name}."}]
        for turn in range(TURNS):
            body = {"model": "policy", "messages": history}
            answer = (await client.post(f"{base_url}/chat/completions", json=body)).json()["choices"][0]["message"]
            history += [answer, {"role": "user", "content": f"On, {turn}."}]

    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        names = ["Ada", "Bob"] if os.environ.get("ORDER") != "2" else ["Bob", "Ada"]
        await asyncio.gather(*(talk(client, name) for name in names))


class Counting:
    """Says on standard output how many tokens the engine really sampled; `hold_after` answers, it gives no more."""

    def __init__(self, hold_after: int) -> None:
        self.engine = rollouts.engine(speaking(12))
        self.left = hold_after

    async def generate(self, request: Request) -> Completion:
        if self.left == 0:
            os.write(1, b"held\n")
            await asyncio.sleep(600)
        self.left -= 1
        completion = await self.engine.generate(request)
        os.write(1, f"sampled {len(completion.ids)}\n".encode())
        return completion


async def work(run_dir: Path, hold_after: int) -> None:
    journal = Journal.open(run_dir, max_mb=16)
    recall = CompletionLog(Counting(hold_after), journal, interval_s=0.05)
    loops = {
        "function_agent": AgentLoopConfig(kwargs={"function": "tests.integration.test_gateway_recall:two_at_once"})
    }
    rollout = rollouts.rollout(
        default_agent_loop="function_agent",
        loops=loops,
        response_length=2000,
        failures=FailureConfig(request_retries=0),
    )
    model: Any = None
    worker = await AgentLoopWorker.create(rollout=rollout, model=model, engine=recall, renderer=rollouts.renderer())
    history = RunHistory.read(run_dir, scored=False)
    recall.recover(history.past("chat", 1, version=0, oldest=0).parts)
    history.close()
    result = await worker.run(Job(rollouts.task("chat"), 0, SamplingParams(2000, stop_token_ids=STOPS, seed=5)))
    assert isinstance(result, Trajectory) and result.outcome.ok, result
    journal.add(result)
    recall.forget("chat/0")
    await worker.close()
    recall.close()
    await journal.close()


def start(run_dir: Path, hold_after: int, order: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.integration.test_gateway_recall", str(run_dir), str(hold_after)]
    environment = {**os.environ, "ORDER": order}
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], env=environment)


def sampled(said: bytes) -> int:
    return sum(int(line.split()[1]) for line in said.splitlines() if line.startswith(b"sampled"))


def test_a_killed_agent_goes_on_from_its_recorded_answers_in_whatever_order_it_asks(tmp_path: Path) -> None:
    with start(tmp_path, 6, "1") as child:
        assert child.stdout is not None
        said = b""
        while b"held" not in said:
            said += child.stdout.readline()
        with JournalReader.open(tmp_path) as reader:
            while sum(len(entry.part.completion.ids) for entry in reader.parts("chat")) < sampled(said):
                pass
        child.send_signal(signal.SIGKILL)
    before = sampled(said)
    with start(tmp_path, 1000, "2") as child:
        rest, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    with JournalReader.open(tmp_path) as reader:
        trajectory = reader.trajectory("chat", 0).trajectory  # type: ignore[union-attr]
        assert reader.parts("chat") == ()
    assert trajectory.num_turns == 2 * TURNS and len(trajectory.rows) == 2
    assert before > 0 and before + sampled(rest) == trajectory.num_sampled, "nothing was sampled twice"


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), int(sys.argv[2])))
