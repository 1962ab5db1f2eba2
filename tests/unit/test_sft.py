"""Supervised fine-tuning: rows of files and journals, the loss, resume, and what is refused."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import treadle
from tests.configs import mistake, training_config
from tests.sft_runs import MODEL, Steps, run_sft, sft_config, sums, write_rows
from treadle.checkpoint.links import VALIDATION_LOSS, CheckpointScore, best_of
from treadle.checkpoint.store import latest
from treadle.cluster.sft import SFTData
from treadle.config import SFTRunConfig, loads
from treadle.data.renderer import Renderer
from treadle.errors import ConfigError
from treadle.model.tokenizer import resolve_model_path
from treadle.preflight.checks import run_preflight
from treadle.trainer.sft import mean_loss
from treadle.trainer.sft_data import load_sft_rows

pytestmark = pytest.mark.filterwarnings("ignore::treadle.config.ConfigWarning")


def read(config: SFTRunConfig):
    return asyncio.run(load_sft_rows(config, Renderer.create(config.model)))


def refuse(config: SFTRunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        run_sft(config)
    return str(caught.value)


def weights(run_dir: Path) -> dict[str, bytes]:
    """Every file of the newest checkpoint that holds tensors."""
    checkpoint = latest(run_dir)
    assert checkpoint is not None
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*.safetensors")}


def test_a_run_is_the_plain_loop_of_cross_entropy(tmp_path):
    """The same losses as transformers' forward, padding, torch's cross entropy, clipping and AdamW."""
    config = sft_config(tmp_path, "data.shuffle=false", "actor.optim.lr_scheduler_type=constant")
    view = Steps()
    run_sft(config, view)
    renderer = Renderer.create(config.model)
    rows = []
    for row in sums(12):
        said = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        prompt = list(renderer.prompt(said[:1]))
        answer = [*renderer.encode(said[1]["content"]), renderer.stop_token_ids[0]]
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    module = AutoModelForCausalLM.from_pretrained(resolve_model_path(MODEL), dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    for step in range(6):
        batch = rows[step % 3 * 4 : step % 3 * 4 + 4]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row, _ in batch])
        logits = module(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        assert view.losses[step + 1] == pytest.approx(loss.item(), abs=1e-4)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = AutoModelForCausalLM.from_pretrained(latest(tmp_path / "run"), dtype=torch.float32)
    for (name, one), other in zip(module.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0, msg=name)


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    whole, broken = sft_config(tmp_path / "whole"), sft_config(tmp_path / "broken")
    run_sft(whole)
    first = run_sft(broken, Steps(stop_after=3))
    assert first.interrupted and first.steps < 6
    view = Steps()
    second = run_sft(broken, view)
    assert (second.interrupted, second.steps, view.resumed) == (False, 6, first.steps)
    assert weights(tmp_path / "whole" / "run") == weights(tmp_path / "broken" / "run")
    assert len(weights(tmp_path / "whole" / "run")) > 1, "the optimizer's state is there, too"


def test_a_run_that_is_done_trains_nothing_more(tmp_path):
    config = sft_config(tmp_path)
    run_sft(config)
    assert run_sft(config).trained == 0


def test_other_rows_are_not_gone_on_with(tmp_path):
    run_sft(sft_config(tmp_path))
    told = refuse(sft_config(tmp_path, rows=sums(12, 100)))
    assert "contents of data.train_files" in told and "--fresh" in told


def test_what_the_config_says_of_sampling_for_training_does_not_count(tmp_path):
    plain, recipe = Steps(), Steps()
    run_sft(sft_config(tmp_path / "plain"), plain)
    words = ("algorithm.rollout_correction={rollout_is: token, off_policy_mask_threshold: 1.0}",)
    run_sft(sft_config(tmp_path / "recipe", *words), recipe)
    assert recipe.losses == plain.losses


def test_validation_is_measured_before_between_and_after(tmp_path):
    view = Steps()
    result = run_sft(sft_config(tmp_path, "trainer.test_freq=3"), view)
    assert list(view.validations) == [0, 3, 6]
    assert view.validations[6] < view.validations[0]
    assert [found.loss for found in result.validations] == list(view.validations.values())


def test_the_best_checkpoint_has_the_lowest_loss(tmp_path):
    for name in ("0001-step-1", "0002-step-2"):
        (tmp_path / name).mkdir()
    scores = {
        "0001-step-1": CheckpointScore(VALIDATION_LOSS, 0.5),
        "0002-step-2": CheckpointScore(VALIDATION_LOSS, 0.9),
    }
    assert best_of(tmp_path, scores) == tmp_path / "0001-step-1"


def test_a_run_directory_is_a_model_its_best_checkpoint(tmp_path):
    run_sft(sft_config(tmp_path, "trainer.test_freq=1", "checkpoint.save_freq=1", "actor.optim.lr=1e-2"))
    run_dir = tmp_path / "run"
    assert resolve_model_path(str(run_dir)) == (run_dir / "checkpoints" / "best").resolve()
    (run_dir / "checkpoints" / "best").unlink()
    assert resolve_model_path(str(run_dir)) == (run_dir / "checkpoints" / "latest").resolve()


def test_metrics_and_results_are_those_of_any_run(tmp_path):
    run_sft(sft_config(tmp_path))
    run = treadle.Run(tmp_path / "run")
    assert run.steps == 6
    assert {"sft/loss", "sft/tokens_per_s", "validation/loss", "actor/grad_norm", "actor/lr"} <= run.metrics.keys()
    assert "actor/pg_loss" not in run.metrics
    assert "loss" in str(run)


def test_rows_of_all_formats_are_the_same(tmp_path):
    (said,) = sums(1)
    other = {"prompt": "0+1=", "response": "#### 1"}
    pair = [{"role": "assistant", "content": "#### 1"}]
    csv = tmp_path / "rows.csv"
    cell = json.dumps(said["messages"]).replace('"', '""')
    csv.write_text(f'messages\n"{cell}"\n')
    files = [
        write_rows(tmp_path / "a.jsonl", [said]),
        write_rows(tmp_path / "b.jsonl", [other]),
        write_rows(tmp_path / "c.jsonl", [{**other, "response": pair}]),
        str(csv),
    ]
    rows = read(sft_config(tmp_path / "it", f"data.train_files={json.dumps(files)}"))
    assert len({(row.prompt_ids, row.ids, row.mask) for row in rows.rows.values()}) == 1
    assert len(rows.rows) == 4


def test_long_rows_are_refused_or_dropped_and_counted(tmp_path):
    long = {"prompt": "1+1=", "response": "#### " + "2" * 60}
    told = refuse(sft_config(tmp_path, rows=[*sums(4), long]))
    assert "1 of 5 conversations have more than 64 tokens" in told and "sft.overlong=drop" in told
    rows = read(sft_config(tmp_path, "sft.overlong=drop", rows=[*sums(4), long]))
    assert (len(rows.rows), rows.dropped) == (4, 1)
    assert "1 longer ones are dropped" in rows.describe()


def test_every_mistake_of_a_file_is_reported_with_its_line(tmp_path):
    rows = [
        {"prompt": "1+1="},
        {"messages": [{"role": "user", "content": "1"}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a<|im_end|>b"}]},
        {"prompt": "1", "response": 3},
    ]
    told = refuse(sft_config(tmp_path, rows=rows))
    for line, words in enumerate(("there is no field", "must begin with", "not empty", "spells out", "a text or"), 1):
        assert f"train.jsonl:{line}" in told and words in told


def test_the_mean_loss_is_over_learned_tokens(tmp_path):
    class Fixed:
        def logprobs(self, rows):
            return torch.tensor([-1.0, -2.0, -100.0])

    from treadle.trainer.sft_data import training_row

    assert mean_loss(Fixed(), [training_row((1,), (2, 3, 4), (1, 1, 0))]) == 1.5


def test_the_kind_of_a_config_is_its_section():
    text = "model: {path: x}\ndata: {train_files: [a.jsonl]}\n"
    assert isinstance(loads(f"{text}sft: {{}}\n"), SFTRunConfig)
    trained = loads(f"{text}sft: {{}}\ntrainer: {{}}\n")
    assert isinstance(trained, SFTRunConfig) and trained.actor.optim.lr == 1e-5
    assert not isinstance(training_config(), SFTRunConfig)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("cluster.backend=ray", "supervised fine-tuning runs on this machine alone"),
        ("sft.max_length=99999", "holds no row of that length"),
        ("trainer.test_freq=2", "is empty, but trainer.test_freq 2"),
        ("trainer.val_only=true", "but treadle sft trains"),
        ("trainer.processes_per_node=2", "holds a network on one device"),
    ],
)
def test_what_cannot_be_is_refused(word, problem):
    text = "model: {path: x}\ndata: {train_files: [a.jsonl]}\nsft: {}\n"
    assert problem in mistake(word, text=text).problem


def test_a_batch_larger_than_the_rows_there_are_is_told(tmp_path):
    config = sft_config(tmp_path, "data.train_batch_size=30")
    data = asyncio.run(SFTData.load(config))
    assert data.describe_repeats(30) == (
        "data.train_batch_size 30 is more than the 12 rows there are: one batch holds rows up to 3 times"
    )
    assert data.describe_repeats(12) == ""
    assert run_preflight(config, {}, thorough=True).warnings == [data.describe_repeats(30)]
