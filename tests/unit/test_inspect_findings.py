"""Findings: each detector on a sample that has it, and on one that has not."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.rollouts import task
from tests.view_runs import annotated, made, sampled, trained
from treadle.cli.main import main
from treadle.inspect import findings
from treadle.inspect.findings import RunScan, scan_run
from treadle.inspect.transcript import message_fields
from treadle.journal import Journal


def kinds(run_dir: Path) -> dict[str, int]:
    return dict(scan_run(run_dir).counts)


def written(tmp_path: Path, *trajectories, truth: object = None) -> Path:
    run_dir = tmp_path / "run"
    with Journal.open(run_dir, max_mb=50, config_yaml="model: {path: none}\n") as journal:
        for uid in dict.fromkeys(item.uid for item in trajectories):
            journal.add_task(task(uid, ground_truth=truth))
        trained(journal, 1, *trajectories)
    return run_dir


def test_a_varied_group_has_no_findings(tmp_path):
    run_dir = written(tmp_path, made("a", 0, 0.0), made("a", 1, 1.0))
    assert kinds(run_dir) == {}
    assert scan_run(run_dir).is_whole


def test_equal_rewards_are_no_signal_and_equal_tokens_are_identical(tmp_path):
    same = tuple(range(100, 142))
    run_dir = written(tmp_path, made("a", 0, 1.0, ids=same), made("a", 1, 1.0, ids=same), made("a", 2, 1.0))
    found = scan_run(run_dir)
    assert dict(found.counts) == {"no_signal": 1, "identical": 1}
    details = {finding.kind: finding.detail for finding in found.findings}
    assert details["no_signal"] == "all 3 samples have reward 1"
    assert details["identical"] == "2 of 3 samples are the same 40 tokens"


def test_short_answers_or_a_few_of_a_group_may_be_the_same(tmp_path):
    """Where a task is solved, short answers are alike: a line that every run has teaches readers to skip it."""
    short, long = (9, 9, 8, 7, 6, 5), tuple(range(100, 142))
    few = [made("b", at, float(at), ids=long if at < 2 else tuple(range(at, at + 40))) for at in range(4)]
    assert kinds(written(tmp_path, *(made("a", at, float(at), ids=short) for at in range(4)), *few)) == {}


def test_a_reward_of_format_alone(tmp_path):
    gamed = made("a", 0, 0.2, parts={"answer": 0.0, "format": 1.0})
    honest = made("a", 1, 1.2, parts={"answer": 1.0, "format": 1.0})
    found = scan_run(written(tmp_path, gamed, honest)).findings
    assert [(item.kind, item.sample) for item in found] == [("format_only", 0)]


def test_repetition_is_found_with_its_place(tmp_path):
    loop = (*range(100, 120), *((7, 8, 9) * 30), 1, 2)
    found = scan_run(written(tmp_path, made("a", 0, 0.0, ids=loop), made("a", 1, 1.0))).findings
    assert [item.kind for item in found] == ["repetition"]
    assert found[0].detail == "3 tokens repeat 30 times from token 23"
    assert (found[0].row, found[0].start, found[0].end) == (0, 23, 113)


def test_a_long_answer_that_only_uses_few_tokens_is_no_repetition(tmp_path):
    digits = tuple(Random(3).choices(range(4), k=400))
    assert kinds(written(tmp_path, made("a", 0, 0.0, ids=digits), made("a", 1, 1.0))) == {}


def test_a_truth_in_the_prompt_that_the_answer_repeats(tmp_path):
    asked = {"role": "user", "content": "The answer is Lisbon, but say it yourself"}
    spoken = lambda said: ({**asked}, {"role": "assistant", "content": said})  # noqa: E731
    echo = replace(made("a", 0, 1.0), messages=spoken("It is Lisbon."))
    other = replace(made("a", 1, 0.0), messages=spoken("It is Porto."))
    found = scan_run(written(tmp_path, echo, other, truth="Lisbon")).findings
    assert [(item.kind, item.sample, item.message) for item in found] == [("echo", 0, 0)]
    text = asked["content"]
    assert text[found[0].start : found[0].end] == "Lisbon"


def few_shot(uid: str, sample: int, reward: float, example: str, said: str, asked: str = "and you?"):
    """A sample of one turn whose prompt ends its example with an assistant message."""
    given = ({"role": "user", "content": "how?"}, {"role": "assistant", "content": example})
    rest = ({"role": "user", "content": asked}, {"role": "assistant", "content": said})
    return replace(made(uid, sample, reward), messages=(*given, *rest))


def test_assistant_messages_of_a_prompt_are_not_the_models(tmp_path):
    """Neither what they write nor what they repeat; what the model writes after them is."""
    given = [few_shot("a", at, float(at), "assert True, it is Lisbon", "I say Porto") for at in (0, 1)]
    assert kinds(written(tmp_path / "given", *given, truth="Lisbon")) == {}
    own = [few_shot("a", at, float(at), "I say Porto", "assert True") for at in (0, 1)]
    found = scan_run(written(tmp_path / "own", *own)).findings
    assert [(item.kind, item.message) for item in found] == [("tampering", 3)]


def test_a_truth_behind_the_examples_of_a_prompt_is_found(tmp_path):
    samples = [few_shot("a", at, float(at), "an example", "Lisbon", asked="It is Lisbon") for at in (0, 1)]
    found = scan_run(written(tmp_path, *samples, truth="Lisbon")).findings
    assert [(item.kind, item.message) for item in found] == [("echo", 2)]


def test_the_longest_row_says_how_much_the_model_wrote(tmp_path):
    """An agent may begin with a short question of its own; one with more turns than messages wrote all of them."""
    short, long = sampled((21, 30, 31, 9, 8)), sampled((22, 30, 31, 9, 8))
    said = [few_shot("a", at, float(at), "os._exit(0)", "fine") for at in (0, 1)]
    rows = (short, replace(long, turns=long.turns * 3))
    found = scan_run(written(tmp_path, *(replace(item, rows=rows) for item in said))).findings
    assert [(item.kind, item.message) for item in found] == [("tampering", 1)]


def test_a_conversation_that_goes_on_in_another_row_is_the_models_from_its_first_turn_on(tmp_path):
    """A row for each turn, as where a template drops the reasoning of earlier ones."""
    rows = (sampled((21, 30, 31, 9, 8)), sampled((22, 30, 31, 9, 8)))
    said = [few_shot("a", at, float(at), "os._exit(0)", "fine") for at in (0, 1)]
    found = scan_run(written(tmp_path, *(replace(item, rows=rows) for item in said))).findings
    assert [(item.kind, item.message) for item in found] == [("tampering", 1)]


@pytest.mark.parametrize(
    ("truth", "asked", "found"),
    [
        (46368, "Is it 46368?", ["echo"]),
        (-271.5, "Is it -271.5?", ["echo"]),
        (46368, "Is it 46368.5 or 1,46368 or 946368?", []),
        (4636, "Is it 4636?", []),  # so short a number stands in many a prompt
        ([46368], "Is it [46368]?", []),
        (True, "Is it True?", []),
    ],
)
def test_a_number_in_the_prompt_that_the_answer_repeats(tmp_path, truth, asked, found):
    messages = ({"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {truth}"})
    samples = [replace(made("a", at, float(at)), messages=messages) for at in (0, 1)]
    assert list(kinds(written(tmp_path, *samples, truth=truth))) == found


def test_tampering_is_told_with_its_span_where_it_was_rewarded(tmp_path):
    code = "import os\nos._exit(0)  # done"
    found = scan_run(written(tmp_path, made("a", 0, 1.0, code), made("a", 1, 0.0, code))).findings
    assert [(item.kind, item.sample, item.message) for item in found] == [("tampering", 0, 1)]
    assert code[found[0].start : found[0].end] == "os._exit("
    assert "os._exit(0)" in found[0].excerpt


def test_a_span_is_in_the_field_that_was_matched(tmp_path):
    """Calls and lists of parts as the viewer shows them; letters are code points, whatever the plane."""

    def spoken(uid, **fields):
        return replace(made(uid, 0, 1.0), messages=({"role": "user", "content": "x"}, {"role": "assistant", **fields}))

    call = {"function": {"name": "bash", "arguments": "cd /repo && rm -rf tests"}}
    samples = [
        spoken("call", content="I will look.", tool_calls=[call]),
        spoken("emoji", content="🎉" * 30 + " then os._exit(0)"),
        spoken("list", content=[{"type": "text", "text": "os._exit(0)"}]),
        spoken("thinks", content="fine", reasoning_content="well, os._exit(0) would do"),
    ]
    found = {item.uid: item for item in scan_run(written(tmp_path, *samples)).findings if item.kind == "tampering"}
    told = {}
    for sample in samples:
        item = found[sample.uid]
        text = dict(message_fields(sample.messages[item.message]))[item.field]
        told[sample.uid] = (item.field, text[item.start : item.end])
    assert told == {
        "call": ("call-0", "rm -rf tests"),
        "emoji": ("content", "os._exit("),
        "list": ("content", "os._exit("),
        "thinks": ("reasoning", "os._exit("),
    }


def test_a_gap_on_tokens_of_the_weights_that_train_is_told_with_its_token(tmp_path):
    """Stale tokens differ by what was learned since: their gap is no finding."""
    fresh, stale = made("a", 0, 0.0), made("a", 1, 1.0, rows=(sampled((21, 30, 31, 32, 33, 40, 41), version=-1),))
    run_dir = written(tmp_path, fresh, stale)
    with Journal.open(run_dir, max_mb=50) as journal:
        journal.add_annotations([annotated(item, (0.0, -0.25, -0.5, -3.0, -1.0)) for item in (fresh, stale)])
    found = [item for item in scan_run(run_dir).findings if item.kind == "gap"]
    assert [(item.sample, item.row, item.start, item.end) for item in found] == [(0, 0, 6, 7)]
    assert "sampler -0.750, trainer -3.000 at token 6 of row 0" in found[0].detail


def test_a_scan_goes_on_where_its_time_ended_and_reads_new_steps_alone(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    looked = []
    real = findings._look_at
    monkeypatch.setattr(findings, "_look_at", lambda *given: (looked.append(given[2][0]), real(*given))[1])
    with Journal.open(run_dir, max_mb=50) as journal:
        for step in range(1, 4):
            trained(journal, step, made(f"t{step}", 0, 1.0), made(f"t{step}", 1, 1.0))
        journal.flush_blocking()
        scan = RunScan(run_dir)
        first = scan.report(budget_s=0.0)
        assert (first.groups, first.is_over, first.is_whole) == (1, False, False)
        second = scan.report(budget_s=0.0)
        assert (second.groups, second.is_over) == (2, False)
        whole = scan.report()
        assert (whole.groups, whole.is_over, whole.is_whole) == (3, True, True)
        assert whole == scan_run(run_dir)
        looked.clear()
        trained(journal, 4, made("t4", 0, 1.0), made("t4", 1, 1.0))
        journal.flush_blocking()
        assert scan.report().counts["no_signal"] == 4 and looked == ["t4"]
        journal.add_event("resume", step=2, position=0, open=[])
        journal.flush_blocking()
        assert {item.uid for item in scan.report().findings} == {"t1", "t2"}


def test_length_that_pays_is_told_once_for_the_run(tmp_path):
    run_dir = tmp_path / "run"
    with Journal.open(run_dir, max_mb=50) as journal:
        for step in range(1, 9):
            group = [made(f"t{step}", at, float(at > 3), ids=tuple(range(10 + at * step))) for at in range(8)]
            trained(journal, step, *group)
            journal.add_metrics(step, {"response_length/mean": 10.0 * step})
    found = scan_run(run_dir)
    assert found.counts["growth"] == 1
    assert any("grew from 15 to 75 tokens" in line for line in found.lines())


def test_failed_samples_and_dropped_bodies_are_left_alone(tmp_path):
    from treadle.errors import ToolFailure
    from treadle.types import Outcome

    broken = Outcome.failed(ToolFailure("x"))
    run_dir = written(tmp_path, made("a", 0, None, outcome=broken), made("a", 1, 1.0), made("a", 2, None, rows=()))
    assert kinds(run_dir) == {}


def test_a_scan_reads_the_newest_and_says_that_it_is_not_whole(tmp_path):
    run_dir = tmp_path / "run"
    with Journal.open(run_dir, max_mb=50) as journal:
        for step in range(1, 5):
            trained(journal, step, made(f"t{step}", 0, 1.0), made(f"t{step}", 1, 1.0))
    found = scan_run(run_dir, limit=4)
    assert (found.groups, found.trajectories, found.is_whole) == (2, 4, False)
    assert {item.uid for item in found.findings} == {"t3", "t4"}


@pytest.mark.parametrize("words", [["--findings"], ["--findings", "--json"]])
def test_the_command_prints_findings(tmp_path, capsys, words):
    run_dir = written(tmp_path, made("a", 0, 1.0), made("a", 1, 1.0))
    with pytest.raises(SystemExit) as ended:
        main(["show", str(run_dir), *words])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert ('"kind": "no_signal"' in out) if "--json" in words else ("groups without signal: 1 of 1 groups" in out)


def with_validations(tmp_path: Path, *trajectories, steps: tuple[int, ...] = (1,)) -> Path:
    """A run of one varied group, and validations of these trajectories."""
    run_dir = written(tmp_path, made("a", 0, 0.0), made("a", 1, 1.0))
    with Journal.open(run_dir, max_mb=50) as journal:
        for item in trajectories:
            journal.add(item)
        for step in steps:
            journal.add_metrics(step, {"validation/success": 0.5})
    return run_dir


def test_validations_are_looked_at_and_told_apart(tmp_path, capsys):
    form = {"answer": 0.0, "format": 1.0}
    run_dir = with_validations(tmp_path, made("validation-1/v", 0, 0.2, parts=form), made("validation-1/w", 0, 1.0))
    found = scan_run(run_dir)
    assert (dict(found.counts), dict(found.validation_counts)) == ({}, {"format_only": 1})
    assert (found.groups, found.trajectories, found.validation_trajectories, found.is_whole) == (1, 2, 2, True)
    (finding,) = found.findings
    assert (finding.uid, finding.step, finding.validation) == ("validation-1/v", None, 1)
    assert found.metrics() == {"findings/validation/format_only": 1.0}
    line = "rewards from format or length alone, in validation: 1 of 2 samples, such as validation-1/v/0"
    assert found.lines() == [line]
    with pytest.raises(SystemExit):
        main(["show", str(run_dir), "--findings"])
    shown = capsys.readouterr()
    assert line in shown.out and "2 trajectories of 1 groups and 2 of validations were read" in shown.err


def test_samples_of_a_validation_may_be_alike(tmp_path):
    """Nothing is learned from a validation, and greedy samples of a task are the same."""
    same = tuple(range(100, 142))
    run_dir = with_validations(tmp_path, *(made("validation-1/v", at, 1.0, ids=same) for at in range(3)))
    found = scan_run(run_dir)
    assert (dict(found.validation_counts), found.validation_trajectories) == ({}, 3)


def test_the_newest_validations_are_read_and_one_that_is_under_way_waits(tmp_path):
    form = {"answer": 0.0, "format": 1.0}
    validated = [made(f"validation-{step}/v{at}", 0, 0.2, parts=form) for step in (1, 2, 20) for at in range(3)]
    run_dir = with_validations(tmp_path, *validated, steps=(1, 2))
    assert {item.validation for item in scan_run(run_dir).findings} == {1, 2}
    few = scan_run(run_dir, limit=8)
    assert (few.validation_trajectories, few.is_whole) == (4, False)
    assert [item.validation for item in few.findings] == [2, 2, 2, 1]
