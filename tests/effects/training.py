"""What keys change in training steps of tiny networks on the CPU: weights, metrics, and how much each forward reads."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.effects.cases import Case, config_cases, training
from tests.effects.models import tiny_model
from tests.policies import make_groups, save_tiny_model
from tests.sharded import make_batch
from treadle.cluster.runtime import load_networks
from treadle.config import ModelConfig, TrainConfig
from treadle.data.renderer import Renderer
from treadle.errors import TreadleError
from treadle.model.checksum import checksum
from treadle.trainer.step import train_step
from treadle.trainer.teacher_prompt import TeacherPrompt
from treadle.types import Group, Outcome, Row, Score, StopReason, Task, Trajectory

BASE = """
model: {path: unused, parity_check: false}
data: {train_files: [tasks.jsonl], train_batch_size: 4}
rollout: {n: 4, prompt_length: 32, response_length: 32}
reward: {functions: {it: {path: exact_match}}}
actor: {ppo_mini_batch_size: 4, dtype: fp32, grad_clip: 100.0, optim: {lr: 1.0e-3}}
ref: {dtype: fp32}
critic: {dtype: fp32, grad_clip: 100.0, optim: {lr: 1.0e-3}}
trainer: {total_training_steps: 10}
"""


def make_config(keys: dict[str, Any]) -> TrainConfig:
    return training(BASE, {"model.path": str(tiny_model()), **keys})


def truncated(group: Group) -> Group:
    """With a first sample that was cut off at the token limit."""
    first, *others = group.trajectories
    return replace(group, trajectories=(replace(first, outcome=Outcome.ended(StopReason.LENGTH)), *others))


def huge(group: Group) -> Group:
    """With rewards whose gradients are not finite."""
    samples = (replace(item, reward=Score(1e38 * (item.sample - 1))) for item in group.trajectories)
    return replace(group, trajectories=tuple(samples))


def prompted(group: Group) -> Group:
    """With one prompt for all samples, long enough to be computed once."""
    samples = (
        replace(item, rows=tuple(replace(row, prompt_ids=tuple(range(3, 27))) for row in item.rows))
        for item in group.trajectories
    )
    return replace(group, trajectories=tuple(samples))


def steps(change: Callable[[Group], Group] = truncated, count: int = 1) -> Callable[..., Any]:
    """Some training steps: figures that no clock is in, weights, tokens of each forward, layers that computed."""

    def observe(directory: Path, **keys: Any) -> Any:
        read, layers = list[int](), 0

        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal layers
            layers += type(module).__name__ == "LlamaAttention"
            if isinstance(module, nn.Embedding):
                read.append(inputs[0].numel())

        config = make_config(keys)
        parts = load_networks(config, config.total_steps(1), ()).step
        hook, told = register_module_forward_hook(see), []
        try:
            for step in range(1, count + 1):
                groups = tuple(map(change, make_groups(step)))
                metrics = train_step(parts, groups, step=step).metrics
                told.append({name: value for name, value in metrics.items() if not name.endswith("_s")})
        except TreadleError as error:
            told.append({str(error): math.nan})
        finally:
            hook.remove()
        told = [{name: value for name, value in one.items() if not name.startswith("seconds/")} for one in told]
        return told, checksum(dict(parts.policy.tensors())), read, layers

    return observe


def loaded(directory: Path, **keys: Any) -> Any:
    """The weights a run starts from, or why it does not."""
    save_tiny_model(directory / "other", num_hidden_layers=1)
    path = keys.get("model.path")
    if path is not None:
        keys["model.path"] = str(directory / path) if path == "other" else str(tiny_model())
    try:
        config = make_config(keys)
        policy = load_networks(config, config.total_steps(1), ()).step.policy
    except TreadleError as error:
        return str(error)
    rows = [row for group in make_groups(0) for item in group.trajectories for row in item.rows]
    return checksum(dict(policy.tensors())), policy.logprobs(rows).sum()


def valued(directory: Path, **keys: Any) -> Any:
    """What a critic that starts from another model says of rows, after a step."""
    if keys["critic.path"] is not None:
        keys["critic.path"] = str(save_tiny_model(directory / "other", num_hidden_layers=1))
    return steps()(directory, **CRITIC, **keys)


def taught(directory: Path, **keys: Any) -> Any:
    """A step that is pulled towards a teacher."""
    keys["ref.path"] = str(
        save_tiny_model(directory / "teacher", num_hidden_layers=1 if keys["ref.path"] == "one" else 3)
    )
    return steps()(directory, **{"algorithm.distill_coef": 1.0, **keys})


def privileged(directory: Path, **keys: Any) -> Any:
    """The prompt that the reference reads."""
    model = {"model.path": "treadle/tiny-calculator", "algorithm.distill_coef": 1.0, "rollout.max_model_len": 99}
    teacher = TeacherPrompt.of(make_config({**model, **keys}))
    if teacher is None:
        return None
    task = Task("it", ({"role": "user", "content": "1+2="},), "3")
    row = Row(
        Renderer.create(ModelConfig(path="treadle/tiny-calculator")).prompt(task.messages), (5,), (1,), (0.0,), (0,)
    )
    return teacher.rows([Group(task, (Trajectory("it", 0, (row,), Outcome.ended(StopReason.STOP), Score(1.0)),))])


def adapted(directory: Path, **keys: Any) -> Any:
    """The weights a run starts from, with an adapter or without."""
    config = make_config({"actor.lora.r": 2})
    policy = load_networks(config, 10, ()).step.policy
    policy.train(make_batch(make_groups(1)))
    policy.save(directory / "adapter")
    if keys["model.adapter"] is not None:
        keys["model.adapter"] = str(directory / keys["model.adapter"])
    return loaded(directory, **keys)


LORA = {"actor.lora.r": 2}
TWO = {"actor.ppo_mini_batch_size": 2}
SHUFFLED = {**TWO, "actor.shuffle": True}
SCALED = {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}
CRITIC = {"algorithm.adv_estimator": "gae"}
REFERENCE = {"actor.use_kl_loss": True}
PREFERRED = {"algorithm.adv_estimator": "ipo", "actor.loss_agg_mode": "seq-mean-token-sum"}
FOLLOWING = {**REFERENCE, "ref.sync_freq": 1}
TINY, LONG = 64, 4096

EFFECTS: dict[str, Case] = {
    **config_cases(
        "actor",
        steps(),
        *(("data_loader_seed", 1, 2, SHUFFLED), ("dtype", "fp32", "bf16"), ("grad_clip", 1e-4, 100.0)),
        *(("loss_scale_factor", 10.0, 20.0, SCALED), ("model_dtype", "fp32", "bf16", {"actor.dtype": "bf16"})),
        *(("optim.weight_decay", 0.0, 0.5), ("ppo_epochs", 1, 2), ("shuffle", False, True, TWO)),
        *(("ppo_max_token_len_per_gpu", TINY, LONG), ("ppo_mini_batch_size", 2, 4)),
    ),
    **config_cases(
        "actor.lora",
        steps(),
        *(("r", None, 2), ("alpha", 2.0, 8.0, LORA), ("seed", 1, 2, LORA), ("use_rslora", False, True, LORA)),
        ("target_modules", ["q_proj"], ["all-linear"], LORA),
        ("exclude_modules", [], ["q_proj"], LORA),
    ),
    **config_cases("model", adapted, ("adapter", None, "adapter")),
    **config_cases("actor.optim", steps(count=2), ("betas", [0.9, 0.999], [0.5, 0.9])),
    **config_cases(
        "actor.optim", steps(huge, 3), ("max_nonfinite_steps", 1, 2, {"algorithm.norm_adv_by_std_in_grpo": False})
    ),
    **config_cases(
        "critic",
        steps(),
        *(("dtype", "fp32", "bf16", CRITIC), ("ppo_epochs", 1, 2, CRITIC)),
        *(("ppo_max_token_len_per_gpu", TINY, LONG, CRITIC), ("ppo_mini_batch_size", 2, 4, CRITIC)),
    ),
    **config_cases(
        "critic",
        steps(count=2),  # what the first step does to the critic is seen in the second
        ("grad_clip", 1e-4, 100.0, CRITIC),
        ("model_dtype", "fp32", "bf16", {**CRITIC, "critic.dtype": "bf16"}),
        *(("optim.betas", [0.9, 0.999], [0.5, 0.9], CRITIC), ("optim.weight_decay", 0.0, 0.5, CRITIC)),
    ),
    **config_cases("critic", valued, ("path", None, "other")),
    **config_cases("critic.optim", steps(huge, 3), ("max_nonfinite_steps", 1, 2, CRITIC)),
    **config_cases("ref", steps(count=2), ("sync_freq", -1, 1, REFERENCE), ("sync_mix", 0.3, 0.6, FOLLOWING)),
    **config_cases(
        "ref",
        steps(),
        *(("dtype", "fp32", "bf16", REFERENCE), ("log_prob_max_token_len_per_gpu", TINY, LONG, REFERENCE)),
    ),
    **config_cases("ref", taught, ("path", "one", "three")),
    **config_cases("ref", privileged, ("prompt_template", "{{ prompt }}", "{{ prompt }} ({{ answer }})")),
    **config_cases("algorithm", taught, ("distill_coef", 0.5, 1.0, {"ref.path": "one"})),
    **config_cases("algorithm", steps(), ("preference_beta", 0.1, 0.5, PREFERRED)),
    **config_cases("algorithm", steps(), ("mask_truncated", False, True), ("use_kl_in_reward", False, True, REFERENCE)),
    **config_cases("trainer", steps(), ("critic_warmup", 0, 1, CRITIC)),
    **config_cases("model", steps(), ("enable_gradient_checkpointing", False, True)),
    **config_cases("model", steps(prompted), ("shared_prefix", "auto", "off", {"model.parity_check": True})),
    **config_cases("model", loaded, ("path", "tiny", "other"), ("override_config", {}, {"rms_norm_eps": 0.5})),
}
