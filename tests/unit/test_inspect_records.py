"""What a run recorded, read back: steps and validations in force, trajectories by step, task and reward, as text."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest

from tests.rollouts import task
from treadle.cli.main import main
from treadle.cli.parser import run_path
from treadle.errors import ConfigError, RunError, ToolFailure
from treadle.inspect.run_records import RolloutPurpose, RunRecords
from treadle.inspect.transcript import describe_trajectory, diff_trajectories, to_json
from treadle.journal import Journal
from treadle.journal.schema import FILE_NAME
from treadle.types import Outcome, Row, Score, StopReason, Task, ToolCall, ToolResult, ToolStatus, Trajectory, Turn

ENDED = Outcome.ended(StopReason.STOP)
HOSTILE = "\x1b]0;owned\x07"


def made(uid: str, sample: int, reward: float | None, said: str = "four", **fields) -> Trajectory:
    messages = ({"role": "user", "content": "2+2"}, {"role": "assistant", "content": said})
    score = None if reward is None else Score(reward, {"answer": reward})
    row = Row((1, 2), (5, 6, 7), (1, 1, 1), (-0.5,) * 3, (0,) * 3)
    return Trajectory(uid, sample, (row,), fields.pop("outcome", ENDED), score, messages, **fields)


def trained(journal: Journal, step: int, *trajectories: Trajectory) -> None:
    for item in trajectories:
        journal.add(item)
    groups: dict[str, list] = {}
    for item in trajectories:
        groups.setdefault(item.uid, []).append([item.sample, item.attempt])
    journal.add_event("step", step=step, version=step, groups=list(groups.items()), positions=[], baselines=None)
    rewards = [item.reward.value for item in trajectories if item.reward]
    journal.add_metrics(step, {"reward/mean": sum(rewards) / len(rewards)})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tmp_path = tmp_path / "run"
    with Journal.open(tmp_path, max_mb=10, config_yaml="model: {path: none}\n") as journal:
        journal.add_event("resume", step=0, position=0, open=[])
        journal.add_task(task("a", ground_truth="4"))
        journal.add(made("validation-0/v", 0, 0.0, "five"))
        journal.add_metrics(0, {"validation/success": 0.0})
        trained(journal, 1, made("a", 0, 0.0, "three"), made("a", 1, 1.0))
        trained(journal, 2, made("b", 0, 0.25), made("b", 1, 0.75), made("b", 2, 0.5))
        journal.add(made("validation-2/v", 0, 1.0, "four"))
        journal.add_metrics(2, {"validation/success": 1.0})
    return tmp_path


def names(found) -> list[str]:
    return [item.name for item in found]


def test_the_newest_step_comes_where_nothing_is_asked_for(run_dir):
    records = RunRecords(run_dir)
    assert (records.steps(), records.validations()) == ((1, 2), (0, 2))
    assert names(records.select()) == ["b/0", "b/1", "b/2"]
    assert {item.step for item in records.select()} == {2}
    assert names(records.select(validation=True)) == ["validation-2/v/0"]


def test_a_step_a_validation_and_a_task_are_found_by_name(run_dir):
    records = RunRecords(run_dir)
    assert names(records.select(1)) == ["a/0", "a/1"]
    assert names(records.select(0, validation=True)) == ["validation-0/v/0"]
    assert names(records.select(uid="a/1")) == ["a/1"]
    assert names(records.select(uid="v")) == ["validation-0/v/0", "validation-2/v/0"]
    assert [item.purpose for item in records.select(uid="v")] == [RolloutPurpose.VALIDATION] * 2
    assert records.select(uid="nobody") == []
    assert records.select(1)[0].ground_truth == "4"


def test_rewards_order_them(run_dir):
    records = RunRecords(run_dir)
    assert [item.reward for item in records.select(2, order="worst")] == [0.25, 0.5, 0.75]
    assert [item.reward for item in records.select(2, order="best", limit=2)] == [0.75, 0.5]


def test_what_a_resume_undid_is_not_shown(run_dir):
    with Journal.open(run_dir, max_mb=10, config_yaml="model: {path: none}\n") as journal:
        journal.add_event("resume", step=1, position=0, open=[])
        journal.rewind(1)
    records = RunRecords(run_dir)
    assert records.steps() == (1,), "step 2 was undone, and is not trained again yet"
    assert names(records.select()) == ["a/0", "a/1"]
    with Journal.open(run_dir, max_mb=10, config_yaml="model: {path: none}\n") as journal:
        trained(journal, 2, made("c", 0, 1.0))
    assert names(records.select()) == ["c/0"]
    assert names(records.select(2)) == ["c/0"]
    assert [item.purpose for item in records.select(uid="b")] == [RolloutPurpose.ROLLOUT] * 3, "they trained nothing"
    assert records.validations() == (0,)
    assert names(records.select(uid="v")) == ["validation-0/v/0"]
    assert records.metrics()["reward/mean"] == [(1, 0.5), (2, 1.0)]


def test_failures_are_found_over_the_whole_run_with_their_cause(run_dir):
    broken = Outcome.failed(ToolFailure("the disk is full"))
    with Journal.open(run_dir, max_mb=10, config_yaml="model: {path: none}\n") as journal:
        journal.add_event("resume", step=2, position=0, open=[])
        journal.add(made("d", 0, None, outcome=broken))
        trained(journal, 3, made("d", 0, 1.0, attempt=1))
    found = RunRecords(run_dir).select(failed=True)
    assert names(found) == ["d/0"]
    assert "failed at tool: the disk is full" in describe_trajectory(found[0])
    assert RunRecords(run_dir).select(3, failed=True) == []


def test_a_transcript_has_calls_results_parts_and_lengths(tmp_path):
    turns = (
        Turn(0, 2, 3, StopReason.STOP, (ToolCall("add", {"a": 1}),), (ToolResult("1", ToolStatus.ERROR, seconds=0.5),)),
    )
    messages = (
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "name": "add", "content": "two\nlines"},
    )
    row = Row((1, 2), (5, 6, 7), (1, 1, 0), (-0.5, -0.5, 0.0), (0, 0, -1), turns)
    score = Score(0.5, {"answer": 0.0, "form": 1.0}, {"why": "close"})
    with Journal.open(tmp_path, max_mb=10) as journal:
        journal.add(Trajectory("a", 0, (row,), Outcome.ended(StopReason.LENGTH), score, messages, data_source="sums"))
    text = describe_trajectory(RunRecords(tmp_path).select()[0])
    assert text.splitlines() == [
        "── a/0, sums: reward 0.5",
        "   reward parts: answer 0, form 1",
        '   reward extra: {"why": "close"}',
        "   truncated, stop reason length",
        "   1 turn, 2 prompt tokens, 3 response tokens (2 sampled), 0.00 s",
        "user       2+2",
        'assistant  → add({"a": 1})',
        "           [add: error, 0.50 s]",
        "tool       two",
        "           lines",
    ]
    fields = json.loads(to_json(RunRecords(tmp_path).select()[0]))
    assert fields["stop_reason"] == "length" and fields["reward_parts"] == {"answer": 0.0, "form": 1.0}
    assert fields["tool_calls"] == [
        [{"name": "add", "arguments": {"a": 1}, "problem": None, "status": "error", "seconds": 0.5}]
    ]


def test_a_difference_keeps_what_is_alike_and_marks_the_rest(run_dir):
    one, other = RunRecords(run_dir).select(uid="v")
    lines = [line.text for line in diff_trajectories(one, other)]
    assert lines[-3:] == [" user       2+2", "-assistant  five", "+assistant  four"]
    assert [line.text for line in diff_trajectories(one, one)][-1] == "the messages are the same"


def test_a_directory_that_is_no_run_is_refused_with_the_runs_near_it(run_dir):
    with pytest.raises(ConfigError, match=r"it holds runs: .*run"):
        RunRecords(run_dir.parent)
    with pytest.raises(ConfigError, match=r"there is no such directory\n +the run is .*run"):
        RunRecords(run_dir / "nowhere")
    with pytest.raises(RunError, match=r"has no validation: none ended yet, or data\.val_files is empty"):
        with Journal.open(run_dir / "other", max_mb=10):
            pass
        RunRecords(run_dir / "other").select(validation=True)


def test_a_run_is_found_by_its_last_name_and_the_newest_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("calculator", "other"):
        with Journal.open(tmp_path / "runs" / "treadle" / name, max_mb=10):
            pass
    with pytest.raises(ConfigError, match="did you mean 'runs/treadle/calculator'"):
        RunRecords(Path("calculator"))
    with pytest.raises(ConfigError, match="did you mean 'runs/treadle/calculator'"):
        RunRecords(Path("run/treadle/calculator"))
    with pytest.raises(ConfigError, match="runs here, the newest first: runs/treadle/"):
        RunRecords(Path("xyz"))


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_latest_is_the_newest_run_unless_a_directory_has_that_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command("show", "latest") == 2 and "latest: there are no runs below runs/\n" in capsys.readouterr().err
    assert command("metrics", "latest") == 2 and "latest: there are no runs below" in capsys.readouterr().err
    for age, name in enumerate(("new", "old")):
        with Journal.open(tmp_path / "runs" / name, max_mb=10):
            pass
        os.utime(tmp_path / "runs" / name / FILE_NAME, (1e9 - age, 1e9 - age))
    assert run_path("latest") == Path("runs/new") and run_path("runs/old") == Path("runs/old")
    (tmp_path / "latest").mkdir()
    assert run_path("latest") == Path("latest")


def test_what_may_be_left_out_is_not_asked_for(capsys):
    assert command("show") == 2
    assert "required: RUN\n" in capsys.readouterr().err


def test_the_command_prints_the_worst_first_and_says_how_many_there_are(run_dir, capsys):
    assert command("show", str(run_dir), "2", "--worst", "--limit", "1") == 0
    out, err = capsys.readouterr()
    assert out.startswith("── b/0, step 2: reward 0.25\n") and "b/1" not in out
    assert "1 of 3 trajectories, mean reward 0.500; --limit 3 prints all" in err
    assert command("show", str(run_dir), "--worst", "1") == 0, "a step may stand after options"
    assert capsys.readouterr().out.startswith("── a/0, step 1: reward 0\n")
    assert command("show", str(run_dir), "--diff", "a") == 0
    assert capsys.readouterr().out.startswith("--- a/0, step 1: reward 0\n"), "its worst sample beside its best"


def test_the_command_gives_json_line_by_line(run_dir, capsys):
    assert command("show", str(run_dir), "a", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["9"], "no trajectories of step 9; steps 1 to 2 are recorded"),
        (["9", "--validation"], "no trajectories of validation 9; validations 0 to 2 are recorded"),
        (["nobody"], "no trajectory of a task 'nobody'; a name is such as 'b/0'"),
        (["--failed"], "no trajectory failed"),
    ],
)
def test_the_command_says_why_there_is_nothing_to_show(run_dir, capsys, words, told):
    assert command("show", str(run_dir), *words) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--limit", "0"], ["--diff", "b/0"], ["a", "--diff", "nobody"], ["1", "2"]])
def test_the_command_refuses_what_it_cannot_do(run_dir, capsys, words):
    assert command("show", str(run_dir), *words) == 2
    assert "1 mistake" in capsys.readouterr().err


def test_what_models_wrote_is_shown_and_not_obeyed(tmp_path, capsys):
    with Journal.open(tmp_path, max_mb=10) as journal:
        journal.add(made(f"a{HOSTILE}", 0, 1.0, f"[bold]x[/bold]{HOSTILE}\n── b/0: reward 1"))
        journal.add_task(Task(f"a{HOSTILE}", (), HOSTILE))
    for words in ([], ["--json"], ["--diff", f"a{HOSTILE}/0", f"a{HOSTILE}/0"]):
        command("show", str(tmp_path), *words)
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err and "\x07" not in out + err
    command("show", str(tmp_path))
    shown = capsys.readouterr().out
    assert "[bold]x[/bold]\\x1b]0;owned" in shown
    assert "\n── b/0" not in shown, "no message can look like the heading of another trajectory"
    assert StringIO(shown).readline().startswith("── a\\x1b")
