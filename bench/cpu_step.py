"""A GRPO step on a CPU, tasks to new weights, against TRL on the same work in the same run: seconds, and the loss.

    python bench/cpu_step.py --tokenizer DIR --peer PYTHON

The work: a random Llama of 6.4 million parameters, 16 prompts × 8 samples × 32 tokens, a reward by length parity, one
optimizer step. DIR is a tokenizer with a chat template, PYTHON one that has trl: `bench/trl_cpu_step.py` does the same
work with the same model files, and `bench/trl_loss.py` computes TRL's loss on the very tokens that were sampled here.
Without a peer only our own figures are printed. Medians over the steps after the first; CPU seconds depend little on
what else the machine does.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from treadle.cluster.training import train
from treadle.config import TrainConfig, loads
from treadle.journal import JournalReader
from treadle.model.load import without_progress_bar
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.protocol import TrainBatch
from treadle.types import Message, Trajectory

QUESTION = "Problem {:05d}: use the add tool three times on 1 and 2, then answer."
TRL_EPSILON = 1e-4
"""What TRL adds to a group's standard deviation; ours is 1e-6. The losses are compared on TRL's advantages."""

CONFIG = """
model: {{path: {model}, enable_gradient_checkpointing: false}}
data: {{train_files: "bench.cpu_step:rows", train_batch_size: {prompts}, shuffle: false}}
rollout: {{n: {samples}, prompt_length: 64, response_length: {tokens}, max_num_seqs: {sequences}}}
reward: {{functions: {{parity: {{path: "bench.cpu_step:by_parity"}}}}, num_workers: 0}}
actor: {{ppo_mini_batch_size: {prompts}, dtype: fp32, optim: {{lr: 1.0e-6}}}}
algorithm: {{rollout_correction: {{bypass_mode: {bypass}}}}}
trainer: {{total_training_steps: {steps}, val_before_train: false}}
logging: {{run_dir: {run_dir}}}
"""


def rows() -> list[dict[str, str]]:
    """The prompts, as `trl_cpu_step.py` has them."""
    return [{"uid": f"{at:05d}", "prompt": QUESTION.format(at), "answer": ""} for at in range(1024)]


def by_parity(response: str) -> float:
    """The reward, as `trl_cpu_step.py` has it."""
    return float(len(response) % 2)


def save_model(tokenizer: str, directory: Path) -> None:
    """The model that both load, with its tokenizer beside it."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    config = LlamaConfig(
        vocab_size=len(loaded),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id,
        pad_token_id=loaded.pad_token_id,
    )
    with without_progress_bar():
        LlamaForCausalLM(config).save_pretrained(directory)
    loaded.save_pretrained(directory)


def load_config(options: argparse.Namespace, folder: Path, *, bypass: bool = False) -> TrainConfig:
    text = CONFIG.format(
        model=options.model,
        prompts=options.prompts,
        samples=options.samples,
        tokens=options.tokens,
        sequences=options.prompts * options.samples,
        steps=options.steps + 1,
        run_dir=folder / "run",
        bypass=str(bypass).lower(),
    )
    config = loads(text, "bench")
    assert isinstance(config, TrainConfig), "the text has a trainer section"
    return config


class Clock:
    """A view that keeps each step's metrics, with its seconds on the wall and on all CPUs."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._inner = dict.fromkeys(("backward", "optimizer"), 0.0)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def begin(self, total_steps: int) -> None: ...

    def watch(self, phase: Callable[[], str]) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.steps.append({**metrics, **self._inner, "wall": wall - self._wall, "cpu": cpu - self._cpu})
        self._inner = dict.fromkeys(self._inner, 0.0)
        self._wall, self._cpu = wall, cpu

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Also time backward and the optimizer, inside of torch."""
        plain, began = torch.Tensor.backward, [0.0]

        def backward(*arguments: Any, **others: Any) -> None:
            start = time.perf_counter()
            plain(*arguments, **others)  # type: ignore[no-untyped-call]
            self._inner["backward"] += time.perf_counter() - start

        def before(*_: Any) -> None:
            began[0] = time.perf_counter()

        def after(*_: Any) -> None:
            self._inner["optimizer"] += time.perf_counter() - began[0]

        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.backward = plain  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()


