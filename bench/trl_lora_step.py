"""TRL's LoRA step on given tokens. Run by `bench/lora_step.py` with a Python that has trl and peft; knows no treadle.

    python bench/trl_lora_step.py WORK.json

Prints one JSON line: loss and gradient norm of the first step, and seconds, CPU seconds and memory. The loss is TRL's
own (`GRPOTrainer.compute_loss`), over rows in micro batches of `micro`, padded on the right; then backward, clipping
and AdamW as its trainer does them.
"""

import json
import os
import resource
import sys
import tempfile
import time

import torch
import trl
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def make_trainer(work, folder):
    on_cpu = work["device"] == "cpu"
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    dtype = torch.float32 if on_cpu else torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype)
    model = PeftModel.from_pretrained(base, work["adapter"], is_trainable=True)
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work["micro"],
        num_generations=work["micro"],
        use_cpu=on_cpu,
        report_to="none",
        save_strategy="no",
        beta=0.0,
        bf16=not on_cpu,
        learning_rate=1e-4,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        max_completion_length=max(map(len, work["ids"])),
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}] * work["micro"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **others: [0.0] * len(completions),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # the loss is divided by all tokens below
    return trainer


def padded(rows, device):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)


def make_inputs(work, device):
    """Micro batches of rows in their order, as TRL's sampler gives them, padded to the longest of each."""
    order = list(range(len(work["ids"])))
    total = float(sum(map(len, work["ids"])))
    for start in range(0, len(order), work["micro"]):
        chosen = order[start : start + work["micro"]]
        ids = [work["ids"][at] for at in chosen]
        prompts = torch.tensor([work["prompt_ids"][at] for at in chosen], device=device)
        yield {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": padded(ids, device),
            "completion_mask": padded([[1] * len(row) for row in ids], device),
            "advantages": torch.tensor([work["advantages"][at] for at in chosen], device=device),
            "num_items_in_batch": torch.tensor(total, device=device),
        }


def main():
    with open(sys.argv[1]) as file:
        work = json.load(file)
    on_cpu = work["device"] == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, folder)
        trainer.create_optimizer()
        model, optimizer = trainer.model.train(), trainer.optimizer
        inputs = list(make_inputs(work, next(model.parameters()).device))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        seconds, cpu, told = [], [], []
        for _ in range(work["steps"]):
            wall, used, loss = time.perf_counter(), time.process_time(), 0.0
            for micro in inputs:
                with trainer.compute_loss_context_manager():
                    part = trainer.compute_loss(model, micro)
                part.backward()
                loss += part.item()
            norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - wall)
            cpu.append(time.process_time() - used)
            told.append((loss, norm))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        if not on_cpu:
            peak = torch.cuda.max_memory_allocated() / 1e6
    found = {"name": "trl", "version": trl.__version__, "loss": told[0][0], "grad_norm": told[0][1]}
    print(json.dumps({**found, "seconds": seconds, "cpu": cpu, "memory_mb": peak}))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
