"""Arguments of treadle.train and treadle.rollout: which keys they set, what is written, and what is refused."""

import json
from datetime import date, time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.api.arguments import CallArguments, prepare
from treadle.api.prepared_run import PreparedRun
from treadle.config import TrainConfig, load
from treadle.config.plugin import load_object
from treadle.errors import ConfigError, Mistake
from treadle.rollout import AgentLoopBase, Environment
from treadle.rollout.tools.function import load_tools
from treadle.types import Task

MODEL = "treadle/tiny-calculator"
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(5)]


def call(*configs: str, kind: str = "train", **given: Any) -> PreparedRun:
    names = ("model", "tasks", "reward", "tools", "agent", "environment", "run_dir")
    values = {name: given.pop(name, None) for name in names}
    own = {name: given.pop(name) for name in ("steps", "validation_tasks") if name in given}
    keys = given.pop("keys", {}) | given
    return prepare(CallArguments(kind, configs, keys=keys, **values, **own))


def simple(**given: Any) -> PreparedRun:
    return call(**{"model": MODEL, "tasks": ROWS, "reward": "exact_match", "run_dir": "runs/it", **given})


def mistakes(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        simple(**given)
    return str(caught.value)


def calculate(expression: str) -> str:
    """Work it out."""
    return expression


def trl_reward(completions, prompts, solution, **kwargs):
    return [0.0 for _ in completions]


class Loop(AgentLoopBase):
    async def run(self, session: Any) -> None: ...


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_arguments_set_the_keys_they_stand_for():
    prepared = simple(steps=7, tools=[calculate], validation_tasks="v.jsonl", keys={"rollout.n": 4}, data={"seed": 3})
    config = prepared.config
    assert isinstance(config, TrainConfig)
    assert config.model.path == MODEL
    assert config.trainer.total_training_steps == 7
    assert config.rollout.n == 4
    assert config.data.seed == 3
    assert config.data.val_files == ("v.jsonl",)
    assert config.rollout.multi_turn.tools == (f"{__name__}:calculate",)
    assert config.rollout.agent.default_agent_loop == "tool_agent"
    assert "treadle.train, steps" in str(config.trainer.origin("total_training_steps"))


def test_what_a_call_leaves_open_is_filled_in_and_part_of_the_yaml():
    config = simple().config
    assert isinstance(config, TrainConfig)
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n) == (5, 5, 8)
    assert "train_batch_size: 5" in simple().to_yaml()
    assert simple(keys={"data.train_batch_size": 2}).config.actor.ppo_mini_batch_size == 2
    assert call("calculator", tasks=ROWS).config.data.train_batch_size == 32, "a config says it"


def test_nothing_is_written_before_the_config_is_right():
    simple(reward=lambda response: 1.0)
    mistakes(keys={"rollout.nn": 1})
    assert list(Path().iterdir()) == []


def test_the_yaml_is_the_same_config():
    prepared = simple(reward=lambda response: 1.0, tools=[calculate], keys={"rollout.val_kwargs": {"n": 3}})
    prepared.write()
    again = load(Path("runs/it/train.yaml"), ["logging.run_dir=runs/it"])
    assert again == prepared.config
    assert load(Path("runs/it/train.yaml")).logging.run_dir is None, "it is repeated elsewhere"
    assert Path("runs/it/train.yaml").read_text() == prepared.to_yaml()


def test_rows_become_a_file_with_names_of_their_own():
    for tasks in (ROWS, iter(ROWS), lambda: ROWS, (dict(row) for row in ROWS)):
        prepared = simple(tasks=tasks)
        assert [name.partition("-")[0] for name in prepared.inputs] == ["tasks"]
        rows = [json.loads(line) for line in next(iter(prepared.inputs.values())).splitlines()]
        assert rows == [{"uid": f"task-{at}", **row} for at, row in enumerate(ROWS)]
    assert simple(tasks=ROWS).inputs.keys() == simple(tasks=list(ROWS)).inputs.keys() != simple(tasks=ROWS[1:]).inputs


