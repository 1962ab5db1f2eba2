"""A script as people write them for TRL: constants, two rewards of its own with a helper, one that is computed."""

import os
import re

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("this script must never be run")

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
GENERATIONS = 4
PATTERN = re.compile(r"####\s*(-?\d+)")


def extract(text: str) -> str:
    found = PATTERN.findall(text)
    return found[-1] if found else ""


def correctness(prompts, completions, answer, **kwargs):
    """1 where the number is right."""
    wanted = [extract(right) or right for right in answer]
    return [float(extract(done[0]["content"]) == right) for done, right in zip(completions, wanted, strict=True)]


def brevity(completions, level=None, **kwargs):
    return [None if not done[0]["content"] else 1.0 / (1 + len(done[0]["content"])) for done in completions]


dataset = load_dataset("openai/gsm8k", "main", split="train")
dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
evaluation = load_dataset("openai/gsm8k", "main", split="test")

training_args = GRPOConfig(
    output_dir="runs/trl",
    learning_rate=2e-6,
    num_generations=GENERATIONS,
    per_device_train_batch_size=2 * GENERATIONS,
    gradient_accumulation_steps=2,
    steps_per_generation=4,
    max_prompt_length=256,
    max_completion_length=64,
    max_steps=100,
    save_steps=50,
    beta=0.04,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards=False,
    reward_weights=[1.0, 0.1, 1.0],
    temperature=0.9,
    adam_beta2=0.95,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    use_vllm=True,
    vllm_gpu_memory_utilization=0.5,
    report_to="wandb",
    logging_steps=1,
    top_entropy_quantile=0.2,
    seed=int(os.environ.get("SEED", 1)),
)

trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[correctness, brevity, lambda completions, **kwargs: [0.0] * len(completions)],
    args=training_args,
    train_dataset=dataset,
    eval_dataset=evaluation,
    peft_config=LoraConfig(r=16, lora_dropout=0.05, task_type="CAUSAL_LM"),
)
trainer.train()
