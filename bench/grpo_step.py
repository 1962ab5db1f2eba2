"""Seconds per GRPO step, and where they go: the whole path, tasks to new weights.

    python bench/grpo_step.py --model DIR --device cuda --prompts 64 --samples 8 --tokens 256 [--peer FILE]
    python bench/grpo_step.py --engine vllm --share 0.3 [--sleep] …

Rewards are by length, so that every group has a signal. Prints each step's spans and the median of all but the first
two; on a GPU also the share of its matrix speed, measured in the same run, that training uses (6 × parameters × tokens
over the seconds of training), and the peak of its memory. A peer file has a JSON line for each figure,
{"peer": NAME, "step_s": X}, from the same machine: ratios to it are printed. The engine is on the trainer's own device,
with `--share` of a GPU's memory; with `--sleep` it gives that back while the policy trains. Also prints how far its
logprobs are from the policy's, as every run records it.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from treadle.cluster.training import train
from treadle.config import ModelConfig, TrainConfig, loads
from treadle.model.load import load_model_config

CONFIG = """
model: {{path: {model}, enable_gradient_checkpointing: false}}
data: {{train_files: "bench.grpo_step:rows", train_batch_size: {prompts}}}
rollout:
  name: {engine}
  gpu_memory_utilization: {share}
  free_cache_engine: {sleep}
  n: {samples}
  prompt_length: 128
  response_length: {tokens}
  max_num_seqs: {sequences}
  max_num_batched_tokens: 16384
reward: {{functions: {{length: {{path: "bench.grpo_step:by_length"}}}}, num_workers: 0}}
actor:
  ppo_mini_batch_size: {prompts}
  ppo_max_token_len_per_gpu: {budget}
  dtype: {dtype}
  optim: {{lr: 1.0e-6}}
trainer: {{total_training_steps: {steps}, n_gpus_per_node: {gpus}, val_before_train: false}}
logging: {{run_dir: {run_dir}}}
"""


def rows() -> list[dict[str, str]]:
    """Questions enough for any run."""
    return [{"prompt": f"What is {at} + {at * 7 % 91}? Explain step by step.", "answer": ""} for at in range(2048)]


def by_length(response: str) -> float:
    """A reward that differs between samples."""
    return len(response) % 7 / 7


class Printed:
    """Shows each step's seconds, and keeps them."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def begin(self, total_steps: int) -> None: ...

    def watch(self, phase: Callable[[], str]) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics)
        shown = {name: round(value, 3) for name, value in metrics.items() if name.startswith(("seconds", "timing"))}
        print(f"step {step}: {shown}, length {metrics['response_length/mean']:.0f}", flush=True)


def matrix_speed() -> float:
    """Operations per second of a large product in bfloat16."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    left @ right
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        left @ right
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - began)


def count_parameters(path: str) -> int:
    """Weights that take part in products: the embedding counts once, as the output layer."""
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(load_model_config(ModelConfig(path=path)))
    module.tie_weights()
    return sum(parameter.numel() for parameter in module.parameters())


def read_peers(file: Path | None) -> list[tuple[str, float]]:
    """Name and seconds per step of each figure."""
    if file is None:
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]
    return [(line["peer"], line["step_s"]) for line in lines if "step_s" in line]


def report(steps: list[Mapping[str, float]], options: argparse.Namespace) -> None:
    timed = steps[2:] or steps
    spans = {
        name: statistics.median(step[f"seconds/{name}"] for step in timed) for name in ("rollout", "train", "weights")
    }
    total = sum(spans.values())
    print(f"median step {total:.3f} s: " + ", ".join(f"{name} {value:.3f} s" for name, value in spans.items()))
    for name, other in read_peers(options.peer):
        print(f"{other / total:.1f} × {name} ({other:.2f} s)")
    if options.device == "cuda":
        tokens = statistics.median(step["actor/tokens"] for step in timed)
        speed = 6 * count_parameters(options.model) * tokens / spans["train"]
        print(f"training {tokens:,.0f} tokens: {speed / matrix_speed():.1%} of the matrix speed")
        print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    gap = statistics.mean(step["rollout_corr/logprob_abs_diff"] for step in steps)
    worst = max(step["rollout_corr/logprob_abs_diff_max"] for step in steps)
    print(f"logprobs of sampler and trainer differ by {gap:.2e} on average, {worst:.2e} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="treadle/tiny-calculator")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", type=int, default=32768, help="tokens in a micro batch")
    parser.add_argument("--engine", default="native", choices=("native", "vllm"))
    parser.add_argument("--share", type=float, default=0.5, help="the engine's share of the GPU's memory")
    parser.add_argument("--sleep", action="store_true", help="let the engine sleep while the policy trains")
    parser.add_argument("--peer", type=Path, help="figures of other trainers, from the same machine")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        text = CONFIG.format(
            **vars(options) | {"sleep": str(options.sleep).lower()},
            sequences=options.prompts * options.samples,
            dtype="bf16" if on_gpu else "fp32",
            gpus=int(on_gpu),
            run_dir=Path(folder) / "run",
        )
        config = loads(text, "bench")
        assert isinstance(config, TrainConfig), "the text has a trainer section"
        view = Printed()
        asyncio.run(train(config, view))
    report(view.steps, options)


if __name__ == "__main__":
    main()
