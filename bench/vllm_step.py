"""Seconds per GRPO step with vLLM as the sampler, on the trainer's own device: `bench/grpo_step.py`, other engine.

    python bench/vllm_step.py --model DIR --device cuda --prompts 64 --samples 8 --tokens 256 [--peer FILE] [--sleep]

The same questions, rewards and report. vLLM gets `--share` of the GPU's memory; with `--sleep` it gives that back while
the policy trains. Prints the size of the gap between vLLM's logprobs and the policy's, as every run records it.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

import torch

from bench.grpo_step import CONFIG, Printed, report
from treadle.cluster.training import train
from treadle.config import TrainConfig, loads

ENGINE = """rollout:
  name: vllm
  gpu_memory_utilization: {share}
  free_cache_engine: {sleep}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="treadle/tiny-calculator")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", type=int, default=32768, help="tokens in a micro batch")
    parser.add_argument("--share", type=float, default=0.3, help="vLLM's share of the GPU's memory")
    parser.add_argument("--sleep", action="store_true", help="let vLLM sleep while the policy trains")
    parser.add_argument("--peer", type=Path, help="figures of other trainers, from the same machine")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        text = CONFIG.replace("rollout:\n", ENGINE).format(
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
    gap = statistics.mean(step["rollout_corr/logprob_abs_diff"] for step in view.steps)
    worst = max(step["rollout_corr/logprob_abs_diff_max"] for step in view.steps)
    print(f"logprobs of sampler and trainer differ by {gap:.2e} on average, {worst:.2e} at most")


if __name__ == "__main__":
    main()
