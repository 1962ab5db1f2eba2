import errno
import json
import logging
import random
import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.policies import make_groups, make_policy, save_tiny_model
from treadle.checkpoint import Checkpoints, CheckpointScore, export, latest
from treadle.config.rollout import ModelConfig
from treadle.config.training import AlgorithmConfig, CheckpointConfig, TrainerConfig
from treadle.errors import ConfigError, MisuseError, RunError
from treadle.model.checksum import checksum
from treadle.policy.policy import SinglePolicy
from treadle.trainer.step import StepParts, train_step

KEYS = {"ppo_epochs": 2, "ppo_mini_batch_size": 2, "shuffle": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(directory: Path) -> SinglePolicy:
    return make_policy(directory, **KEYS)


def store(run_dir: Path, directory: Path, **keys: object) -> Checkpoints:
    return Checkpoints(run_dir, checkpoint=CheckpointConfig(**keys), model=ModelConfig(path=str(directory)))


def saved_in(run_dir: Path) -> list[str]:
    """Everything beside the links and the scores."""
    entries = (run_dir / "checkpoints").iterdir()
    return sorted(path.name for path in entries if not path.is_symlink() and path.name != "scores.json")


def train(policy: SinglePolicy, *steps: int) -> None:
    parts = StepParts(policy, policy._actor, AlgorithmConfig(), TrainerConfig())
    for step in steps:
        train_step(parts, make_groups(step), step=step)


def test_a_restored_run_ends_with_the_weights_of_one_that_never_stopped(directory: Path, tmp_path: Path) -> None:
    straight = make_policy(directory, **KEYS)
    train(straight, 1, 2, 3, 4)
    for step in range(1, 5):  # a new process for every step
        policy, checkpoints = make_policy(directory, **KEYS), store(tmp_path, directory)
        progress = checkpoints.restore(policy, None)
        assert (progress.step if progress else 0) == step - 1 == policy.version
        train(policy, step)
        checkpoints.save(policy, None, step, {"position": step * 4})
    assert checksum(policy.tensors()) == checksum(straight.tensors())
    assert progress is not None and progress.state == {"position": 12}


def test_restoring_keeps_the_module_that_an_engine_shares(
    directory: Path, policy: SinglePolicy, tmp_path: Path
) -> None:
    train(policy, 1)
    store(tmp_path, directory).save(policy, None, 1, {})
    other = make_policy(directory, **KEYS)
    held = dict(other.module.named_parameters())
    store(tmp_path, directory).restore(other, None)
    assert all(held[name] is parameter for name, parameter in other.module.named_parameters())
    assert checksum({name: value.detach() for name, value in held.items()}) == checksum(policy.tensors())


def test_a_checkpoint_is_a_hugging_face_directory(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    train(policy, 1)
    path = store(tmp_path, directory).save(policy, None, 1, {})
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert checksum(dict(loaded.named_parameters())) == checksum(policy.tensors())
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= {
        file.name for file in path.iterdir()
    }
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]


def test_random_states_come_back(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    checkpoints = store(tmp_path, directory)
    checkpoints.save(policy, None, 1, {})
    expected = random.random(), torch.rand(3)
    checkpoints.restore(policy, None)
    assert random.random() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])


