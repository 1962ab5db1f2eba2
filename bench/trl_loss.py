"""TRL's loss and gradient norm on given tokens. Run by `bench/cpu_step.py` with TRL's own Python; knows no treadle.

    python bench/trl_loss.py WORK.json

WORK.json has `model` (a directory), `samples` (rows of a prompt), and for each row `prompts` (messages), `prompt_ids`,
`ids`, `advantages` and `old_logprobs`. Prints one JSON line: whether TRL renders the same prompts, and the loss and
gradient norm with the old policy being the current one and being `old_logprobs`.
"""

import json
import os
import sys
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def make_trainer(work, folder):
    """A trainer as `trl_cpu_step.py` has it."""
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=len(work["ids"]),
        num_generations=work["samples"],
        max_completion_length=max(map(len, work["ids"])),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list([{"prompt": messages} for messages in work["prompts"]])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **others: [0.0] * len(completions),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # what its training loop would set
    return trainer


def padded(rows):
    """Rows side by side, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def make_inputs(work):
    """What TRL hands to its loss. Prompts are of one length, so they need no padding on the left."""
    prompt_ids, ids = torch.tensor(work["prompt_ids"]), padded(work["ids"])
    mask = padded([[1] * len(row) for row in work["ids"]])
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(work["advantages"]),
        "num_items_in_batch": mask.sum().float(),
    }


def measure(trainer, inputs):
    """The loss, and the norm of its gradient."""
    model = trainer.model.train()
    model.zero_grad()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return {"loss": loss.item(), "grad_norm": norm.item()}


def main():
    with open(sys.argv[1]) as file:
        work = json.load(file)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, folder)
        rendered = [
            trainer.processing_class.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            for messages in work["prompts"]
        ]
        inputs = make_inputs(work)
        found = {
            "version": trl.__version__,
            "loss_type": trainer.loss_type,
            "same_prompts": rendered == work["prompt_ids"],
            "on_policy": measure(trainer, inputs),
            "off_policy": measure(trainer, {**inputs, "old_per_token_logps": padded(work["old_logprobs"])}),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
