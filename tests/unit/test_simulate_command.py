"""`treadle simulate`: what it prints, what it refuses, and that it prints the same twice."""

import json
import re
import shlex
from pathlib import Path

import pytest

from treadle.cli.main import build_parser, main
from treadle.cli.parser import parse
from treadle.config import TrainConfig, loads
from treadle.errors import ConfigError
from treadle.journal import Journal
from treadle.simulate.workload import RecordedWorkload, plan_from_trajectory
from treadle.types import Outcome, Row, StopReason, Trajectory, Turn

CONFIG = """
model: {path: unused}
data: {train_files: unused, train_batch_size: 4}
reward: {functions: {answer: {path: exact_match}}}
rollout: {n: 4, prompt_length: 100, response_length: 400}
actor: {ppo_mini_batch_size: 4}
trainer: {}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_it_states_what_it_assumes_compares_every_mode_and_names_the_best(capsys, config):
    status, out, _ = run(capsys, config, "--gpus", "8", "--steps", "2", "--push-s", "0.5")
    assert status == 0
    for shown in ("--train-tokens-per-s", "--push-s", "0.5", "sync", "one_step_off", "fully_async 1", "fully_async 4"):
        assert shown in out
    assert "best: fully_async" in out and "× sync" in out
    assert "waiting for groups" in out and "rollout.agent.max_concurrent_sessions=" in out
    assert "rollout_correction.rollout_is" in out


def test_it_prints_the_same_every_time(capsys, config):
    words = (config, "--gpus", "4", "--steps", "2", "--modes", "fully_async")
    first, again, other = run(capsys, *words), run(capsys, *words), run(capsys, *words, "--seed", "1")
    assert first == again != other


@pytest.mark.parametrize("words", [[], ["--splits", "1"]])
def test_one_gpu_is_enough_for_sync(capsys, config, words):
    status, out, err = run(capsys, config, "--gpus", "1", "--modes", "sync", "--steps", "1", *words)
    assert status == 0, err
    assert "1 in turn" in out


def test_json_has_every_number(capsys, config):
    _, out, _ = run(capsys, config, "--gpus", "4", "--steps", "2", "--modes", "sync,one_step_off", "--json")
    found = json.loads(out)
    assert found["assumptions"]["response_tokens"] == 40
    assert {item["setup"]["mode"] for item in found["forecasts"]} == {"sync", "one_step_off"}
    assert found["forecasts"][found["best"]]["step_s"] > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--modes", "slow"], "'slow' is none of sync, one_step_off, fully_async"),
        (["--splits", "a"], "is not a list of whole numbers"),
        (["--splits", "9"], "9 is not between 1 and 7"),
        (["--steps", "0"], "0 is not between 1"),
        (["--push-s", "-1"], "--push-s: -1 is less than 0"),
        (["--turns", "9", "--tool-tokens", "100"], "leave no room in rollout.response_length 400"),
        (["--like", "nowhere"], "there is no such directory"),
        (["--gpus", "1"], "1 GPUs cannot be split"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_by_name(capsys, config, words, problem):
    status, _, err = run(capsys, config, *(["--gpus", "8"] if "--gpus" not in words else []), *words)
    assert status == 2
    assert problem in err


def test_a_rollout_without_a_trainer_has_no_schedules(capsys, tmp_path):
    path = tmp_path / "alone.yaml"
    path.write_text("model: {path: unused}", encoding="utf-8")
    status, _, err = run(capsys, str(path))
    assert status == 2
    assert "only training has schedules" in err


def recorded(uid: str, tokens: tuple[int, ...], outcome: Outcome) -> Trajectory:
    turns, ids, at = [], [], 0
    for number, count in enumerate(tokens):
        seen = 3 if number + 1 < len(tokens) else 0
        turns.append(Turn(at, at + count, at + count + seen, StopReason.STOP, tool_s=0.5 if seen else 0.0))
        ids += [1] * count + [0] * seen
        at += count + seen
    row = Row((1,) * 7, tuple(ids), tuple(ids), (0.0,) * len(ids), tuple(item - 1 for item in ids), tuple(turns))
    return Trajectory(uid, 0, (row,), outcome)


def test_sessions_can_be_those_of_a_recorded_run(capsys, config, tmp_path):
    done, failed = Outcome.ended(StopReason.STOP), Outcome.ended(StopReason.FAILURE)
    with Journal.open(tmp_path / "run", max_mb=10) as journal:
        journal.add(recorded("a", (5, 20), done))
        journal.add(recorded("b", (40,), done))
    workload = RecordedWorkload.read(tmp_path / "run", seed=0)
    plans = {workload.plan_of(f"t{at}", 0) for at in range(50)}
    assert {tuple(answer.tokens for answer in plan.answers) for plan in plans} == {(5, 20), (40,)}
    assert {plan.context_tokens for plan in plans} == {7 + 3, 7}
    assert workload.mean.tool_s == 0.25
    assert plan_from_trajectory(recorded("c", (4, 6), failed)).sampled_tokens == 10
    status, out, _ = run(capsys, config, "--like", str(tmp_path / "run"), "--gpus", "4", "--steps", "1")
    assert status == 0
    assert "2  recorded sessions: 32 tokens" in out and "--response-tokens" not in out


def test_an_empty_run_has_nothing_to_be_like(tmp_path):
    Journal.open(tmp_path, max_mb=10).close_blocking()
    with pytest.raises(ConfigError, match="no session in it ended well"):
        RecordedWorkload.read(tmp_path, seed=0)


PAGE = (Path(__file__).parents[2] / "docs" / "simulating.md").read_text(encoding="utf-8")


def test_the_commands_and_the_config_on_the_page_are_understood():
    commands = re.findall(r"^(?:    |\$ )treadle (simulate .+)$", PAGE, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        assert parse(build_parser(), shlex.split(command)).words
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert isinstance(loads(text), TrainConfig)


def test_the_page_names_every_assumption_and_its_default(capsys, config):
    _, out, _ = run(capsys, config, "--gpus", "2", "--steps", "1", "--modes", "sync")
    for option, value in re.findall(r"^  (--[a-z-]+) +([\d.,]+)  ", out, re.MULTILINE):
        shown = dict(re.findall(r"^  (--[a-z-]+) +([\d.,]+)  ", PAGE, re.MULTILINE))
        assert option in shown
        if option not in (
            "--response-tokens",
            "--prompt-tokens",
            "--turns",
            "--tool-s",
            "--tool-tokens",
            "--push-overlap",
        ):
            assert shown[option] == value
