"""TRL scripts, read and never run: every argument is in the config, or is listed with a reason."""

import ast
import sys
from pathlib import Path

import pytest
import yaml

from treadle.config import TrainConfig, loads
from treadle.errors import ConfigError
from treadle.migrate.laptop import laptop_config
from treadle.migrate.python_source import Computed, PythonScript
from treadle.migrate.trl import migrate_trl
from treadle.migrate.trl_arguments import DIRECT, TABLES
from treadle.types import Outcome, StopReason, Task, Trajectory

SCRIPT = Path(__file__).parents[1] / "golden" / "trl_grpo.py"
QUICK_START = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=accuracy_reward, train_dataset=dataset)
trainer.train()
"""


def migrated(tmp_path: Path, text: str):
    (tmp_path / "train.py").write_text(text)
    return migrate_trl(tmp_path / "train.py")


def config_of(tmp_path: Path, arguments: str) -> TrainConfig:
    text = (
        "def score(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
        f"args = GRPOConfig({arguments})\n"
        'GRPOTrainer("m/x", score, args, load_dataset("a/b", split="train"))\n'
    )
    config = loads(migrated(tmp_path, text).migration.yaml, "test")
    assert isinstance(config, TrainConfig)
    return config


def lost(found) -> dict[str, str]:
    return {entry.old: entry.reason for entry in found.migration.entries if entry.kind == "none"}


def test_the_script_of_the_golden_folder_becomes_a_config_that_loads():
    found = migrate_trl(SCRIPT)
    config = loads(found.migration.yaml, "test")
    assert isinstance(config, TrainConfig)
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct", "a constant of the script"
    assert config.data.train_files == ("hub:openai/gsm8k/main/train",)
    assert config.data.val_files == ("hub:openai/gsm8k/main/test",)
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (8, 4), "8 × 4 and 8 × 2 of 4 a task"
    assert config.trainer.total_training_steps == 50 and config.checkpoint.save_freq == 25, "two updates in a step"
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.actor.kl_loss_type) == (True, 0.04, "k3")
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high, config.actor.clip_ratio_c) == (0.2, 0.28, None)
    assert config.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert not config.algorithm.norm_adv_by_std_in_grpo
    assert config.actor.optim.betas == (0.9, 0.95) and config.actor.optim.weight_decay == 0.0
    assert (config.rollout.name, config.rollout.n, config.rollout.overlong_prompts) == ("vllm", 4, "truncate_left")
    assert {name: item.weight for name, item in config.reward.functions.items()} == {"correctness": 1, "brevity": 0.1}
    assert config.logging.logger == ("console", "wandb")
    lora = config.actor.lora
    assert (lora.r, lora.alpha, lora.target_modules) == (16, 8.0, ("q_proj", "v_proj")), (
        "peft's defaults, where not given"
    )


def test_what_has_no_counterpart_is_listed_by_name_with_the_reason():
    found = migrate_trl(SCRIPT)
    reasons = lost(found)
    assert reasons.keys() == {"seed", "top_entropy_quantile", "reward_funcs", "peft_config.lora_dropout"}
    assert reasons["seed"] == "only running the script would tell its value"
    assert "no dropout" in reasons["peft_config.lora_dropout"]
    assert all(f"#   {name}: " in found.migration.yaml for name in reasons), "and at the end of the YAML"
    assert any("train_dataset is changed after it is loaded" in note for note in found.migration.notes)


def test_every_argument_of_both_calls_is_in_the_report():
    calls = [node for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.Call)]
    named = {
        item.arg
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("GRPOConfig", "GRPOTrainer")
        for item in call.keywords
    }
    reported = {entry.old.partition(".")[0] for entry in migrate_trl(SCRIPT).migration.entries}
    assert named - reported == {"args"}


def test_trls_quick_start_becomes_a_config(tmp_path):
    found = migrated(tmp_path, QUICK_START)
    config = loads(found.migration.yaml, "test")
    assert config.reward.functions["accuracy_reward"].path == "math"
    assert (config.data.answer_key, config.data.train_files) == ("solution", ("hub:trl-lib/DeepMath-103K/data/train",))
    assert (config.rollout.n, config.data.train_batch_size, config.rollout.response_length) == (8, 1, 512)
    assert "TRL's default" in found.migration.yaml and lost(found) == {}


@pytest.mark.filterwarnings("ignore::treadle.config.ConfigWarning")
@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("loss_type='grpo'", "actor.loss_agg_mode", "seq-mean-token-mean"),
        ("loss_type='cispo'", "actor.policy_loss.loss_mode", "cispo"),
        ("importance_sampling_level='sequence', loss_type='grpo'", "actor.policy_loss.loss_mode", "gspo"),
        ("scale_rewards='none'", "algorithm.norm_adv_by_std_in_grpo", False),
        ("top_k=50", "rollout.top_k", 50),
        ("top_k=0", "rollout.top_k", -1),
        ("min_p=0.1", "rollout.min_p", 0.1),
        ("bf16=False", "actor.dtype", "fp32"),
        ("per_device_train_batch_size=16, gradient_accumulation_steps=4", "data.train_batch_size", 8),
        ("generation_batch_size=32, per_device_train_batch_size=16", "actor.ppo_mini_batch_size", 2),
        ("sync_ref_model=True, ref_model_sync_steps=64, beta=0.1", "ref.sync_freq", 64),
        ("ref_model_sync_steps=64", "ref.sync_freq", -1),
        ("max_tool_calling_iterations=3", "rollout.multi_turn.max_assistant_turns", 4),
        ("num_train_epochs=2.0", "trainer.total_epochs", 2),
        ("max_steps=-1", "trainer.total_training_steps", None),
        ("'out'", "logging.run_dir", "out"),
    ],
)
def test_an_argument_becomes_its_key(tmp_path, arguments, key, value):
    found = config_of(tmp_path, arguments)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_a_ratio_for_a_sequence_says_what_differs(tmp_path):
    found = migrated(tmp_path, 'GRPOConfig(importance_sampling_level="sequence")\nGRPOTrainer("m/x", None)\n')
    assert any("loss_type=dapo, TRL weighs sequences by their tokens" in note for note in found.migration.notes)


def test_every_key_that_an_argument_becomes_exists():
    config = loads(migrate_trl(SCRIPT).migration.yaml, "test")
    for key in [*DIRECT.values(), *(key for key, _ in TABLES.values())]:
        value = config
        for part in key.split("."):
            assert hasattr(value, part), key
            value = getattr(value, part)


def test_a_reward_of_the_script_is_called_as_trl_calls_it(tmp_path, monkeypatch):
    found = migrate_trl(SCRIPT)
    assert (found.columns, found.functions) == (("answer", "level"), ("correctness", "brevity"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # nothing of the script but these functions is needed
    names: dict = {}
    exec(compile(found.files["reward.py"], "reward.py", "exec"), names)
    task = Task("one", ({"role": "user", "content": "3+4="},), "#### 7", extra={"level": "1"})
    trajectory = Trajectory("one", 0, (), Outcome.ended(StopReason.STOP))
    assert names["correctness_score"](task, trajectory, "so #### 7") == 1.0
    assert names["correctness_score"](task, trajectory, "so #### 8") == 0.0
    assert names["brevity_score"](task, trajectory, "") == 0.0, "None counts as 0"
    assert "load_dataset" not in found.files["reward.py"] and "def extract" in found.files["reward.py"]


def test_rewards_for_texts_get_texts_and_only_what_they_name(tmp_path):
    found = migrated(
        tmp_path,
        "def short(completions):\n    return [float(len(done) < 5) for done in completions]\n"
        'GRPOTrainer(model="a/b", reward_funcs=[short, "org/reward-model"], train_dataset=rows)\n',
    )
    names: dict = {}
    exec(found.files["reward.py"], names)
    task = Task("one", ({"role": "user", "content": "?"},), None, extra={"other": 1})
    assert names["short_score"](task, Trajectory("one", 0, (), Outcome.ended(StopReason.STOP)), "abc") == 1.0
    config = yaml.safe_load(found.migration.yaml)
    assert config["reward"]["classifiers"] == {"reward-model": {"path": "org/reward-model"}}
    assert config["data"]["train_files"] == "???" and "set data.train_files" in lost(found)["train_dataset"]


def test_tools_of_the_script_become_a_file(tmp_path):
    tool = "def add(a: int, b: int) -> int:\n    return a + b\n"
    found = migrated(tmp_path, tool + 'GRPOTrainer("m/x", None, tools=[add], train_dataset=load_dataset("a/b"))\n')
    assert yaml.safe_load(found.migration.yaml)["rollout"]["multi_turn"]["tools"] == ["tools:add"]
    assert "def add(a: int, b: int)" in found.files["tools.py"]
    other = migrated(tmp_path, 'GRPOTrainer("m/x", None, tools=make_tools(), train_dataset=load_dataset("a/b"))\n')
    assert "typed functions by import path" in lost(other)["tools"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import trl\n", "calls neither GRPOTrainer nor GRPOConfig"),
        ("import trl\n\ntrl.SFTTrainer('m').train()\n", "train.py:3: calls SFTTrainer"),
        ("SFTTrainer('m')", "fine-tune with `treadle sft`"),
        ("OnlineDPOTrainer('m')", "algorithm.adv_estimator: dpo"),
        ("GKDTrainer('m')", "ref.path"),
        ("GRPOConfig(\n", "is not Python"),
    ],
)
def test_a_script_that_is_none_is_refused(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told):
        migrated(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        migrate_trl(tmp_path / "none.py")


def test_values_are_known_where_nothing_has_to_be_run(tmp_path):
    text = "A = 2\nB = A * 3\nC = [A, -1, {'x': None}]\nD = open('x')\nE = 1\nE = 2\nF = 'a' + 'b'\nG = 1 / 0\nH = H\n"
    (tmp_path / "s.py").write_text(text)
    script = PythonScript(tmp_path / "s.py")
    values = {name: script.value(ast.Name(name)) for name in "ABCDEFGH"}
    assert (values["B"], values["C"], values["F"]) == (6, [2, -1, {"x": None}], "ab")
    assert all(isinstance(values[name], Computed) for name in "DEGH")


def test_a_config_of_another_machine_gets_a_laptop():
    text = laptop_config(migrate_trl(SCRIPT).migration.yaml, own_rewards=True)
    config = loads(text, "laptop")
    assert (config.model.path, config.rollout.name) == ("treadle/tiny-calculator", "native")
    assert config.trainer.n_gpus_per_node == 0 and config.actor.kl_loss_coef == 0.04, "what is learned stays"
    assert set(config.reward.functions) == {"correctness", "brevity"}


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ('os.environ.get("MODEL", "Qwen/Qwen2.5-1.5B-Instruct")', "Qwen/Qwen2.5-1.5B-Instruct"),
        ('os.getenv("MODEL", default="Qwen/Qwen3-0.6B")', "Qwen/Qwen3-0.6B"),
        ('AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", dtype="auto")', "Qwen/Qwen3-4B"),
        ('AutoModel.from_pretrained(pretrained_model_name_or_path="a/b")', "a/b"),
        ('AutoModel.from_pretrained(os.environ.get("MODEL", "a/c"))', "a/c"),
        ('os.environ.get("MODEL")', "???"),
        ('os.environ["MODEL"]', "???"),
        ('load("gpt2-medium")', "???"),
        ('pick_model("small", "large")', "???"),
    ],
)
def test_a_model_is_taken_from_what_names_one_and_from_no_other_call(tmp_path, model, path):
    text = f'model = {model}\nGRPOTrainer(model, "m/r", GRPOConfig(), load_dataset("a/b"))\n'
    found = migrated(tmp_path, text)
    assert yaml.safe_load(found.migration.yaml)["model"]["path"] == path
    assert ("model" in lost(found)) == (path == "???")
    assert any("MODEL is not set" in note for note in found.migration.notes) == ("MODEL" in model and path != "???")


@pytest.mark.parametrize(
    ("options", "followed"),
    [
        ("options = dict(learning_rate=1e-5)", True),
        ('options = {"learning_rate": 1e-5}', True),
        ('options = {"learning_rate": 1e-6}\noptions["learning_rate"] = 1e-5', False),
        ("options = dict(learning_rate=1e-6)\noptions.update(learning_rate=1e-5)", False),
        ("options = read_options()", False),
    ],
)
def test_options_that_the_script_writes_down_are_looked_into(tmp_path, options, followed):
    text = f'{options}\nGRPOTrainer("m/x", "m/r", GRPOConfig(**options), load_dataset("a/b"))\n'
    found = migrated(tmp_path, text)
    rate = yaml.safe_load(found.migration.yaml)["actor"]["optim"]["lr"]
    assert (float(rate) == 1e-5) == followed
    assert ("GRPOConfig" in lost(found)) != followed