def test_the_last_k_are_kept(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    checkpoints = store(tmp_path, directory, keep_last=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(policy, None, step, {})
    assert saved_in(tmp_path) == ["0003-step-3", "0004-step-4"]
    everything = store(tmp_path / "all", directory, keep_last=None)
    for step in (1, 2, 3, 4):
        everything.save(policy, None, step, {})
    assert len(saved_in(tmp_path / "all")) == 4


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(
    directory: Path, policy: SinglePolicy, tmp_path: Path
) -> None:
    checkpoints = store(tmp_path, directory, keep_last=2)
    first, second = (checkpoints.save(policy, None, step, {}) for step in (1, 2))
    (second / "config.json").unlink()
    checkpoints.save(policy, None, 3, {})
    assert first.exists()


def test_the_same_step_can_be_saved_again(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    checkpoints = store(tmp_path, directory, keep_last=1)
    checkpoints.save(policy, None, 5, {"take": 1})
    checkpoints.save(policy, None, 5, {"take": 2})
    found = checkpoints.restore(policy, None)
    assert found is not None and found.state == {"take": 2}


def test_a_run_started_afresh_is_newer_than_the_one_it_replaces(
    directory: Path, policy: SinglePolicy, tmp_path: Path
) -> None:
    store(tmp_path, directory).save(policy, None, 100, {})
    afresh = store(tmp_path, directory, resume_mode="disable")
    assert afresh.restore(policy, None) is None
    afresh.save(policy, None, 10, {})
    found = store(tmp_path, directory).restore(policy, None)
    assert found is not None and found.step == 10


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "one bit": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "training/optimizer.safetensors", "training/policy.json", "training/manifest.json"],
)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_by_name(
    directory: Path,
    policy: SinglePolicy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: str,
) -> None:
    checkpoints = store(tmp_path, directory)
    first, second = (checkpoints.save(policy, None, step, {}) for step in (1, 2))
    assert latest(tmp_path) == second
    DAMAGE[damage](second / name)
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == first
    assert str(second / name) in caplog.text


def test_a_run_without_checkpoints_starts_afresh(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert store(tmp_path, directory).restore(policy, None) is None


def test_resume_path_takes_that_checkpoint_and_no_other(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    checkpoints = store(tmp_path, directory)
    first, _ = (checkpoints.save(policy, None, step, {}) for step in (1, 2))
    by_path = store(tmp_path, directory, resume_mode="resume_path", resume_from_path=str(first))
    found = by_path.restore(policy, None)
    assert found is not None and found.step == 1
    (first / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint\.resume_from_path.*model\.safetensors is missing"):
        by_path.restore(policy, None)


def test_a_failed_save_leaves_nothing(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    checkpoints = store(tmp_path, directory)
    with pytest.raises(TypeError, match="JSON"):
        checkpoints.save(policy, None, 1, {"position": object()})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_leftovers_of_a_crash_are_swept(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    for name in (".draft-0001-step-1", ".trash-0001-step-1"):
        (tmp_path / "checkpoints" / name / "training").mkdir(parents=True)
    assert latest(tmp_path) is None
    store(tmp_path, directory).save(policy, None, 1, {})
    assert saved_in(tmp_path) == ["0001-step-1"]


def test_a_checkpoint_of_another_model_is_refused(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    store(tmp_path, directory).save(policy, None, 1, {})
    wider = make_policy(save_tiny_model(tmp_path / "wider", hidden_size=32), **KEYS)
    with pytest.raises(RunError, match="is of another model"):
        store(tmp_path, directory).restore(wider, None)


def test_saves_are_due_by_frequency(directory: Path, tmp_path: Path) -> None:
    assert [step for step in range(1, 7) if store(tmp_path, directory, save_freq=3).is_due(step)] == [3, 6]
    assert not store(tmp_path, directory).is_due(3)


def test_saves_are_due_by_time_too_ten_minutes_by_default(
    directory: Path, policy: SinglePolicy, tmp_path: Path
) -> None:
    now, model = [0.0], ModelConfig(path=str(directory))
    timed = Checkpoints(tmp_path, checkpoint=CheckpointConfig(), model=model, clock=lambda: now[0])
    now[0] = 599.0
    assert not timed.is_due(1)
    now[0] = 600.0
    assert timed.is_due(2)
    timed.save(policy, None, 2, {})
    assert not timed.is_due(3)
    never = Checkpoints(
        tmp_path, checkpoint=CheckpointConfig(save_every_s=None), model=model, clock=lambda: now.pop() if now else 1e9
    )
    assert not never.is_due(3)


def test_two_checkpoints_of_one_step_count_once(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    checkpoints = store(tmp_path, directory, keep_last=2)
    for step in (1, 2, 3, 3):
        checkpoints.save(policy, None, step, {})
    assert saved_in(tmp_path) == ["0002-step-2", "0004-step-3"]


def test_a_disk_that_takes_no_more_is_a_sentence_and_leaves_earlier_checkpoints(
    directory: Path, policy: SinglePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = store(tmp_path, directory)
    checkpoints.save(policy, None, 1, {})
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("write: No space left on device (28)"),
    ):

        def fail(directory: Path, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(policy, "save", fail)
        with pytest.raises(RunError, match=r"0002-step-2 cannot be saved: no space left on the disk .* MB free"):
            checkpoints.save(policy, None, 2, {})
    assert saved_in(tmp_path) == ["0001-step-1"]


def test_nobody_else_may_read_a_checkpoint(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    saved = store(tmp_path, directory).save(policy, None, 1, {})
    folders = {stat.S_IMODE(path.stat().st_mode) for path in (saved.parent, saved, *saved.rglob("*")) if path.is_dir()}
    files = {stat.S_IMODE(path.stat().st_mode) for path in saved.rglob("*") if path.is_file()}
    assert (folders, files) == ({0o700}, {0o600})


def test_an_export_loads_elsewhere_and_never_overwrites(directory: Path, policy: SinglePolicy, tmp_path: Path) -> None:
    train(policy, 1)
    model = ModelConfig(path=str(directory), custom_chat_template="{{ messages }}")
    export(policy, tmp_path / "out", model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert checksum(dict(loaded.named_parameters())) == checksum(policy.tensors())
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not (tmp_path / "out/training").exists()
    with pytest.raises(MisuseError, match="exists"):
        export(policy, tmp_path / "out", model)


def success(value: float) -> CheckpointScore:
    return CheckpointScore("validation/success", value)


def target(run_dir: Path, name: str) -> str:
    return str((run_dir / "checkpoints" / name).readlink())


def test_links_lead_to_the_newest_and_to_the_best_checkpoint_which_is_kept(
    directory: Path, policy: SinglePolicy, tmp_path: Path
) -> None:
    checkpoints = store(tmp_path, directory, keep_last=1)
    for step, reached in ((1, 0.2), (2, 0.8), (3, 0.5)):
        checkpoints.score(step, success(reached))
        checkpoints.save(policy, None, step, {})
    assert (target(tmp_path, "latest"), target(tmp_path, "best")) == ("0003-step-3", "0002-step-2")
    assert saved_in(tmp_path) == ["0002-step-2", "0003-step-3"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "best")
    checkpoints.score(3, success(0.8))
    assert target(tmp_path, "best") == "0003-step-3", "a validation may end after the save; of equals the newest"
    tmp_path.rename(tmp_path.with_name("moved"))
    assert (tmp_path.with_name("moved") / "checkpoints" / "best" / "config.json").is_file(), "links move with the run"


def test_a_later_start_knows_what_was_best_and_scores_what_it_restored(
    directory: Path, policy: SinglePolicy, tmp_path: Path
) -> None:
    first = store(tmp_path, directory)
    first.score(1, success(0.7))
    first.save(policy, None, 1, {})
    first.save(policy, None, 2, {})
    later = store(tmp_path, directory)
    later.restore(make_policy(directory, **KEYS), None)
    later.score(3, success(0.6))
    later.save(policy, None, 3, {})
    assert target(tmp_path, "best") == "0001-step-1"
    later.score(2, success(0.9))
    assert target(tmp_path, "best") == "0002-step-2"


def test_a_validated_checkpoint_is_better_than_any_that_only_has_a_training_reward(
    directory: Path, policy: SinglePolicy, tmp_path: Path
) -> None:
    checkpoints = store(tmp_path, directory, keep_last=None)
    for step, score in ((1, CheckpointScore("reward/mean", 0.9)), (2, success(0.1)), (3, success(float("nan")))):
        checkpoints.score(step, score)
        checkpoints.save(policy, None, step, {})
        assert target(tmp_path, "best") == ("0001-step-1" if step == 1 else "0002-step-2")


def test_a_run_without_scores_has_no_best_and_a_damaged_list_of_scores_is_none(
    directory: Path, policy: SinglePolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path, directory).save(policy, None, 1, {})
    assert not (tmp_path / "checkpoints" / "best").exists()
    (tmp_path / "checkpoints" / "scores.json").write_text("{")
    checkpoints = store(tmp_path, directory)
    assert "cannot be read" in caplog.text
    checkpoints.score(2, success(0.1))
    checkpoints.save(policy, None, 2, {})
    assert target(tmp_path, "best") == "0002-step-2"


def test_a_file_system_without_links_stops_no_save(
    directory: Path, policy: SinglePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def refuse(*_, **__) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert store(tmp_path, directory).save(policy, None, 1, {}).is_dir()
    assert "no link" in caplog.text
