"""TRL's GRPO step on a CPU, the work of `bench/cpu_step.py`. Run by it with a Python that has trl; knows no treadle.

    TRL_PYTHON bench/trl_cpu_step.py --model DIR --steps 4 --prompts 16 --samples 8 --tokens 32

One step is `prompts` × `samples` completions, sampled by transformers in the process that trains, and one optimizer
step in float32 without a KL term. The first step warms up and is left out. The last line is JSON: for each step its
seconds on the wall and on all CPUs, and those of its parts.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

QUESTION = "Problem {:05d}: use the add tool three times on 1 and 2, then answer."


def by_parity(completions, **others):
    """A reward without work: it only has to differ between the samples of a task."""
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


class StepClock(TrainerCallback):
    """Seconds of each step, from the end of the one before, and of the calls that `wrap` was put around."""

    def __init__(self):
        self.parts, self.steps = {}, []
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *arguments, **others):
        wall, cpu = time.perf_counter(), time.process_time()
        self.steps.append({"wall": wall - self.wall, "cpu": cpu - self.cpu, **self.parts})
        self.parts = dict.fromkeys(self.parts, 0.0)
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def wrap(self, owner, name, part):
        call, self.parts[part] = getattr(owner, name), 0.0

        def timed(*arguments, **others):
            began = time.perf_counter()
            try:
                return call(*arguments, **others)
            finally:
                self.parts[part] += time.perf_counter() - began

        setattr(owner, name, timed)


class OptimizerClock(TrainerCallback):
    """The optimizer's step, between the two events around it."""

    def __init__(self, clock):
        self.clock, self.began = clock, 0.0
        clock.parts["optimizer"] = 0.0

    def on_pre_optimizer_step(self, *arguments, **others):
        self.began = time.perf_counter()

    def on_optimizer_step(self, *arguments, **others):
        self.clock.parts["optimizer"] += time.perf_counter() - self.began


def make_trainer(options, folder, clock):
    rows = [QUESTION.format(at) for at in range(options.prompts * (options.steps + 1))]
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.prompts * options.samples,
        num_generations=options.samples,
        max_completion_length=options.tokens,
        max_steps=options.steps + 1,
        use_cpu=True,
        bf16=False,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        temperature=1.0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=by_parity,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in rows]),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[clock, OptimizerClock(clock)],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one that warms up")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder, clock)
        clock.wrap(trainer, "_prepare_inputs", "rollout")
        clock.wrap(trainer, "compute_loss", "loss")
        clock.wrap(trainer.accelerator, "backward", "backward")
        trainer.train()
    lengths = [
        entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry
    ]
    found = {"peer": f"TRL {trl.__version__}", "threads": torch.get_num_threads(), "steps": clock.steps[1:]}
    print(json.dumps({**found, "tokens": statistics.mean(lengths) if lengths else 0.0}), flush=True)


if __name__ == "__main__":
    main()
