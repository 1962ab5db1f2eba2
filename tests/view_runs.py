"""Run directories for tests of the viewer: small ones with every kind of trajectory, and a long one."""

import struct
from pathlib import Path

from tests.rollouts import task
from treadle.errors import ToolFailure
from treadle.journal import Journal, RowAnnotation
from treadle.types import Outcome, Row, Score, StopReason, Timing, ToolCall, ToolResult, Trajectory, Turn

CONFIG = (
    "model:\n  path: treadle/tiny-calculator  # recipe calculator:4\nrollout:\n  n: 4  # default (RolloutConfig.n)\n"
)
ENDED = Outcome.ended(StopReason.STOP)
STARTED = 1_700_000_000.0


def sampled(ids: tuple[int, ...], *, prompt: tuple[int, ...] = (5, 6, 7), version: int = 0, answer: int = 2) -> Row:
    """A row of one turn whose last `answer` tokens were not sampled."""
    own = len(ids) - answer
    mask = (1,) * own + (0,) * answer
    turn = Turn(
        0,
        own,
        len(ids),
        StopReason.STOP,
        (ToolCall("calculate", {"expression": "1+1"}),),
        (ToolResult("2", seconds=0.25),),
        1.5,
        0.25,
        "native-0",
    )
    logprobs = tuple(-0.25 * (at % 5) if on else 0.0 for at, on in enumerate(mask))
    return Row(prompt, ids, mask, logprobs, tuple(version if on else -1 for on in mask), (turn,))


def made(uid: str, sample: int, reward: float | None, said: str = "four", **fields) -> Trajectory:
    messages = ({"role": "user", "content": f"question of {uid}"}, {"role": "assistant", "content": said})
    score = None if reward is None else Score(reward, fields.pop("parts", {"answer": reward}))
    ids = fields.pop("ids", (20 + sample, 30, 31, 32, 33, 40, 41))
    rows = fields.pop("rows", (sampled(ids),))
    timing = Timing(STARTED, 2.0, 1.5, 0.25, 0.05, 0.2)
    outcome = fields.pop("outcome", ENDED)
    return Trajectory(uid, sample, rows, outcome, score, messages, timing=timing, **fields)


def annotated(item: Trajectory, trainer: tuple[float, ...], *, step: int = 1, row: int = 0) -> RowAnnotation:
    """What a step recorded of a row: the trainer's logprobs, and the same advantage for all tokens."""
    own = struct.pack(f"<{len(trainer)}f", *trainer)
    same = struct.pack("<f", 1.0)
    return RowAnnotation(item.uid, item.sample, item.attempt, row, step, own, None, None, same, same, same, b"\0")


def trained(journal: Journal, step: int, *trajectories: Trajectory) -> None:
    """Record trajectories and the step that trained on them."""
    groups: dict[str, list[list[int]]] = {}
    for item in trajectories:
        journal.add(item)
        groups.setdefault(item.uid, []).append([item.sample, item.attempt])
    journal.add_event("step", step=step, version=step, groups=list(groups.items()), positions=[], baselines=None)
    rewards = [item.reward.value for item in trajectories if item.reward]
    journal.add_metrics(step, {"reward/mean": sum(rewards) / len(rewards), "seconds/train": 1.0, "batch/failed": 1.0})


def write_run(run_dir: Path, *more: Trajectory) -> Path:
    """Two steps, two validations, a failure, a fork and a stall; `more` trains in step 3."""
    failed = made("b", 2, None, outcome=Outcome.failed(ToolFailure("the tool broke")))
    fork = sampled((50, 51, 52, 53), prompt=(5, 6, 7, 20, 30))
    with Journal.open(run_dir, max_mb=50, config_yaml=CONFIG) as journal:
        journal.add_event("resume", step=0, position=0, open=[])
        journal.add_task(task("a", ground_truth="4"))
        journal.add(made("validation-0/v", 0, 0.0, "five"))
        journal.add_metrics(0, {"validation/success": 0.0})
        trained(journal, 1, made("a", 0, 0.0, "three"), made("a", 1, 1.0, rows=(sampled((21, 30, 31, 9, 8)), fork)))
        trained(journal, 2, made("b", 0, 0.25), made("b", 1, 0.75), failed)
        journal.add(made("validation-2/v", 0, 1.0, "four"))
        journal.add_metrics(2, {"validation/success": 1.0})
        journal.add_event("stall", stage="generate", uid="b", age_s=31.0)
        if more:
            trained(journal, 3, *more)
    return run_dir
