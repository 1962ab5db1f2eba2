"""A step of supervised fine-tuning on given tokens, against TRL's SFTTrainer on the same rows in the same run.

    PYTHONPATH=. python bench/sft_step.py [--peer PYTHON] [--hidden 512] [--layers 8] [--sorted] [--device cpu]

The model is a random Llama; rows are prompts of one length with answers of 16 to `--tokens` tokens, which alone are
learned. Both sides take the same steps on all parameters: cross entropy over all answers' tokens, backward, clipping,
AdamW. treadle packs its rows, TRL pads each micro batch of `--micro` rows to its longest; with `--sorted` rows come by
length, so that it pads least. `bench/trl_sft_step.py` is TRL's side, run by PYTHON, which has trl. Each side has a
process of its own for each turn, and turns alternate, ours first and last. Medians; CPU seconds depend least on who
else uses the machine. Memory is what a process had at most, torch and the libraries included; on a GPU what was
allocated there at most.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lora_step import PROMPT, make_work, peak_mb, run_part, save_model, summarize

from treadle.config import SFTRunConfig, loads
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.trainer.sft import make_batch
from treadle.trainer.sft_data import training_row, with_step_settings


def make_policy(work: Mapping[str, Any]) -> SinglePolicy:
    """As `treadle sft` makes it: fp32 on a CPU, as TRL's side; on a GPU in bf16 over fp32 weights."""
    longest = PROMPT + max(map(len, work["ids"]))
    words = (
        f"model.path={work['model']}",
        "model.enable_gradient_checkpointing=false",
        "data.train_files=[none.jsonl]",
        f"data.train_batch_size={len(work['ids'])}",
        f"actor.ppo_mini_batch_size={len(work['ids'])}",
        f"actor.ppo_max_token_len_per_gpu={work['micro'] * longest}",
        f"actor.dtype={'fp32' if work['device'] == 'cpu' else 'bf16'}",
        "actor.optim={lr: 1e-4, weight_decay: 0.0}",
    )
    config = loads("sft: {}", "the benchmark", words)
    assert isinstance(config, SFTRunConfig)
    config = with_step_settings(config, longest)
    return SinglePolicy.create(
        model=config.model,
        actor=config.actor,
        rollout_correction=config.algorithm.rollout_correction,
        sampling=Sampling(1.0, longest - 1, longest),
        total_steps=100,
        device=torch.device(work["device"]),
    )


def measure_here(work: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of the whole model on rows that were laid out before."""
    policy = make_policy(work)
    pairs = zip(work["prompt_ids"], work["ids"], strict=True)
    batch = make_batch([training_row(prompt, ids, [1] * len(ids)) for prompt, ids in pairs])
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


def measure(options: argparse.Namespace, file: str) -> dict[str, dict[str, float]]:
    """Each side's figures; turns alternate."""
    ours = [sys.executable, __file__, "--part", file]
    theirs = [options.peer, str(Path(__file__).with_name("trl_sft_step.py")), file]
    turns: dict[str, list[dict[str, Any]]] = {"treadle": [], "TRL": []}
    for _ in range(options.turns):
        turns["treadle"].append(run_part(ours))
        if options.peer:
            turns["TRL"].append(run_part(theirs))
    turns["treadle"].append(run_part(ours))
    return {name: summarize(found) for name, found in turns.items() if found}


def print_table(found: Mapping[str, Mapping[str, float]]) -> None:
    ours = found["treadle"]
    print(f"\n{'a step':16}" + "".join(f"{name:>14}" for name in found))
    for figure in ours:
        print(f"{figure:16}" + "".join(f"{side[figure]:14.5g}" for side in found.values()))
    if "TRL" in found:
        figures = ("seconds", "CPU seconds", "memory, MB")
        print("TRL over treadle: " + ", ".join(f"{found['TRL'][name] / ours[name]:.2f} × {name}" for name in figures))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with trl")
    for name, default in (("hidden", 512), ("layers", 8), ("vocabulary", 8192), ("rows", 32), ("tokens", 192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("steps", 4), ("micro", 8), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sorted", action="store_true", help="rows by length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        print(json.dumps(measure_here(json.loads(Path(options.part).read_text()))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(options, folder / "model")
        work = make_work(options, folder)
        if options.sorted:
            work["ids"].sort(key=len)
        tokens, longest = sum(map(len, work["ids"])), max(map(len, work["ids"]))
        print(f"{options.rows} rows, {tokens} learned tokens, the longest answer has {longest}")
        print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
        file = folder / "work.json"
        file.write_text(json.dumps(work))
        print_table(measure(options, str(file)))


if __name__ == "__main__":
    main()
