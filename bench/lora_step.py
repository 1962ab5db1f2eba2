"""A LoRA training step on given tokens, against TRL + PEFT on the same work in the same run: seconds, memory, the loss.

    PYTHONPATH=. python bench/lora_step.py [--peer PYTHON] [--hidden 512] [--layers 8] [--r 16] [--device cpu]

The model is a random Llama; rows are prompts of one length with answers of 16 to `--tokens` tokens, each with an
advantage. Both sides start from the same adapter on all linear modules, which was trained one step here, and take the
same steps: loss over all sampled tokens, backward, clipping, AdamW. `bench/trl_lora_step.py` is TRL's side, run by
PYTHON, which has trl and peft. Each side has a process of its own for each turn, and turns alternate, ours first
and last.
Medians; CPU seconds do not depend on who else uses the machine. Memory is what a process had at most, torch
and the libraries included; on a GPU what was allocated there at most. Full training of the same model is
printed beside it.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from treadle.config import ActorConfig, LoraConfig, ModelConfig, OptimConfig, RolloutCorrectionConfig
from treadle.model.load import without_progress_bar
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.protocol import TrainBatch
from treadle.types import Row

PROMPT = 32


def save_model(options: argparse.Namespace, directory: Path) -> None:
    """A random Llama with a tokenizer beside it, which TRL's trainer wants to see."""
    import shutil

    from transformers import LlamaConfig, LlamaForCausalLM

    from treadle.model.tokenizer import resolve_model_path

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    with without_progress_bar():
        LlamaForCausalLM(config).save_pretrained(directory)
    source = resolve_model_path("treadle/tiny-calculator")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, directory / name)


def make_work(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Rows and advantages, as both sides read them."""
    rng = random.Random(0)
    lengths = [rng.randint(16, options.tokens) for _ in range(options.rows)]
    draw = lambda count: [rng.randrange(3, options.vocabulary) for _ in range(count)]  # noqa: E731
    return {
        "model": str(directory / "model"),
        "adapter": str(directory / "adapter"),
        "prompt_ids": [draw(PROMPT) for _ in lengths],
        "ids": [draw(length) for length in lengths],
        "advantages": [rng.gauss(0, 1) for _ in lengths],
        "steps": options.steps,
        "micro": options.micro,
        "device": options.device,
    }


def make_batch(work: Mapping[str, Any]) -> TrainBatch:
    rows = tuple(
        Row(tuple(prompt), tuple(ids), (1,) * len(ids), (-1.0,) * len(ids), (0,) * len(ids))
        for prompt, ids in zip(work["prompt_ids"], work["ids"], strict=True)
    )
    advantages = [value for row, value in zip(rows, work["advantages"], strict=True) for _ in row.ids]
    places = tuple(range(len(rows)))
    return TrainBatch(rows, places, places, torch.tensor(advantages))


def make_policy(work: Mapping[str, Any], adapter: str | None, r: int | None) -> SinglePolicy:
    """fp32 on a CPU, as TRL's side; on a GPU in bf16."""
    longest = PROMPT + max(map(len, work["ids"]))
    device = torch.device(work["device"])
    return SinglePolicy.create(
        model=ModelConfig(path=work["model"], adapter=adapter, enable_gradient_checkpointing=False),
        actor=ActorConfig(
            ppo_mini_batch_size=len(work["ids"]),
            ppo_max_token_len_per_gpu=work["micro"] * longest,
            dtype="fp32" if device.type == "cpu" else "bf16",
            lora=LoraConfig(r=r),
            optim=OptimConfig(lr=1e-4, weight_decay=0.0),
        ),
        rollout_correction=RolloutCorrectionConfig(),
        sampling=Sampling(1.0, longest - PROMPT, longest),
        total_steps=100,
        device=device,
    )


def peak_mb(device: str) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure_here(work: Mapping[str, Any], r: int | None) -> dict[str, Any]:
    """Steps from the shared adapter; of all parameters where there is no rank."""
    policy, batch = make_policy(work, None if r is None else work["adapter"], r), make_batch(work)
    seconds, cpu, told = [], [], []
    for _ in range(work["steps"]):
        wall, used = time.perf_counter(), time.process_time()
        told.append(policy.train(batch))
        if work["device"] != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - used)
    return {
        "name": "treadle",
        "loss": told[0]["actor/pg_loss"],
        "grad_norm": told[0]["actor/grad_norm"],
        "seconds": seconds,
        "cpu": cpu,
        "memory_mb": peak_mb(work["device"]),
    }


def run_part(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads([row for row in done.stdout.splitlines() if row.startswith('{"')][-1])
    return found


def summarize(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the steps of all turns but the first of each."""
    return {
        "seconds": statistics.median(value for turn in turns for value in turn["seconds"][1:]),
        "CPU seconds": statistics.median(value for turn in turns for value in turn["cpu"][1:]),
        "memory, MB": statistics.median(turn["memory_mb"] for turn in turns),
        "loss": turns[0]["loss"],
        "gradient norm": turns[0]["grad_norm"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with trl and peft")
    for name, default in (("hidden", 512), ("layers", 8), ("vocabulary", 8192), ("rows", 32), ("tokens", 192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("r", 16), ("steps", 4), ("micro", 8), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        work = json.loads(Path(options.part).read_text())
        print(json.dumps(measure_here(work, options.r or None)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(options, folder / "model")
        work = make_work(options, folder)
        policy = make_policy(work, None, options.r)
        policy.train(make_batch(work))
        policy.save(folder / "adapter")
        sizes = {name: tensor.numel() for name, tensor in policy.tensors().items()}
        adapters = sum(tensor.numel() for tensor in policy._optimizer.weights.full.values())
        print(
            f"{sum(sizes.values()) / 1e6:.1f} million parameters, {adapters / 1e6:.2f} in adapters of rank {options.r}"
        )
        tokens = sum(map(len, work["ids"]))
        print(
            f"{options.rows} rows, {tokens} sampled tokens, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
        )
        file = folder / "work.json"
        file.write_text(json.dumps(work))
        print_table(measure(options, str(file)))


def measure(options: argparse.Namespace, file: str) -> dict[str, dict[str, float]]:
    """Each side's figures; turns alternate."""
    ours = [sys.executable, __file__, "--part", file, "--r"]
    theirs = [options.peer, str(Path(__file__).with_name("trl_lora_step.py")), file]
    turns: dict[str, list[dict[str, Any]]] = {"treadle LoRA": [], "TRL + PEFT": [], "treadle full": []}
    for _ in range(options.turns):
        turns["treadle LoRA"].append(run_part([*ours, str(options.r)]))
        if options.peer:
            turns["TRL + PEFT"].append(run_part(theirs))
        turns["treadle full"].append(run_part([*ours, "0"]))
    turns["treadle LoRA"].append(run_part([*ours, str(options.r)]))
    return {name: summarize(found) for name, found in turns.items() if found}


def print_table(found: Mapping[str, Mapping[str, float]]) -> None:
    ours = found["treadle LoRA"]
    print(f"\n{'a step':16}" + "".join(f"{name:>16}" for name in found))
    for figure in ours:
        print(f"{figure:16}" + "".join(f"{side[figure]:16.5g}" for side in found.values()))
    for name in ("TRL + PEFT", "treadle full"):
        if name in found:
            shown = ", ".join(
                f"{found[name][figure] / ours[figure]:.2f} × {figure}"
                for figure in ("seconds", "CPU seconds", "memory, MB")
            )
            print(f"{name} over treadle LoRA: {shown}")


if __name__ == "__main__":
    main()
