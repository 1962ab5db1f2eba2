"""What keys of `sft` change: in the rows that train, and in what is refused."""

import asyncio
from pathlib import Path
from typing import Any

from tests.effects.cases import cases
from tests.sft_runs import sft_config, sums
from treadle.data.renderer import Renderer
from treadle.errors import ConfigError
from treadle.journal import Journal
from treadle.trainer.sft_data import load_sft_rows
from treadle.types import Outcome, Row, Score, StopReason, Task, Trajectory

SAID = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]
OTHER = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "two"}]


def rows(directory: Path, **keys: Any) -> Any:
    """The rows that would train, or why there are none."""
    given = [{"messages": SAID, "chat": OTHER, "prompt": "3", "response": "three", "output": "drei"}, *sums(3)]
    if "response_key" in keys:
        given = [{"prompt": "3", "response": "three", "output": "drei"}]
    words = [f"sft.{name}={value}" for name, value in keys.items()]
    return _read(sft_config(directory, *words, rows=given))


def recorded(directory: Path, **keys: Any) -> Any:
    """Those of a run of two trajectories."""
    run_dir = directory / "sampled"
    asyncio.run(_record(run_dir))
    words = [f"data.train_files={run_dir}", *(f"sft.{name}={value}" for name, value in keys.items())]
    return _read(sft_config(directory, *words))


async def _record(run_dir: Path) -> None:
    config_yaml = "model: {path: treadle/tiny-calculator}\n"
    async with Journal.open(run_dir, max_mb=16, config_yaml=config_yaml, command=()) as journal:
        for sample, reward in enumerate((0.0, 1.0)):
            row = Row((1, 5), (6 + sample, 2), (1, 1), (0.0, 0.0), (0, 0))
            task = Task("it", ({"role": "user", "content": "1"},))
            outcome = Outcome.ended(StopReason.STOP)
            found = Trajectory("it", sample, (row,), outcome, Score(reward), messages=task.messages)
            journal.add_task(task)
            journal.add(found)
        await journal.flush()


def _read(config: Any) -> Any:
    try:
        found = asyncio.run(load_sft_rows(config, Renderer.create(config.model)))
    except ConfigError as error:
        return [(mistake.key, mistake.problem.partition(":")[0]) for mistake in error.mistakes]
    return [(row.prompt_ids, row.ids, row.mask) for row in found.rows.values()], found.dropped


EFFECTS = {
    **cases(
        "sft",
        rows,
        ("messages_key", "messages", "chat"),
        ("response_key", "response", "output"),
        ("max_length", 12, 40),
        ("overlong", "error", "drop", {"max_length": 14}),
    ),
    **cases("sft", recorded, ("min_reward", 0.0, 1.0)),
}
