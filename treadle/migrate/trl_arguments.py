"""TRL arguments: which key of ours each one is, TRL's defaults where ours differ, and why some have no counterpart.

Tables that `trl` reads; arguments that become several keys are functions there.
"""

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 512,
    "num_train_epochs": 3,
    "epsilon": 0.2,
    "delta": None,
    "loss_type": "dapo",
    "beta": 0.0,
    "bf16": True,
}
"""TRL's defaults that are written down: those that differ from ours, or that others are computed from."""

DIRECT: Mapping[str, str] = {
    "learning_rate": "actor.optim.lr",
    "weight_decay": "actor.optim.weight_decay",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "warmup_ratio": "actor.optim.lr_warmup_steps_ratio",
    "max_grad_norm": "actor.grad_clip",
    "num_generations": "rollout.n",
    "max_completion_length": "rollout.response_length",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "repetition_penalty": "rollout.repetition_penalty",
    "num_iterations": "actor.ppo_epochs",
    "epsilon": "actor.clip_ratio_low",
    "epsilon_high": "actor.clip_ratio_high",
    "delta": "actor.clip_ratio_c",
    "entropy_coef": "actor.entropy_coeff",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "off_policy_mask_threshold": "algorithm.rollout_correction.off_policy_mask_threshold",
    "sapo_temperature_neg": "actor.policy_loss.tau_neg",
    "sapo_temperature_pos": "actor.policy_loss.tau_pos",
    "shuffle_dataset": "data.shuffle",
    "seed": "data.seed",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "vllm_max_model_length": "rollout.max_model_len",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "chat_template_kwargs": "model.apply_chat_template_kwargs",
    "trust_remote_code": "model.trust_remote_code",
    "num_train_epochs": "trainer.total_epochs",
    "save_total_limit": "checkpoint.keep_last",
    "output_dir": "logging.run_dir",
    "run_name": "logging.experiment_name",
}
"""Arguments whose value is the value of a key of ours."""

TABLES: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    "scale_rewards": (
        "algorithm.norm_adv_by_std_in_grpo",
        {True: True, "group": True, False: False, "none": False},
    ),
    "lr_scheduler_type": (
        "actor.optim.lr_scheduler_type",
        {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
    ),
    "bf16": ("actor.dtype", {True: "bf16", False: "fp32"}),
    "use_vllm": ("rollout.name", {True: "vllm", False: "native"}),
    "top_k": ("rollout.top_k", {0: -1, None: -1}),
    "min_p": ("rollout.min_p", {None: 0.0}),
}
"""Arguments with other words for the same thing; a number that is not listed stays as it is."""

NOT_NEEDED: Mapping[str, str] = {
    "logging_steps": "every step is recorded",
    "log_completions": "every trajectory is kept: treadle show RUN",
    "num_completions_to_print": "treadle show RUN --limit N",
    "disable_dropout": "there is no dropout in training",
    "remove_unused_columns": "all fields of a row reach the reward functions",
    "per_device_eval_batch_size": "the engine batches by itself",
    "vllm_mode": "rollout.nnodes decides where the engine runs",
    "save_strategy": "checkpoint.save_freq and save_every_s decide",
    "eval_strategy": "trainer.test_freq decides",
    "use_transformers_paged": "the native engine has a paged KV cache",
    "use_liger_kernel": "the output head is fused where a GPU has Triton",
    "ddp_find_unused_parameters": "there is no DDP",
    "dataloader_num_workers": "tasks are in memory",
}

REASONS: Mapping[str, str] = {
    "peft_config": "only running the script would tell its adapters: set actor.lora",
    "lora_dropout": "adapters have no dropout, so that training and sampling compute alike",
    "quantization_config": "weights are not quantized in training",
    "rollout_func": "write it as an agent loop: docs/rollout.md",
    "environment_factory": "write it as an environment: rollout.multi_turn.environment",
    "callbacks": "there are no callbacks; metrics.jsonl, trackers and the journal have what happens",
    "processing_class": "the tokenizer is that of model.path, or model.tokenizer_path",
    "optimizers": "the optimizer is AdamW, set by actor.optim",
    "deepspeed": "several GPUs: actor: {_target_: treadle.config.FSDPActorConfig}",
    "fsdp": "several GPUs: actor: {_target_: treadle.config.FSDPActorConfig}",
    "vllm_server_base_url": "the run starts its own vLLM server",
    "vllm_importance_sampling_correction": "see algorithm.rollout_correction",
    "vllm_importance_sampling_mode": "see algorithm.rollout_correction",
}
"""Why an argument has no counterpart."""

PEFT_KEYS = {
    "r": "actor.lora.r",
    "lora_alpha": "actor.lora.alpha",
    "target_modules": "actor.lora.target_modules",
    "use_rslora": "actor.lora.use_rslora",
}
PEFT_DEFAULTS: Mapping[str, Any] = {
    **{"r": 8, "lora_alpha": 8, "use_rslora": False},
    "target_modules": ["q_proj", "v_proj"],  # of the Llama and Qwen families
}

BATCHES = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    *("max_steps", "save_steps", "eval_steps"),
)
"""Arguments that are computed with, together."""

AGGREGATIONS = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
LOSSES = ("cispo", "sapo")
"""Values of `loss_type` that are ways to sum up, and those that are losses of their own."""

TRL_REWARDS = {"accuracy_reward": "math"}
"""Rewards of `trl.rewards` that are built in here."""

ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "label", "target")
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL gives a reward function beside the columns of the data set."""

OTHER_TRAINERS: Mapping[str, str] = {
    "SFTTrainer": "fine-tune with `treadle sft`, on the same conversations: docs/sft.md",
    "OnlineDPOTrainer": "set algorithm.adv_estimator: dpo, with rewards or a judge: docs/training.md",
    "GKDTrainer": "set ref.path (the teacher), adv_estimator: on_policy_distill, distill_coef: 1: docs/distillation.md",
    "RLOOTrainer": "set algorithm.adv_estimator: rloo, with rewards as for GRPO: docs/training.md",
    "DPOTrainer": "recorded pairs are not read; pairs of own samples: algorithm.adv_estimator: dpo, docs/training.md",
}
"""Trainers of TRL that are not read, and what does their work here."""
