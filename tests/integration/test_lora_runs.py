"""LoRA in whole runs of the calculator: from Python, resumed, audited, replayed, exported, continued."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import treadle
from tests.sft_runs import sums, write_rows
from treadle.cli.main import build_parser, main
from treadle.cli.serve import _configure
from treadle.config import TrainConfig
from treadle.config.rollout import ModelConfig
from treadle.errors import ConfigError, MisuseError
from treadle.inspect.export import export_run
from treadle.inspect.run_records import RunRecords
from treadle.journal import JournalReader
from treadle.model.load import load_causal_model

SMALL: dict[str, Any] = {
    "data": {"train_batch_size": 4},
    "rollout": {"n": 4},
    "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 3e-3}},
    "trainer": {"val_before_train": False, "test_freq": -1},
    "logging.logger": [],
    "logging.annotations": 1.0,
    "data.val_files": [],
}


def train(run_dir: Path, steps: int, **keys: Any) -> "treadle.Run":
    return treadle.train("calculator", steps=steps, run_dir=str(run_dir), **{**SMALL, "actor.lora.r": 8, **keys})


def command(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> "treadle.Run":
    return train(tmp_path_factory.mktemp("lora") / "run", 2, **{"actor.use_kl_loss": True, "ref.dtype": "fp32"})


def test_a_run_leaves_an_adapter_and_a_merged_model(run: "treadle.Run") -> None:
    assert (run.adapter_dir / "adapter_model.safetensors").is_file()
    assert not (run.adapter_dir / "model.safetensors").exists()
    merged = AutoModelForCausalLM.from_pretrained(run.model_dir)
    model = ModelConfig(path="treadle/tiny-calculator", adapter=str(run.adapter_dir))
    loaded = load_causal_model(model, dtype=torch.float32, device=torch.device("cpu"))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(merged.named_parameters())[name]), name
    assert run.model_dir == run.model_dir, "written once"
    served, _ = _configure(build_parser().parse_args(["serve", str(run.run_dir)]))
    assert (Path(served.model.path), served.model.adapter) == (run.model_dir, None), "the same one is served"


def test_every_push_that_was_probed_is_in_the_journal(run: "treadle.Run") -> None:
    with JournalReader.open(run.run_dir) as reader:
        probes = [event.fields for event in reader.events(kind="probe")]
    assert [(probe["version"], probe["verdict"]) for probe in probes] == [(0, "unclear"), (1, "merged")]
    assert probes[1]["nats"] < 1e-3 < probes[1]["adapter_nats"]
    assert RunRecords(run.run_dir).metrics()["weights/probe_nats"]


def test_replay_and_audit_hold(run: "treadle.Run", capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["replay", str(run.run_dir)]) == 0
    assert command(["audit", str(run.run_dir)]) == 0
    assert command(["annotate", str(run.run_dir)]) == 0
    capsys.readouterr()


def test_a_killed_run_goes_on_to_the_same_weights(run: "treadle.Run", tmp_path: Path) -> None:
    keys = {"actor.use_kl_loss": True, "ref.dtype": "fp32"}
    train(tmp_path / "run", 1, **{**keys, "checkpoint.save_freq": 1})
    resumed = train(tmp_path / "run", 2, **keys)
    whole, halves = (RunRecords(one.run_dir) for one in (run, resumed))
    assert whole.metrics()["actor/grad_norm"] == halves.metrics()["actor/grad_norm"]
    first, second = ((one.adapter_dir / "adapter_model.safetensors").read_bytes() for one in (run, resumed))
    assert first == second
    with pytest.raises(ConfigError, match=r"actor\.lora\.alpha"):
        train(tmp_path / "run", 3, **{**keys, "actor.lora.alpha": 3.0}, allow_changes=True)


def test_an_adapter_is_trained_further_or_merged_and_trained_whole(run: "treadle.Run", tmp_path: Path) -> None:
    further = train(tmp_path / "further", 1, **{"model.adapter": str(run.adapter_dir)})
    assert further.steps == 1
    whole = train(tmp_path / "whole", 1, **{"model.adapter": str(run.adapter_dir), "actor.lora.r": None})
    with pytest.raises(MisuseError, match="all parameters were trained"):
        _ = whole.adapter_dir
    assert (whole.model_dir / "model.safetensors").is_file()


def test_the_command_exports_both_formats(
    run: "treadle.Run", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["export", str(run.run_dir), str(tmp_path / "adapter"), "--format", "peft"]) == 0
    assert "LoRA adapter in fp32" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= names
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card and "rank 8, alpha 16" in card
    assert str(tmp_path) not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert command(["export", str(run.run_dir), str(tmp_path / "model"), "--dtype", "fp32"]) == 0
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    merged = dict(AutoModelForCausalLM.from_pretrained(run.model_dir).named_parameters())
    assert all(torch.equal(tensor, merged[name]) for name, tensor in exported.items())
    config = RunRecords(run.run_dir).config
    assert isinstance(config, TrainConfig) and config.actor.lora.r == 8


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, **{"actor.lora.r": None})
    with pytest.raises(ConfigError, match="trained all parameters"):
        export_run(tmp_path / "run", tmp_path / "adapter", format="peft")


def test_supervised_fine_tuning_of_an_adapter_then_training_it_further(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", sums(8))
    words = ("model.path=treadle/tiny-calculator", f"data.train_files={rows}", "data.train_batch_size=4")
    fast = ("actor.dtype=fp32", "actor.optim.lr=1e-2", "actor.lora.r=8", f"logging.run_dir={tmp_path / 'sft'}")
    assert command(["sft", *words, *fast]) == 0
    tuned = treadle.Run(tmp_path / "sft")
    assert (tuned.adapter_dir / "adapter_model.safetensors").is_file()
    further = train(tmp_path / "further", 1, **{"model.adapter": str(tuned.run_dir)})
    assert further.steps == 1
    with pytest.raises(ConfigError, match=r"as model\.path, and this directory as model\.adapter"):
        train(tmp_path / "wrong", 1, **{"model.path": str(tuned.run_dir)})
