r"""TRL's GRPO step with vLLM on the same GPU, the work of `bench/grpo_step.py`. Needs trl and vllm; knows no treadle.

    TRL_PYTHON bench/trl_grpo_step.py --model DIR --prompts 64 --samples 8 --tokens 256 > peers.jsonl
    PYTHONPATH=. python bench/grpo_step.py --model DIR --device cuda --prompts 64 --samples 8 --tokens 256 \
        --peer peers.jsonl

One step is `prompts` × `samples` completions and one optimizer step, no KL term, constant learning rate. The first two
steps warm up. The last line is JSON: the mean seconds of a step, of generation and of the weights on their way to vLLM.
"""

import argparse
import json
import os
import sys
import tempfile
import time

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WARM_UP = 2


def score(completions, **others):
    """A reward without work: it only has to differ between the samples of a task."""
    return [float(len(completion[0]["content"]) % 7) / 7 for completion in completions]


class StepClock(TrainerCallback):
    """Seconds of each step, and of the parts that `wrap` was put around."""

    def __init__(self):
        self.parts, self.steps = {}, []

    def on_step_begin(self, *arguments, **others):
        torch.cuda.synchronize()
        self.parts, self.began = dict.fromkeys(self.parts, 0.0), time.perf_counter()

    def on_step_end(self, *arguments, **others):
        torch.cuda.synchronize()
        self.steps.append({"step_s": time.perf_counter() - self.began, **self.parts})
        print(self.steps[-1], file=sys.stderr, flush=True)

    def wrap(self, owner, name, part):
        call, self.parts[part] = getattr(owner, name), 0.0

        def timed(*arguments, **others):
            torch.cuda.synchronize()
            began = time.perf_counter()
            try:
                return call(*arguments, **others)
            finally:
                torch.cuda.synchronize()
                self.parts[part] += time.perf_counter() - began

        setattr(owner, name, timed)


def make_trainer(options, folder, clock):
    rows = [
        f"What is {at} + {at * 7 % 91}? Explain step by step." for at in range(options.prompts * (options.steps + 1))
    ]
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=options.prompts * options.samples // options.micro,
        num_generations=options.samples,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.share,
        vllm_max_model_length=options.prompt_tokens + options.tokens,
        bf16=True,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        temperature=1.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=options.model,
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in rows]),
        callbacks=[clock],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--micro", type=int, default=64, help="completions in one forward")
    parser.add_argument("--share", type=float, default=0.3, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder, clock)
        clock.wrap(trainer.vllm_generation, "generate", "generate_s")
        clock.wrap(trainer.vllm_generation, "sync_weights", "weights_s")
        trainer.train()
    measured = clock.steps[WARM_UP:]
    means = {name: round(sum(step[name] for step in measured) / len(measured), 3) for name in measured[0]}
    print(json.dumps({"peer": f"TRL {trl.__version__}", **means}), flush=True)
    os._exit(0)  # vLLM's engine in this process may hang as the interpreter ends


if __name__ == "__main__":
    main()
