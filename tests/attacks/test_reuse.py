"""A result is of what was asked: a run directory of another model, sampling, prompt or reward is never reported."""

import json
import sys
from pathlib import Path

import pytest

from tests.rollouts import save_model
from treadle.config import load
from treadle.errors import ConfigError
from treadle.journal import Journal, JournalReader
from treadle.rollout.run import RolloutResult, run_rollout

SCRIPT = """
from pathlib import Path

def answer(request, rng):
    with Path("asked.txt").open("a") as file:
        file.write("x")
    return f"I think it is #### {rng.choice([1, 2])}"
"""
HELPER = "BONUS = 0.0\n"
REWARD = """
from helper_of_reuse import BONUS

def score(response):
    return 0.25 + BONUS
"""
CONFIG = """
model: {path: model}
data: {train_files: tasks.jsonl, val_files: tasks.jsonl, prompt_key: question}
rollout: {name: scripted, n: 2, val_kwargs: {n: 2}, scripted: {script: "script_of_reuse:answer"}}
reward: {num_workers: 0, functions: {answer: {path: number_match}, own: {path: "reward_of_reuse:score", weight: 0.5}}}
logging: {run_dir: run}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_model(tmp_path / "model")
    for name, text in (("script", SCRIPT), ("helper", HELPER), ("reward", REWARD)):
        (tmp_path / f"{name}_of_reuse.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"{name}_of_reuse", raising=False)  # of another test's folder
    write_tasks()
    (tmp_path / "my.yaml").write_text(CONFIG)
    return tmp_path


def write_tasks(question: str = "What is {} + 1?", answer: str = "#### 2") -> None:
    rows = [{"question": question.format(at), "answer": answer} for at in range(3)]
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def roll_out(*words: str, validation: bool = False, fresh: bool = False) -> RolloutResult:
    return run_rollout(load("my.yaml", words), validation=validation, fresh=fresh)


def asked() -> int:
    return len(Path("asked.txt").read_text())


def rewards() -> list[float]:
    with JournalReader.open(Path("run")) as reader:
        return [line.reward.value for line in reader.headlines() if line.reward]


def edit(file: str, old: str, new: str) -> None:
    path = Path(file)
    path.write_text(path.read_text().replace(old, new))


CHANGES = {
    "temperature": (["rollout.temperature=0.5"], None, "rollout.temperature: 0.5 now"),
    "seed": (["rollout.seed=7"], None, "rollout.seed"),
    "length": (["rollout.response_length=64"], None, "rollout.response_length"),
    "turns": (["rollout.agent.default_agent_loop=tool_agent"], None, "rollout.agent.default_agent_loop"),
    "template": ([], ("model/chat_template.jinja", "assistant", "model"), "contents of model.path"),
    "script": ([], ("script_of_reuse.py", "I think", "I know"), "source of script_of_reuse:answer"),
    "prompts": ([], ("tasks.jsonl", "What is", "How much is"), "data.train_files: 3 tasks have another prompt"),
}


@pytest.mark.parametrize(("words", "edited", "says"), CHANGES.values(), ids=CHANGES)
def test_what_decides_the_tokens_is_compared_and_the_change_is_named(words, edited, says):
    assert roll_out().summary.num_trajectories == 6
    before, sent = (Path("run") / "run.json").read_text(), asked()
    if edited:
        edit(*edited)
    with pytest.raises(ConfigError) as refused:
        roll_out(*words)
    assert says in str(refused.value) and "--fresh" in str(refused.value)
    assert asked() == sent
    assert (Path("run") / "run.json").read_text() == before, "a refused start leaves no trace"
    roll_out(*words, fresh=True)
    assert asked() == 2 * sent and Path("run.1", "journal.sqlite").exists()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("rollout.agent.max_concurrent_sessions=2",),
        ("rollout.limits.request_timeout_s=9",),
        ("rollout.scripted.latency_s=0.001", "rollout.failures.session_retries=3"),
        ("reward.timeout_s=5", "reward.success_threshold=0.5"),
        ("logging.journal_max_mb=8",),
    ],
)
def test_what_leaves_the_tokens_alone_is_reused_without_a_request(words):
    roll_out()
    sent, first = asked(), rewards()
    assert roll_out(*words).summary.num_trajectories == 6
    assert (asked(), rewards()) == (sent, first)


@pytest.mark.parametrize(
    ("words", "edited", "becomes"),
    [
        (["reward.functions.own.weight=2"], None, {0.5, 1.5}),
        (["~reward.functions.answer"], None, {0.125}),
        ([], ("tasks.jsonl", "#### 2", "#### 3"), {0.125}),
    ],
)
def test_where_only_the_reward_changed_the_same_tokens_are_scored_again(words, edited, becomes):
    roll_out()
    sent = asked()
    assert set(rewards()) == {0.125, 1.125}
    if edited:
        edit(*edited)
    result = roll_out(*words)
    assert result.summary.num_trajectories == 6 and asked() == sent
    assert set(rewards()) == becomes
    roll_out(*words)
    with JournalReader.open(Path("run")) as reader:
        assert reader.counts().superseded == 6, "what was scored again is reused after that"


@pytest.mark.parametrize("file", ["reward_of_reuse.py", "helper_of_reuse.py"])
def test_the_source_of_a_reward_function_and_of_what_it_imports_counts(file):
    roll_out()
    sent = asked()
    edit(file, "0.", "0.0")
    roll_out()
    with JournalReader.open(Path("run")) as reader:
        assert reader.counts().superseded == 6 and asked() == sent


def test_a_training_set_rolled_out_is_no_validation_of_the_same_tasks():
    roll_out()
    with pytest.raises(ConfigError, match=r"rollout.val_kwargs.temperature"):
        roll_out(validation=True)


def test_samples_of_a_training_run_never_become_an_evaluation():
    with Journal.open(Path("run"), max_mb=16) as journal:
        journal.add_event("resume", step=0, version=0, position=0, open=[])
    with pytest.raises(ConfigError, match="holds a training run"):
        roll_out()


def test_trajectories_that_say_nothing_of_what_they_were_made_from_are_not_reported():
    roll_out()
    with JournalReader.open(Path("run")) as reader:
        (first, *_) = list(reader.trajectories())
    Path("run").rename("stamped")
    with Journal.open(Path("run"), max_mb=16) as journal:
        journal.add(type(first.trajectory)(first.trajectory.uid, 0, first.trajectory.rows, first.trajectory.outcome))
    with pytest.raises(ConfigError, match="say nothing about what they were made from"):
        roll_out()


def test_default_directories_are_named_after_the_config_and_the_purpose():
    edit("my.yaml", "logging: {run_dir: run}", "")
    assert roll_out().run_dir == Path("runs/treadle/my-rollout")
    assert roll_out(validation=True).run_dir == Path("runs/treadle/my-validation")
    assert load("my.yaml").logging.directory() == "runs/treadle/my"
    assert load("calculator").logging.directory() == "runs/treadle/calculator"
    assert load("my.yaml", ["logging.experiment_name=x"]).logging.directory() == "runs/treadle/x"
