"""Two recipes of tinker-cookbook, unmodified, against `treadle serve --tinker`: `make test-tinker` installs it.

No hub can be reached, so the names that recipes ask for are folders beside them: a small model of ours as
Qwen/Qwen3-4B-Instruct-2507, and small data sets as HuggingFaceH4/no_robots and openai/gsm8k.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

import treadle
from tests.tinker.environment import needs_client, run_client, serving

pytestmark = needs_client

NAME = "Qwen/Qwen3-4B-Instruct-2507"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
DIGITS = (1, 2, 3)
SHOT = [
    {"role": "user", "content": f"How many r's are in strawberry?{SUFFIX}"},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]
"""What rl_loop puts before every question."""


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name / "train-0.parquet")


def teach(directory: Path) -> None:
    """A model that answers in the form that rl_loop asks for, with any of the digits."""
    rng = Random(1)
    with treadle.Policy("treadle/tiny-calculator", lr=3e-3, weight_decay=0.0) as policy:
        for _ in range(200):
            asked = [{"role": "user", "content": f"Say {rng.choice(DIGITS)}.{SUFFIX}"} for _ in range(6)]
            samples = [policy.encode([*SHOT, user], f"\\boxed{{{rng.choice(DIGITS)}}}") for user in asked]
            loss = policy.forward_backward(samples, lambda logprobs: -torch.cat(logprobs).mean())
            policy.step()
            if loss < 0.16:
                break
        policy.save(directory)


def prepare(home: Path) -> None:
    """What the recipes load: a model, chats, and questions that have one right answer."""
    teach(home / NAME)
    rng = Random(0)
    chats = []
    for _ in range(160):
        a, b = rng.randrange(9), rng.randrange(9)
        turns = [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]
        chats.append({"messages": turns})
    write_rows(home / "HuggingFaceH4/no_robots", "data", chats)
    write_rows(home / "openai/gsm8k", "main", [{"question": "Say 2.", "answer": "#### 2"}] * 128)
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
    (home / "openai/gsm8k/README.md").write_text(card)


def metrics_of(folder: Path, name: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines if name in json.loads(line)]


def test_supervised_and_reinforcement_recipes_learn(tmp_path: Path) -> None:
    prepare(tmp_path)
    supervised, reinforced = tmp_path / "sl", tmp_path / "rl"
    with serving(NAME, cwd=tmp_path) as variables:
        common = [f"base_url={variables['TINKER_BASE_URL']}", f"model_name={NAME}", "lora_rank=16", "save_every=4"]
        options = ["batch_size=16", "learning_rate=3e-3", "max_length=512", f"log_path={supervised}"]
        run_client(["-m", "tinker_cookbook.recipes.sl_loop", *common, *options], variables, tmp_path)
        losses = metrics_of(supervised, "train_mean_nll")
        assert len(losses) == 10 and losses[-1] < losses[0] / 2

        options = ["batch_size=9", "group_size=8", "max_tokens=16", "learning_rate=1e-3", "max_steps=10"]
        options += ["loss_fn=importance_sampling", f"log_path={reinforced}"]
        run_client(["-m", "tinker_cookbook.recipes.rl_loop", *common, *options], variables, tmp_path)
        rewards = metrics_of(reinforced, "reward/total")
        assert len(rewards) == 10 and sum(rewards[-3:]) / 3 > rewards[0] + 0.2
