"""A training step with shared prefixes against the flat form, by the prompt's share of a row and the size of a group.

    PYTHONPATH=. python bench/shared_prefix.py [--device cpu] [--samples 4 8 16 32] [--shares 0.25 0.5 0.75 0.9]

The model is a random Llama (`--hidden`, `--layers`); rows have `--length` tokens, of which the share is the prompt that
the samples of a group have in common. Each step trains `--groups` groups in one optimizer step, with micro batches of
at most `--budget` tokens. The two forms take turns on one policy, in one process, at a learning rate so small that both
train the same weights; medians of `--turns` turns. On a CPU one thread computes and its seconds are counted, which do
not depend on other work of the machine; on a GPU those of the clock. Tokens are those that the network reads; memory,
on a GPU, what was allocated at most in a step.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from treadle.config import ActorConfig, ModelConfig, OptimConfig, RolloutCorrectionConfig
from treadle.model.load import without_progress_bar
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.protocol import TrainBatch
from treadle.types import Row


def save_model(options: argparse.Namespace, directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=64,
        max_position_embeddings=max(4096, options.length),
        tie_word_embeddings=True,
    )
    with without_progress_bar():
        LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text("{}")


def make_policy(options: argparse.Namespace, directory: Path) -> SinglePolicy:
    return SinglePolicy.create(
        model=ModelConfig(path=str(directory), enable_gradient_checkpointing=options.recompute),
        actor=ActorConfig(
            dtype="bf16" if options.device == "cuda" else "fp32",
            ppo_max_token_len_per_gpu=max(options.budget, options.length),
            ppo_mini_batch_size=options.groups,
            optim=OptimConfig(lr=1e-12, weight_decay=0.0),
        ),
        rollout_correction=RolloutCorrectionConfig(),
        sampling=Sampling(1.0, options.length),
        total_steps=1000,
        device=torch.device(options.device),
    )


def make_batch(options: argparse.Namespace, samples: int, share: float) -> TrainBatch:
    rng = random.Random(0)
    prompt_length = max(1, round(options.length * share))
    rows = []
    for _ in range(options.groups):
        prompt = tuple(rng.randrange(3, options.vocabulary) for _ in range(prompt_length))
        for _ in range(samples):
            ids = tuple(rng.randrange(3, options.vocabulary) for _ in range(options.length - prompt_length))
            rows.append(Row(prompt, ids, (1,) * len(ids), (-5.0,) * len(ids), (0,) * len(ids)))
    groups = tuple(at // samples for at in range(len(rows)))
    advantages = torch.randn(sum(len(row.ids) for row in rows), generator=torch.Generator().manual_seed(1))
    return TrainBatch(tuple(rows), groups, tuple(range(len(rows))), advantages)


def take_step(policy: SinglePolicy, batch: TrainBatch, shared: bool) -> tuple[float, dict[str, float], float]:
    """Seconds, metrics, and the GB that were allocated at most."""
    network = policy._network
    network.shares_prefixes = shared
    on_gpu = network.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock = time.perf_counter if on_gpu else time.process_time
    began = clock()
    metrics = policy.train(batch)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - began, metrics, torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0


def measure(options: argparse.Namespace, policy: SinglePolicy, samples: int, share: float) -> dict[str, float]:
    batch = make_batch(options, samples, share)
    turns: dict[bool, list[tuple[float, dict[str, float], float]]] = {True: [], False: []}
    for turn in range(options.turns + 1):
        for shared in (True, False):
            found = take_step(policy, batch, shared)
            if turn:  # the first one compiles and allocates
                turns[shared].append(found)
    (mine, theirs) = (turns[shared] for shared in (True, False))
    seconds = [statistics.median(found[0] for found in side) for side in (mine, theirs)]
    return {
        "samples": samples,
        "prompt_share": share,
        "tokens_shared": mine[0][1]["actor/tokens"],
        "tokens_flat": theirs[0][1]["actor/tokens"],
        "shared_s": seconds[0],
        "flat_s": seconds[1],
        "speedup": seconds[1] / seconds[0],
        "shared_gb": max(found[2] for found in mine),
        "flat_gb": max(found[2] for found in theirs),
        "grad_norm_gap": abs(mine[0][1]["actor/grad_norm"] / theirs[0][1]["actor/grad_norm"] - 1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(options, Path(folder))
        policy = make_policy(options, Path(folder))
        if not options.json:
            print("samples  prompt  tokens flat → shared    flat s  shared s  speedup  GB flat → shared  norm gap")
        for samples in options.samples:
            for share in options.shares:
                row = measure(options, policy, samples, share)
                if options.json:
                    print(json.dumps(row), flush=True)
                    continue
                tokens = f"{row['tokens_flat']:9,.0f} → {row['tokens_shared']:7,.0f}"
                times = f"{row['flat_s']:9.3f} {row['shared_s']:9.3f} {row['speedup']:8.2f}"
                memory = f"{row['flat_gb']:7.2f} → {row['shared_gb']:6.2f}"
                print(f"{samples:7} {share:7.0%}  {tokens}  {times}  {memory}  {row['grad_norm_gap']:9.1e}", flush=True)


if __name__ == "__main__":
    main()
