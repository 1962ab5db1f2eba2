"""One file for supervised fine-tuning and for the run after it: what each command reads of it."""

from pathlib import Path

import pytest

from treadle.config import SFTRunConfig, TrainConfig, load, loads
from treadle.config.explain import json_schema
from treadle.errors import ConfigError

TEXT = """
model: {path: runs/treadle/warm-sft}
data: {train_files: [tasks.jsonl], val_files: [held_out.jsonl], train_batch_size: 64}
rollout: {n: 4}
reward: {functions: {answer: {path: exact_match}}}
actor: {dtype: fp32, optim: {lr: 3.0e-4, weight_decay: 0.2}}
trainer: {total_training_steps: 40, test_freq: 10}
sft:
  max_length: 512
  model: {path: treadle/tiny-calculator}
  data: {train_files: [chats.jsonl]}
  actor: {optim: {lr: 1.0e-4}}
  trainer: {total_training_steps: 7}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "warm.yaml").write_text(TEXT)
    return tmp_path / "warm.yaml"


def test_each_command_reads_its_stage(file: Path) -> None:
    first, second = load(file, sft=True), load(file)
    assert isinstance(first, SFTRunConfig)
    assert (first.model.path, first.data.train_files) == ("treadle/tiny-calculator", ("chats.jsonl",))
    assert (first.actor.optim.lr, first.actor.optim.weight_decay) == (1e-4, 0.2)
    assert (first.trainer.total_training_steps, first.sft.max_length) == (7, 512)
    assert isinstance(second, TrainConfig) and not isinstance(second, SFTRunConfig)
    assert (second.model.path, second.data.train_files) == ("runs/treadle/warm-sft", ("tasks.jsonl",))
    assert (second.actor.optim.lr, second.trainer.total_training_steps) == (3e-4, 40)
    assert not isinstance(loads(TEXT), SFTRunConfig)


def test_the_stages_share_neither_run_directory_nor_validation(file: Path) -> None:
    first, second = load(file, sft=True), load(file)
    assert (first.logging.directory(), second.logging.directory()) == ("runs/treadle/warm-sft", "runs/treadle/warm")
    assert isinstance(first, SFTRunConfig) and first.data.val_files == () and first.trainer.test_freq == -1
    named = TEXT + "logging: {run_dir: here}\n"
    file.write_text(named)
    assert (load(file, sft=True).logging.run_dir, load(file).logging.run_dir) == ("here-sft", "here")
    assert load(file, ["logging.run_dir=there"], sft=True).logging.run_dir == "there"
    file.write_text(named.replace("max_length: 512", "logging: {run_dir: own}"))
    assert load(file, sft=True).logging.run_dir == "own"


def test_words_of_the_command_line_reach_one_stage_or_both(file: Path) -> None:
    words = ["sft.actor.optim.lr=5e-5", "actor.grad_clip=2"]
    first, second = load(file, words, sft=True), load(file, words)
    assert isinstance(first, SFTRunConfig) and isinstance(second, TrainConfig)
    assert (first.actor.optim.lr, first.actor.grad_clip) == (5e-5, 2)
    assert (second.actor.optim.lr, second.actor.grad_clip) == (3e-4, 2)


def test_mistakes_inside_are_found_by_both_commands_at_their_line(file: Path) -> None:
    file.write_text(TEXT.replace("max_length", "max_lenght"))
    for sft in (True, False):
        with pytest.raises(ConfigError, match=r"(?s)sft\.max_lenght.*warm\.yaml:9.*max_length"):
            load(file, sft=sft)
    file.write_text(TEXT.replace("optim: {lr: 1.0e-4}", "optim: {lr: -1}"))
    with pytest.raises(ConfigError, match=r"(?s)actor\.optim\.lr.*warm\.yaml:12"):
        load(file, sft=True)


def test_an_sft_section_without_a_stage_stays_fine_tuning() -> None:
    assert isinstance(loads("model: {path: x}\ndata: {train_files: [a]}\nsft: {max_length: 9}\n"), SFTRunConfig)


def test_the_schema_for_editors_knows_the_sections_inside() -> None:
    inside = json_schema()["definitions"]["SFTConfig"]["properties"]
    assert {"data", "actor", "trainer", "max_length"} <= inside.keys() and "reward" not in inside
