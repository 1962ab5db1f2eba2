"""The GSM8K recipe runs on files in GSM8K's form, with any model: here a step with the bundled one, on a CPU."""

import json

import pytest

from treadle.cli.main import main
from treadle.inspect.run_records import RunRecords

ROWS = [
    {"question": f"Tom has {a} pens and buys {b}. How many has he?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"}
    for a, b in ((3, 4), (12, 30), (5, 5), (20, 1))
]


def test_the_recipe_trains_on_gsm8k_files_with_a_model_of_choice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    smaller = ["rollout.n=2", "rollout.response_length=24", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4"]
    words = ["model.path=treadle/tiny-calculator", "data.train_files=train.jsonl", "data.val_files=test.jsonl"]
    short = ["trainer.total_training_steps=1", "trainer.n_gpus_per_node=0", "actor.dtype=fp32", "logging.run_dir=run"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "gsm8k", *words, *smaller, *short])
    assert ended.value.code == 0, capsys.readouterr()
    records = RunRecords(tmp_path / "run")
    assert {tuple(item.headline.reward.parts) for item in records.select(1)} == {("answer",)}
    assert [step for step, _ in records.metrics()["validation/success"]] == [0, 1]
