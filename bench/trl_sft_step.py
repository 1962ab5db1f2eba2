"""TRL's step of supervised fine-tuning on given tokens. Run by `bench/sft_step.py` with a Python that has trl.

    python bench/trl_sft_step.py WORK.json

Prints one JSON line: loss and gradient norm of the first step, and seconds, CPU seconds and memory. Loss and batches
are TRL's own (`SFTTrainer.compute_loss` and its collator), over rows in micro batches of `micro`, padded on the right;
then backward, clipping and AdamW as its trainer does them. Knows no treadle.
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def make_trainer(work, rows, folder):
    on_cpu = work["device"] == "cpu"
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    config = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=work["micro"],
        use_cpu=on_cpu,
        report_to="none",
        save_strategy="no",
        bf16=not on_cpu,
        learning_rate=1e-4,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        max_length=None,
    )
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    return SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def make_rows(work):
    return [
        {"input_ids": prompt + ids, "labels": [-100] * len(prompt) + ids}
        for prompt, ids in zip(work["prompt_ids"], work["ids"], strict=True)
    ]


def main():
    with open(sys.argv[1]) as file:
        work = json.load(file)
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(work)
        trainer = make_trainer(work, rows, folder)
        trainer.create_optimizer()
        model, optimizer = trainer.model.train(), trainer.optimizer
        device = next(model.parameters()).device
        total = torch.tensor(sum(map(len, work["ids"])), device=device)
        starts = range(0, len(rows), work["micro"])
        parts = [trainer.data_collator(rows[at : at + work["micro"]]) for at in starts]
        inputs = [{name: value.to(device) for name, value in part.items()} for part in parts]
        seconds, cpu, told = [], [], []
        for _ in range(work["steps"]):
            wall, used, loss = time.perf_counter(), time.process_time(), 0.0
            for micro in inputs:
                with trainer.compute_loss_context_manager():
                    part = trainer.compute_loss(model, dict(micro), num_items_in_batch=total)
                part.backward()
                loss += part.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            if device.type != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - wall)
            cpu.append(time.process_time() - used)
            told.append((loss, norm))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        if device.type != "cpu":
            peak = torch.cuda.max_memory_allocated() / 1e6
    found = {"name": "trl", "version": trl.__version__, "loss": told[0][0], "grad_norm": told[0][1]}
    print(json.dumps({**found, "seconds": seconds, "cpu": cpu, "memory_mb": peak}))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
