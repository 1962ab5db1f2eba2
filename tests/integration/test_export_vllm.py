"""What training writes, others load: an export and a checkpoint say the same greedy words everywhere.

The bundled model, moved by a training step, is asked by our engine, by transformers, and by real vLLM in a process of
its own. Where vLLM is not installed its test is skipped.
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.policies import make_groups, make_policy
from treadle.algorithm.advantage_inputs import rows_of
from treadle.checkpoint import export
from treadle.checkpoint.store import copy_tokenizer
from treadle.config import ModelConfig, OptimConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.native.engine import NativeEngine
from treadle.model.tokenizer import resolve_model_path
from treadle.policy.protocol import TrainBatch, group_and_trajectory_ids
from treadle.types import Request, SamplingParams

MODEL = ModelConfig(path="treadle/tiny-calculator")
BEFORE = resolve_model_path(MODEL.path)
SUMS = ("12+34=", "99-7=", "(12*3)+4=", "(50-8)-91=", "6*7=", "(2+2)+2=")
LENGTH = 40

VLLM = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
directory, prompts, length = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
llm = LLM(model=directory, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=True)
greedy = SamplingParams(temperature=0, max_tokens=length)
found = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], greedy, use_tqdm=False)
print("FOUND", json.dumps([list(output.outputs[0].token_ids) for output in found]))
"""


@dataclass(frozen=True)
class Trained:
    """Directories that hold the same trained weights, and what our engine says with them."""

    exported: Path
    checkpoint: Path
    prompts: list[list[int]]
    said: list[list[int]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    policy = make_policy(BEFORE, optim=OptimConfig(lr=5e-3))  # so large a step that greedy words change
    policy.train(make_batch())
    export(policy, folder / "exported", MODEL)
    (folder / "checkpoint").mkdir()
    policy.save(folder / "checkpoint")
    copy_tokenizer(MODEL, folder / "checkpoint")
    renderer = Renderer.create(MODEL)
    prompts = [list(renderer.prompt([{"role": "user", "content": text}])) for text in SUMS]
    said = asyncio.run(ask_engine(policy.module, prompts, renderer.stop_token_ids))
    return Trained(folder / "exported", folder / "checkpoint", prompts, said)


def make_batch() -> TrainBatch:
    """A step's worth of rows that teach something, whatever."""
    groups = make_groups()
    rows = rows_of(groups)
    advantages = [(-1.0) ** at for at, row in enumerate(rows) for _ in row.ids]
    return TrainBatch(rows, *group_and_trajectory_ids(groups), torch.tensor(advantages))


async def ask_engine(module: Any, prompts: list[list[int]], stops: tuple[int, ...]) -> list[list[int]]:
    engine = await NativeEngine.create(RolloutConfig(prompt_length=64, response_length=LENGTH), module)
    try:
        greedy = SamplingParams(LENGTH, temperature=0, stop_token_ids=stops)
        asked = (engine.generate(Request(f"{at}", 0, tuple(ids), greedy)) for at, ids in enumerate(prompts))
        return [list(completion.ids) for completion in await asyncio.gather(*asked)]
    finally:
        await engine.close()


def ask_transformers(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    said = (module.generate(torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False)[0] for ids in prompts)
    return [ids[len(prompt) :].tolist() for prompt, ids in zip(prompts, said, strict=True)]


def test_the_step_changed_what_the_model_says(trained: Trained) -> None:
    """Otherwise stale weights would pass below."""
    assert ask_transformers(BEFORE, trained.prompts) != trained.said
    assert all(ids[-1] == 2 for ids in trained.said), "every answer ends, so that none is cut where others go on"


@pytest.mark.parametrize("kind", ["exported", "checkpoint"])
def test_transformers_says_the_same_words(trained: Trained, kind: str) -> None:
    assert ask_transformers(getattr(trained, kind), trained.prompts) == trained.said


def test_transformers_loads_the_tokenizer(trained: Trained) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained.exported)
    message = [{"role": "user", "content": SUMS[0]}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert ids == trained.prompts[0]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment")
def test_vllm_says_the_same_words(trained: Trained) -> None:
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, "-c", VLLM, str(trained.exported), json.dumps(trained.prompts), str(LENGTH)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
        cwd=trained.exported.parent,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("FOUND ")]
    assert json.loads(line.removeprefix("FOUND ")) == trained.said
