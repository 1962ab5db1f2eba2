"""What keys change in a whole training run of a tiny model, on the CPU and in this process: what it leaves behind."""

import asyncio
import json
import os
import random
import signal
import sqlite3
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.effects.cases import Case, config_cases, training
from tests.effects.models import chat_model
from tests.schedules import View
from treadle.cluster import training as cluster
from treadle.cluster.signals import StopSignals
from treadle.config import TrainConfig
from treadle.errors import TreadleError
from treadle.journal import JournalReader
from treadle.rollout import AgentLoopBase, Session
from treadle.types import ToolCall, ToolResult

HERE = __name__
BASE = """
model: {path: MODEL, parity_check: false}
data: {train_files: [tasks.jsonl], train_batch_size: 2}
rollout: {n: 2, prompt_length: 64, response_length: 8}
reward: {functions: {it: {path: exact_match}}}
actor: {ppo_mini_batch_size: 2, dtype: fp32}
trainer: {total_training_steps: 2, val_before_train: false}
logging: {run_dir: run, logger: []}
"""


async def make_noise() -> ToolResult:
    """A tool whose answer is large in the journal."""
    return ToolResult("done", extra={"noise": random.Random(0).randbytes(400_000).hex()})


class Noisy(AgentLoopBase):
    """Calls it once."""

    async def run(self, session: Session) -> None:
        await session.generate()
        await session.call_tools([ToolCall("make_noise", {})])


class Terminated(View):
    """Ends the run by a signal after its first step."""

    def on_step(self, step: int, metrics: Any) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def run(directory: Path, **keys: Any) -> Any:
    """How far it came; its files; of which trajectories the journal has all; whether it has annotations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        config = prepared(keys)
        result = asyncio.run(cluster.train(config, View()))
        with JournalReader.open(Path("run")) as reader:
            kept = [headline.has_body for headline in reader.headlines()]
        with sqlite3.connect("file:run/journal.sqlite?mode=ro", uri=True) as journal:
            annotated = journal.execute("SELECT count(*) > 0 FROM annotations").fetchone()
        names = sorted(str(path) for path in Path("run").rglob("*"))
    return result.steps, result.interrupted, [name for name in names if "sqlite" not in name], kept, annotated


def prepared(keys: dict[str, Any]) -> TrainConfig:
    """The config of a run in the working directory, with tasks there."""
    rows = ({"prompt": f"What is {at} + {at}?", "answer": "2"} for at in range(4))
    Path("tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return training(BASE.replace("MODEL", str(chat_model())), keys)


def terminated(directory: Path, **keys: Any) -> list[int]:
    """The status with which a run that SIGTERM found in its first step leaves in a hurry, if it does."""
    left: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(cluster, "StopSignals", partial(StopSignals, leave=left.append))
        with suppress(TreadleError):  # the journal is closed under a run that goes on all the same
            asyncio.run(cluster.train(prepared(keys), Terminated()))
    return left


NOISY = {
    "rollout.agent.default_agent_loop": f"{HERE}:Noisy",
    "rollout.multi_turn.tools": [f"{HERE}:make_noise"],
    "rollout.prompt_length": 400,
    "trainer.total_training_steps": 1,
    "logging.annotations": 0.0,  # whether they outlive what is dropped depends on when that is
}
EFFECTS: dict[str, Case] = {
    **config_cases(
        "logging", run, ("journal", True, False), ("annotations", 0.0, 1.0), ("journal_max_mb", 1, 4096, NOISY)
    ),
    **config_cases("checkpoint", terminated, ("grace_s", 1e-6, 600.0)),
}