def time_steps(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """A run from the first weights; its steps after the first."""
    clock = Clock()
    with clock.listening():
        asyncio.run(train(load_config(options, folder), clock))
    timed = clock.steps[1:]
    lengths = statistics.mean(step["response_length/mean"] for step in timed)
    walls = [round(step["wall"], 2) for step in timed]
    print(f"treadle, {torch.get_num_threads()} threads, {lengths:.1f} tokens a response; steps {walls}", flush=True)
    return timed


def bench_treadle(timed: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median seconds of a step and of its parts."""
    middle = {name: statistics.median(step[name] for step in timed) for name in timed[0]}
    return {
        "step": middle["wall"],
        "step, CPU seconds": middle["cpu"],
        "rollout": middle["seconds/rollout"],
        "old logprobs": middle["actor/old_logprobs_s"],
        "forward and loss": middle["actor/update_s"] - middle["backward"] - middle["optimizer"],
        "backward": middle["backward"],
        "optimizer": middle["optimizer"],
        "push, proven": middle["seconds/weights"],
    }


def bench_peer(python: str, options: argparse.Namespace) -> dict[str, float]:
    """The same of the peer; its rollout and its loss use one module, so nothing is pushed."""
    sizes = ["--steps", options.steps, "--prompts", options.prompts, "--samples", options.samples]
    script = str(Path(__file__).with_name("trl_cpu_step.py"))
    words = ["--model", str(options.model), *map(str, sizes), "--tokens", str(options.tokens)]
    line = run_peer([python, script, *words])
    walls = [round(step["wall"], 2) for step in line["steps"]]
    print(
        f"{line['peer']}, {line['threads']} threads, {line['tokens']:.1f} tokens a response; steps {walls}", flush=True
    )
    middle = {name: statistics.median(step[name] for step in line["steps"]) for name in line["steps"][0]}
    return {
        "step": middle["wall"],
        "step, CPU seconds": middle["cpu"],
        "rollout": middle["rollout"],
        "old logprobs": 0.0,
        "forward and loss": middle["loss"],
        "backward": middle["backward"],
        "optimizer": middle["optimizer"],
    }


def run_peer(command: Sequence[str]) -> Any:
    """The last JSON line of a peer's script, run here and now."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, check=False, cwd=os.path.dirname(command[1]) or None
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads([row for row in done.stdout.splitlines() if row.startswith('{"')][-1])


@dataclass(frozen=True, slots=True)
class Sampled:
    """The first step's trajectories, group after group, with the peer's kind of advantage."""

    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]

    @classmethod
    def read(cls, run_dir: Path, samples: int) -> "Sampled":
        with JournalReader.open(run_dir) as journal:
            found = [entry.trajectory for entry in journal.trajectories()]
        first = [trajectory for trajectory in found if set(trajectory.rows[0].versions) == {0}]
        first.sort(key=lambda trajectory: (trajectory.uid, trajectory.sample))
        scores = [trajectory.reward.value for trajectory in first if trajectory.reward]
        rewards = torch.tensor(scores).view(-1, samples)
        centred = rewards - rewards.mean(1, keepdim=True)
        return cls(tuple(first), tuple((centred / (rewards.std(1, keepdim=True) + TRL_EPSILON)).flatten().tolist()))

    def moved(self) -> "Sampled":
        """With logprobs as if another policy had sampled: ratios from 0.7 to 1.4, so that some are clipped."""
        random = torch.Generator().manual_seed(0)
        return replace(self, trajectories=tuple(_move(trajectory, random) for trajectory in self.trajectories))

    def batch(self, samples: int) -> TrainBatch:
        rows = tuple(trajectory.rows[0] for trajectory in self.trajectories)
        advantages = [value for row, value in zip(rows, self.advantages, strict=True) for _ in row.ids]
        groups = tuple(at // samples for at in range(len(rows)))
        return TrainBatch(rows, groups, tuple(range(len(rows))), torch.tensor(advantages))

    def work(self, model: Path, samples: int) -> dict[str, Any]:
        """What `trl_loss.py` reads."""
        rows = [trajectory.rows[0] for trajectory in self.trajectories]
        return {
            "model": str(model),
            "samples": samples,
            "prompts": [_question(trajectory) for trajectory in self.trajectories],
            "prompt_ids": [row.prompt_ids for row in rows],
            "ids": [row.ids for row in rows],
            "advantages": self.advantages,
            "old_logprobs": [row.logprobs for row in rows],
        }


def _question(trajectory: Trajectory) -> list[Message]:
    return [dict(message) for message in trajectory.messages if message["role"] == "user"]


def _move(trajectory: Trajectory, random: torch.Generator) -> Trajectory:
    row = trajectory.rows[0]
    shifts = (torch.rand(len(row.ids), generator=random) * 0.7 - 0.35).tolist()
    logprobs = tuple(logprob + shift for logprob, shift in zip(row.logprobs, shifts, strict=True))
    return replace(trajectory, rows=(replace(row, logprobs=logprobs),))


def our_loss(config: TrainConfig, batch: TrainBatch) -> dict[str, float]:
    """Loss and gradient norm of the first step, from fresh weights."""
    policy = SinglePolicy.create(
        model=config.model,
        actor=config.actor,
        rollout_correction=config.algorithm.rollout_correction,
        sampling=Sampling(config.rollout.temperature, config.rollout.response_length),
        total_steps=1,
        device=torch.device("cpu"),
    )
    metrics = policy.train(batch)
    return {"loss": metrics["actor/pg_loss"], "grad_norm": metrics["actor/grad_norm"]}


def compare_losses(python: str, options: argparse.Namespace, folder: Path) -> None:
    """On the tokens of our first step: with the sampler as the old policy's equal, and moved away from it."""
    sampled = Sampled.read(folder / "run", options.samples)
    moved = sampled.moved()
    work = folder / "work.json"
    work.write_text(json.dumps(moved.work(options.model, options.samples)))
    theirs = run_peer([python, str(Path(__file__).with_name("trl_loss.py")), str(work)])
    ours = {
        "on_policy": our_loss(load_config(options, folder), sampled.batch(options.samples)),
        "off_policy": our_loss(load_config(options, folder, bypass=True), moved.batch(options.samples)),
    }
    print(
        f"\nLoss on the same {len(sampled.trajectories)} samples ({theirs['loss_type']} in TRL, token-mean here); ",
        end="",
    )
    print(f"TRL renders {'the same' if theirs['same_prompts'] else 'OTHER'} prompts")
    print(f"{'':42}{'treadle':>14}{'TRL':>14}{'difference':>12}")
    for kind, name in (("on_policy", "old policy = current"), ("off_policy", "old policy moved, some clipped")):
        for figure in ("loss", "grad_norm"):
            one, other = ours[kind][figure], theirs[kind][figure]
            label = f"{name}: {figure.replace('_', ' ')}"
            print(f"{label:42}{one:14.8f}{other:14.8f}{abs(one - other):12.1e}")


def print_table(ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    print(f"\n{'seconds':24}{'treadle':>10}{'TRL':>10}{'ratio':>8}")
    for name, figure in ours.items():
        other = theirs.get(name)
        shown = "" if other is None else f"{other:10.3f}"
        ratio = f"{other / figure:7.1f} ×" if other and figure else ""
        print(f"{name:24}{figure:10.3f}{shown:>10}{ratio:>8}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="directory of the tokenizer that the peer loads")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python that has trl")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one that warms up")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options.model = folder / "model"
        save_model(options.tokenizer, options.model)
        timed = time_steps(options, folder)
        theirs = bench_peer(options.peer, options) if options.peer else {}
        if options.peer:  # once more, so that neither had the quieter half of the machine's time
            timed += time_steps(options, folder / "again")
        print_table(bench_treadle(timed), theirs)
        if options.peer:
            compare_losses(options.peer, options, folder)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bench.cpu_step import main as run  # so that tasks and reward are importable by name

    run()
