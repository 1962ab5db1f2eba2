"""Batch metrics: what the trajectories of a step were like. Failures count as failed, and nowhere else."""

import re
from dataclasses import replace
from pathlib import Path

from treadle.errors import ToolFailure
from treadle.observe.step_metrics import describe_batch
from treadle.observe.training_progress import TrainingState, TrainingView, describe
from treadle.types import Group, Outcome, Row, Score, StopReason, Task, Timing, ToolResult, ToolStatus, Trajectory, Turn

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def row(*statuses: ToolStatus) -> Row:
    turn = Turn(0, 1, 1, StopReason.STOP, results=tuple(ToolResult("", status) for status in statuses))
    return Row((1,), (2,), (1,), (0.0,), (0,), (turn,))


GOOD = Trajectory(
    "a",
    0,
    (row(ToolStatus.OK, ToolStatus.ERROR), row(ToolStatus.TIMEOUT, ToolStatus.INVALID)),
    Outcome.ended(StopReason.STOP),
    Score(1.5, {"right": 1.0, "format": 0.5}, {"characters": 10, "note": "x", "judge": {"votes": 3, "sure": True}}),
    timing=Timing(generate_s=2.0, tool_s=1.0, score_s=0.5),
    data_source="gsm8k",
)
CUT = replace(
    GOOD,
    sample=1,
    rows=(row(),),
    outcome=Outcome.ended(StopReason.LENGTH),
    reward=Score(0.5, {"right": 0.0, "format": 0.5}, {"characters": 30, "sure": float("nan")}),
    timing=Timing(generate_s=4.0, queue_s=3.0),
    data_source="math",
)
BAD = replace(GOOD, sample=2, outcome=Outcome.failed(ToolFailure("gone")), reward=Score(99.0, {"right": 99.0}))
FOUND = describe_batch([Group(Task("a", ()), (GOOD, CUT, BAD))])


def test_rewards_are_told_by_part_by_source_and_with_what_functions_report():
    assert FOUND["reward/part/right"] == 0.5 and FOUND["reward/part/format"] == 0.5
    assert FOUND["reward/source/gsm8k"] == 1.5 and FOUND["reward/source/math"] == 0.5
    assert FOUND["reward/extra/characters"] == 20 and FOUND["reward/extra/judge/votes"] == 3
    assert FOUND["reward/extra/judge/sure"] == 1.0
    assert "reward/extra/note" not in FOUND and "reward/extra/sure" not in FOUND


def test_turns_tools_stops_and_forks_are_counted_over_survivors():
    assert (FOUND["rollout/turns/mean"], FOUND["rollout/turns/max"]) == (1.5, 2)
    assert FOUND["tools/calls"] == 2.0
    assert FOUND["tools/errors"] == FOUND["tools/timeouts"] == FOUND["tools/invalid"] == 0.25
    assert FOUND["stop/stop"] == FOUND["stop/length"] == FOUND["rollout/truncated"] == 0.5
    assert FOUND["rollout/forks"] == 0.5 and "rollout/drift" not in FOUND
    drifted = [replace(CUT, extra={"drift": drift}) for drift in (0.0, 1.0, 1.0, 0.0)]
    assert describe_batch([Group(Task("a", ()), (GOOD, *drifted))])["rollout/drift"] == 0.5
    assert FOUND["failed/tool"] == 1.0


def test_seconds_are_over_those_that_spent_any():
    assert (FOUND["session/queue_s/mean"], FOUND["session/queue_s/max"]) == (3.0, 3.0)
    assert (FOUND["session/generate_s/mean"], FOUND["session/generate_s/max"]) == (3.0, 4.0)
    assert (FOUND["session/tool_s/mean"], FOUND["session/score_s/max"]) == (1.0, 0.5)


def test_a_batch_of_failures_alone_has_no_other_figure():
    assert describe_batch([Group(Task("a", ()), (BAD,))]) == {"failed/tool": 1.0}
    assert describe_batch([]) == {}


def test_every_figure_is_on_the_page():
    shown = set(re.findall(r"`([a-z_]+/[^`]+)`", PAGE))
    patterns = [re.compile(re.sub(r"<[^>]*>", ".+", re.escape(name).replace(r"\\<", "<"))) for name in shown]
    missing = [name for name in FOUND if not any(pattern.fullmatch(name) for pattern in patterns)]
    assert not missing


def test_failures_and_truncation_are_in_the_line_of_a_step(capsys):
    state = TrainingState(3, step=1, rewards=[0.5])
    assert "failed" not in describe(state) and "truncated" not in describe(state)
    with TrainingView(3) as view:
        view.on_step(1, {"reward/mean": 0.5, "failed/tool": 2.0, "rollout/truncated": 0.25})
        view.on_step(2, {"reward/mean": 0.5, "failed/tool": 1.0, "failed/engine": 1.0})
    lines = capsys.readouterr().err.splitlines()
    assert "2 failed (tool 2), 25% truncated" in lines[0]
    assert "4 failed (engine 1, tool 3)" in lines[1] and "truncated" not in lines[1]