def test_tasks_of_ours_keep_everything():
    task = Task("mine", ({"role": "user", "content": "1+1="},), "2", data_source="sums", n=3, extra={"level": 1})
    (content,) = simple(tasks=[task]).inputs.values()
    prompt = [{"role": "user", "content": "1+1="}]
    wanted = {"level": 1, "uid": "mine", "prompt": prompt, "answer": "2", "data_source": "sums", "n": 3}
    assert json.loads(content) == wanted


def test_files_stay_files():
    for tasks, wanted in (
        ("a.jsonl", ("a.jsonl",)),
        (Path("b.parquet"), ("b.parquet",)),
        (["a.csv", "b.csv"], ("a.csv", "b.csv")),
    ):
        prepared = simple(tasks=tasks)
        assert prepared.config.data.train_files == wanted
        assert prepared.inputs == {}


def test_a_batch_is_no_larger_than_a_file_has_rows():
    def batch(tasks: Any) -> int:
        return simple(tasks=tasks).config.data.train_batch_size

    Path("few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("many.csv").write_text("prompt,answer\n" + "1+1=,2\n" * 300)
    Path("broken.json").write_text("[")
    assert (batch("few.jsonl"), batch(["few.jsonl", "few.jsonl"]), batch("many.csv")) == (5, 10, 64)
    assert batch("broken.json") == batch("gone.jsonl") == batch("seeds:3") == 64, "the run says what is wrong"


class Columns:
    """What a pandas DataFrame looks like."""

    columns = ("prompt", "answer")

    def to_dict(self, orient: str) -> list[dict[str, str]]:
        assert orient == "records"
        return ROWS

    def __iter__(self):
        return iter(self.columns)


def test_a_data_frame_gives_its_rows():
    assert simple(tasks=Columns()).inputs == simple(tasks=ROWS).inputs


def test_data_sets_and_data_frames_themselves_give_their_rows():
    datasets = import_module("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    assert simple(tasks=rows).inputs == simple(tasks=ROWS).inputs
    assert simple(tasks=rows.to_pandas()).inputs == simple(tasks=ROWS).inputs
    assert simple(tasks=rows.select(range(2))).inputs == simple(tasks=ROWS[:2]).inputs
    assert simple(tasks=rows.to_iterable_dataset()).inputs == simple(tasks=ROWS).inputs
    assert "tasks: is a map with 'train', not rows" in mistakes(tasks=datasets.DatasetDict({"train": rows}))
    chat = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}])
    (written,) = simple(tasks=chat).inputs.values()
    assert json.loads(written)["prompt"] == [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": 3}, "tasks: must be rows as dicts, a file"),
        ({"tasks": []}, "tasks: has no rows"),
        ({"tasks": {"train": ROWS}}, "tasks: is a map with 'train', not rows"),
        ({"tasks": [*ROWS, 5]}, "tasks[5]: must be a dict with named fields, got int"),
        ({"tasks": [{"prompt": object()}]}, "tasks[0]['prompt']: cannot be written as JSON"),
        ({"tasks": [{"prompt": "a", "level": float("nan")}]}, "tasks[0]['level']: cannot be written as JSON"),
        ({"tasks": lambda number: ROWS}, "tasks: cannot be called"),
        ({"reward": 5}, "reward: must be a function, a class or the name of one, got int"),
        ({"reward": []}, "reward: names no function"),
        ({"reward": "exact_matsh"}, "did you mean 'exact_match'?"),
        ({"tools": [3]}, "tools[0]: must be a function"),
        ({"agent": calculate}, "agent: the function 'calculate' cannot be called with base_url, api_key and task"),
        ({"step": 5}, "step: treadle.train has no argument of this name\n    did you mean 'steps'?"),
        ({"num_generations": 8}, "TRL's num_generations is the key rollout.n here: write rollout={'n': 8}"),
        ({"learning_rate": 1e-5}, "write actor={'optim.lr': 1e-05}"),
        ({"n": 8}, "n is the key rollout.n: write rollout={'n': 8}"),
        ({"rollout_n": 8}, "rollout_n is the key rollout.n: write rollout={'n': 8}"),
        ({"lr": 1e-5}, "write actor={'optim.lr': 1e-05}; there is critic.optim.lr too"),
        (
            {"epochs": 1},
            "is it actor.ppo_epochs or critic.ppo_epochs or trainer.total_epochs? A key is written actor={",
        ),
        ({"nonsense": 1}, "it takes model, tasks, reward, tools"),
        ({"use_vllm": True}, "TRL's use_vllm is the key rollout.name here"),
        ({"train_dataset": ROWS}, "TRL's train_dataset is tasks=… here"),
        ({"reward_funcs": [len]}, "TRL's reward_funcs is reward=… here"),
        ({"reward": trl_reward}, "reward: 'trl_reward' takes completions, as TRL's rewards do"),
        ({"reward": {"one": trl_reward, "two": "math"}}, "write `def trl_reward(response, solution, **kwargs)`"),
        ({"model": torch.nn.Linear(1, 1)}, "model: must be a directory or a name, got a Linear in memory"),
        (
            {"model": None},
            "model: is required: Hugging Face model directory, or the name of a bundled model (model.path)",
        ),
        ({"reward": None}, "reward: is empty: without a reward nothing trains (reward.functions)\n    give reward=…"),
        ({"tasks": None}, "tasks: is empty: there is nothing to train on (data.train_files)\n    give tasks=["),
        ({"tasks": ["1+1="]}, "tasks[0]: '1+1=' is a text, and a text names a file here"),
        ({"tasks": "What is 1 + 1?"}, "write rows: tasks=[{'prompt'"),
        ({"rollout": 5}, "rollout: is a section, got int"),
        ({"keys": {"rollout.nn": 5}}, "rollout.nn: no such key"),
        ({"keys": {"rollout.n": "many"}}, "from code (treadle.train, rollout.n)"),
        ({"keys": {"rollout.n": object()}}, "rollout.n: must be a number, a text, a list or a map, got object"),
        ({"steps": 0}, "from code (treadle.train, steps)"),
        ({"model": 3}, "from code (treadle.train, model)"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_the_fix(given, message):
    assert message in mistakes(**given)


def test_dates_of_a_row_become_texts():
    (written,) = simple(
        tasks=[{"prompt": "a", "answer": "b", "day": date(2024, 2, 29), "at": time(1, 2)}]
    ).inputs.values()
    assert json.loads(written)["day"] == "2024-02-29" and json.loads(written)["at"] == "01:02:00"


def test_all_mistakes_come_together():
    found = mistakes(tasks=3, reward=5, step=1)
    assert all(name in found for name in ("tasks: ", "reward: ", "step: "))


def test_a_function_that_is_at_fault_is_called_what_the_call_calls_it():
    """And not by the file that it was copied to; rows have their number."""
    prepared = simple(reward=lambda completion: 1.0)
    (file,) = [name for name in prepared.places if name.endswith(".pkl")]
    tasks = next(name for name in prepared.places if name.endswith(".jsonl"))
    problem = f"{file + ':reward'!r} needs a parameter 'completion'; see {tasks}:3"
    told = str(prepared.explain(ConfigError([Mistake("reward.functions.reward.path", problem)])))
    assert "'reward' needs a parameter 'completion'; see tasks, row 3" in told


def test_a_key_in_a_fix_is_written_as_an_argument():
    prepared = simple()
    tasks = next(name for name in prepared.places if name.endswith(".jsonl"))
    found = ConfigError([Mistake(tasks, "rows have no 'answer'", fix="set data.answer_key: solution; or give one")])
    assert str(prepared.explain(found)) == (
        'tasks: rows have no \'answer\'\n    write data={"answer_key": "solution"}; or give one'
    )


def test_a_tool_that_is_none_is_called_by_its_place_in_the_call():
    prepared = simple(tools=[calculate, int])
    with pytest.raises(ConfigError) as caught:
        load_tools(dict(enumerate(prepared.config.rollout.multi_turn.tools)))
    told = str(prepared.explain(caught.value))
    assert told.startswith("tools[1]: builtins:int: the class int has no method") and "rollout.multi_turn" not in told


def test_endless_tasks_are_refused(monkeypatch):
    monkeypatch.setattr("treadle.api.tasks.MAX_ROWS", 100)
    assert "has more than 100 rows: it may have no end" in mistakes(tasks=iter(lambda: {"prompt": "a"}, None))


def brief(response: str) -> float:
    return 1.0 / (1 + len(response))


def test_rewards_are_functions_names_lists_and_dicts():
    def functions(reward: Any) -> dict[str, tuple[str, float]]:
        found = simple(reward=reward).config.reward.functions
        return {name: (item.path.rpartition(":")[2], item.weight) for name, item in found.items()}

    assert functions(brief) == {"brief": ("brief", 1.0)}
    assert functions("math") == {"math": ("math", 1.0)}
    assert functions(["exact_match", brief]) == {"exact_match": ("exact_match", 1.0), "brief": ("brief", 1.0)}
    assert list(functions([lambda response: 1.0, lambda response: 2.0])) == ["reward", "reward_2"]
    weighted = {"right": "exact_match", "short": {"path": brief, "weight": 0.1}}
    assert functions(weighted) == {"right": ("exact_match", 1.0), "short": ("brief", 0.1)}


def test_a_reward_that_takes_all_samples_of_a_task_has_scope_group():
    prepared = simple(reward=lambda responses, scores: [0.0 for _ in responses])
    assert prepared.config.reward.functions["reward"].effective_scope() == "group"


def test_a_reward_replaces_those_of_the_config():
    assert list(call("calculator", run_dir="runs/it").config.reward.functions) == ["answer"]
    assert list(call("calculator", reward=brief, run_dir="runs/it").config.reward.functions) == ["brief"]


def test_agents_and_environments_are_classes_or_names():
    class Game(Environment): ...

    assert simple(agent=Loop).config.rollout.agent.default_agent_loop == f"{__name__}:Loop"
    assert simple(agent="tool_agent").config.rollout.agent.default_agent_loop == "tool_agent"
    agent = simple(agent=lambda base_url, api_key, task: 1.0).config.rollout.agent
    assert agent.default_agent_loop == "function_agent"
    assert ".pkl:" in agent.loops["function_agent"].kwargs["function"]
    rollout = simple(environment=Game).config.rollout
    assert rollout.agent.default_agent_loop == "environment_agent"
    assert rollout.multi_turn.environment is not None and rollout.multi_turn.environment.endswith(".pkl:Game")


def test_a_key_that_takes_an_import_path_takes_the_function():
    prepared = simple(keys={"algorithm.adv_estimator": lambda inputs, algorithm: None})
    prepared.write()
    estimator = prepared.config.algorithm.adv_estimator  # type: ignore[attr-defined]
    assert estimator.startswith("runs/it/inputs/adv_estimator-")
    assert callable(load_object(estimator, "algorithm.adv_estimator"))


def test_functions_are_kept_beside_their_source():
    prepared = simple(reward=lambda response: 1.0)
    prepared.write()
    (source,) = Path("runs/it/inputs").glob("reward-*.py")
    assert "lambda response: 1.0" in source.read_text()


def test_the_same_call_names_the_same_files_and_another_function_another():
    one, same, other = (simple(reward=lambda response, bonus=bonus: bonus) for bonus in (1, 1, 2))
    assert one.config == same.config != other.config


def test_calls_without_a_directory_have_one_each():
    calls = [call(model=MODEL, tasks=ROWS, reward="exact_match") for _ in range(3)]
    assert len({prepared.run_dir for prepared in calls}) == 3, "in the same second, and before any of them is written"
    first = calls[0]
    assert first.config.logging.experiment_name == first.run_dir.name


def test_a_directory_below_here_is_named_from_here(tmp_path):
    assert simple(run_dir=tmp_path / "runs" / "it").config == simple(run_dir="runs/it").config


def test_functions_of_this_process_are_refused_by_a_cluster_elsewhere():
    distant = {"cluster.backend": "ray", "cluster.address": "ray://head:10001"}
    assert "reward: is a function that only this process knows" in mistakes(reward=lambda response: 1.0, keys=distant)
    assert simple(reward=brief, keys=distant), "what can be imported may go anywhere"
    assert simple(reward=lambda response: 1.0, keys={"cluster.backend": "ray"}), "Ray on this machine sees the files"


def test_a_rollout_has_no_trainer():
    config = simple(kind="rollout").config
    assert not isinstance(config, TrainConfig)
    assert config.rollout.n == 1
