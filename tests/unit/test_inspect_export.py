"""A run's model for others: loadable by transformers, in the dtype that was asked for, with a card that says whence."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.policies import make_policy, save_tiny_model
from tests.rollouts import save_model
from treadle.checkpoint import Checkpoints, CheckpointScore
from treadle.checkpoint.atomic_directory import write_manifest
from treadle.cli.main import main
from treadle.config import load, loads, to_yaml
from treadle.errors import ConfigError
from treadle.inspect.export import export_run
from treadle.journal import Journal
from treadle.types import Outcome, StopReason, Trajectory

CONFIG = """
model: {path: MODEL}
data: {train_files: TASKS, train_batch_size: 2}
rollout: {n: 2}
reward: {functions: {answer: {path: exact_match, weight: 0.5}}}
actor: {ppo_mini_batch_size: 2}
trainer: {}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with two checkpoints; the first is the best."""
    home = tmp_path_factory.mktemp("home")
    model, run_dir = save_tiny_model(home / "base-model"), home / "run"
    save_model(model)  # a tokenizer with a chat template beside the weights
    (home / "tasks.jsonl").write_text("{}")
    text = CONFIG.replace("MODEL", str(model)).replace("TASKS", str(home / "tasks.jsonl"))
    config = loads(text, "test")
    policy = make_policy(model)
    store = Checkpoints(run_dir, checkpoint=config.checkpoint, model=config.model)
    with Journal.open(run_dir, max_mb=10, config_yaml=to_yaml(config, origins=True)) as journal:
        for step, success in ((1, 0.75), (2, 0.5)):
            journal.add_metrics(step, {"validation/success": success, "reward/mean": success})
            with torch.no_grad():
                for weight in policy.module.parameters():
                    weight.add_(1e-4 * step)
            store.score(step, CheckpointScore("validation/success", success))
            store.save(policy, None, step, {})
        journal.add(Trajectory("a", 0, (), Outcome.ended(StopReason.STOP), data_source="sums|`x`"))
    return run_dir


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(directory.glob("*.safetensors")) for name, value in load_file(path).items()}


def test_transformers_loads_the_export_and_its_tokenizer(trained, tmp_path):
    done = export_run(trained, tmp_path / "model")
    assert (done.checkpoint.name, done.step) == ("0002-step-2", 2)
    stored, exported = weights(done.checkpoint), weights(tmp_path / "model")
    assert {name: value.dtype for name, value in exported.items()} == dict.fromkeys(stored, torch.bfloat16)
    assert all(torch.equal(exported[name], stored[name].to(torch.bfloat16)) for name in stored)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items() if name in exported)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "2+2"}]
    assert "2+2" in tokenizer.apply_chat_template(messages, tokenize=False), "its chat template came along"
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False).shape[1] > 2
    assert not (tmp_path / "model" / "training").exists()


def test_best_a_step_and_a_name_choose_another_checkpoint(trained, tmp_path):
    for wanted in ("best", "1", "0001-step-1"):
        done = export_run(trained, tmp_path / wanted, checkpoint=wanted, dtype="fp32")
        assert done.checkpoint.name == "0001-step-1"
        exported, stored = weights(tmp_path / wanted), weights(done.checkpoint)
        assert all(torch.equal(exported[name], stored[name]) for name in stored), "fp32 loses nothing"
    with pytest.raises(ConfigError, match="there are 0001-step-1, 0002-step-2"):
        export_run(trained, tmp_path / "none", checkpoint="7")
    assert not (tmp_path / "none").exists()


def test_weights_in_several_files_stay_in_several_files(trained, tmp_path):
    checkpoint = trained / "checkpoints" / "0003-step-3"
    export_run(trained, checkpoint, dtype="fp32")
    whole, index = load_file(checkpoint / "model.safetensors"), {}
    (checkpoint / "model.safetensors").unlink()
    for at, name in enumerate(whole):
        file = f"model-{at % 2 + 1:05d}-of-00002.safetensors"
        index[name] = file
    for file in set(index.values()):
        save_file({name: whole[name] for name in whole if index[name] == file}, checkpoint / file, {"format": "pt"})
    listed = {"metadata": {"total_size": 1}, "weight_map": index}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(listed))
    (checkpoint / "training").mkdir()
    write_manifest(checkpoint)
    done = export_run(trained, tmp_path / "model", checkpoint="3")
    assert done.checkpoint == checkpoint
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(
        torch.equal(value, whole[name].bfloat16()) for name, value in model.state_dict().items() if name in whole
    )
    found = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert found == sum(value.numel() * 2 for value in whole.values())
    for path in checkpoint.rglob("*"):
        if path.is_file():
            path.unlink()


def test_the_card_says_whence_and_names_no_directory_of_this_machine(trained, tmp_path):
    export_run(trained, tmp_path / "my_model", checkpoint="1")
    card = (tmp_path / "my_model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n"), "a local directory is no base model of the hub"
    assert "# my\\_model\n" in card and "`base-model`, trained" in card
    assert "| tasks | `tasks.jsonl` |" in card and "| rewards | `answer` × 0.5 |" in card
    assert "`sums\\|'x'` (1 trajectories)" in card, "a name cannot leave its cell"
    assert "| `validation/success` | 0.750 (step 1) | 0.750 (step 1) |" in card, "later steps are not this checkpoint's"
    assert str(trained.parent) not in card
    digest = hashlib.sha256(to_yaml(load(trained / "config.yaml")).encode()).hexdigest()
    assert f"`sha256:{digest}`" in card


def test_a_directory_that_exists_is_refused_and_left_alone(trained, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(SystemExit) as ended:
        main(["export", str(trained), str(tmp_path / "mine")])
    assert ended.value.code == 2
    assert "exists, and an export overwrites nothing" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path):
    path = trained / "checkpoints" / "0001-step-1" / "generation_config.json"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"{", b"[", 1))
    try:
        with pytest.raises(ConfigError, match="it is damaged"):
            export_run(trained, tmp_path / "model", checkpoint="best")
    finally:
        path.write_bytes(before)
    assert not list(tmp_path.iterdir()), "no draft is left"


def test_a_rollout_has_no_weights_to_export(tmp_path):
    with Journal.open(tmp_path / "run", max_mb=10, config_yaml="model: {path: x}\n"):
        pass
    with pytest.raises(ConfigError, match="is a rollout, not a training run"):
        export_run(tmp_path / "run", tmp_path / "model")
