"""Every key of a config changes something: each is set to two values, and what reads it must tell them apart.

A new key needs a line in `EFFECTS`. `UNPROVEN` lists the keys whose effect nothing here shows yet: they may well have
one, with tests of their own elsewhere, but one that is read by nothing would not be found. The list may only shrink.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollouts import renderer, rollout
from treadle.algorithm.advantage import AdvantageInputs
from treadle.algorithm.aggregation import Denominator
from treadle.algorithm.covariance import select_tokens
from treadle.algorithm.estimators import compute_advantages
from treadle.algorithm.kl import KLControl, penalise_kl
from treadle.algorithm.objective import compute_policy_loss
from treadle.algorithm.packed import MicroBatch
from treadle.algorithm.value import ValueBatch, compute_value_loss
from treadle.config import TrainConfig
from treadle.config.actor import ActorConfig, CriticConfig, OptimConfig, PolicyLossConfig, RefConfig
from treadle.config.algorithm import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig
from treadle.config.data import DataConfig
from treadle.config.logging import LoggingConfig
from treadle.config.outline import key_paths
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.config.rollout import SamplingConfig
from treadle.data.tasks import load_tasks
from treadle.policy.schedule import learning_rate
from treadle.reward.scorer import Scorer
from treadle.rollout.service import Kind, RolloutService
from treadle.types import Outcome, StopReason, Task, Trajectory

SIZES = (6, 1, 9, 4, 5, 3)
NUM_TOKENS = sum(SIZES)
SEQUENCE_T = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
MASK_T = torch.ones(NUM_TOKENS, dtype=torch.bool)
DENOMINATOR = Denominator.of(SIZES, 12.0)


def draw(seed: int, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def policy_loss(section: str, **keys: Any) -> list[float]:
    """The loss and its gradient on a batch whose ratios lie well beyond every bound, on both sides."""
    given = {"actor": {}, "policy_loss": {}, "rollout_correction": {}, section: keys}
    actor = ActorConfig(
        **{"clip_ratio_c": 1.5, "policy_loss": PolicyLossConfig(**given["policy_loss"]), **given["actor"]}
    )
    old = -draw(0).abs() - 1
    batch = MicroBatch(
        logprobs_T=(old + draw(1, 0.9)).requires_grad_(),
        advantages_T=draw(2),
        mask_T=MASK_T,
        sequence_T=SEQUENCE_T,
        num_sequences=len(SIZES),
        old_logprobs_T=old,
        rollout_logprobs_T=old + draw(3, 0.8),
        ref_logprobs_T=old + draw(4, 0.5),
        entropy_T=draw(5).abs().requires_grad_(),
    )
    selected = select_tokens(old, batch.advantages_T, MASK_T, actor.policy_loss, seed=0)
    found = compute_policy_loss(
        replace(batch, selected_T=selected), DENOMINATOR, actor, RolloutCorrectionConfig(**given["rollout_correction"])
    )
    found.loss.backward()
    assert batch.logprobs_T.grad is not None
    return [float(found.loss.detach()), *batch.logprobs_T.grad.tolist()]


def advantages(**keys: Any) -> list[float]:
    """Two groups of three: two turns each, rewards of turns, values and KL penalties."""
    inputs = AdvantageInputs(
        rewards_N=torch.tensor([1.0, 0.0, 0.5, 2.0, 2.5, 0.0]),
        group_N=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_groups=2,
        trajectory_S=torch.arange(6),
        sequence_T=SEQUENCE_T,
        mask_T=MASK_T,
        values_T=draw(6).float(),
        turn_rewards_T=draw(7, 0.1).float(),
        turn_T=torch.cat([torch.arange(size) * 2 // size for size in SIZES]),
        num_turns_N=torch.full((6,), 2),
    )
    return compute_advantages(inputs, AlgorithmConfig(**keys)).advantages_T.tolist()  # type: ignore[no-any-return]


def kl_weight(**keys: Any) -> float:
    return KLControl.start(KLControlConfig(**keys)).after(0.11, 5).coefficient


def kl_penalty(**keys: Any) -> list[float]:
    found = penalise_kl(draw(0), draw(1), MASK_T, SEQUENCE_T, len(SIZES), AlgorithmConfig(**keys), 0.1)
    return found.token_rewards_T.tolist()  # type: ignore[no-any-return]


def value_loss(**keys: Any) -> float:
    batch = ValueBatch(draw(0), draw(1), draw(2), MASK_T, SEQUENCE_T, len(SIZES))
    return float(compute_value_loss(batch, DENOMINATOR, CriticConfig(**keys)).loss)


def rates(**keys: Any) -> list[float]:
    return [learning_rate(OptimConfig(**keys), step, 20) for step in range(1, 21)]


def sampling(kind: Kind = Kind.TRAINING, **keys: Any) -> Any:
    """What every request of a rollout carries, and how many samples a task has."""
    service = RolloutService.__new__(RolloutService)
    config = rollout(val_kwargs=SamplingConfig(**keys)) if kind is Kind.VALIDATION else rollout(**keys)
    service._rollout, service._renderer, service._inputs = config, renderer(), None
    order = service._order(kind)
    return order.sampling, order.n


def validation(**keys: Any) -> Any:
    return sampling(Kind.VALIDATION, **keys)


def tasks(directory: Path, **keys: Any) -> list[Any]:
    (directory / "rows.jsonl").write_text(
        '{"prompt": "a", "question": "b", "answer": "1", "truth": "2", "data_source": "x", "set": "y"}\n' * 3
    )
    (directory / "other.jsonl").write_text('{"prompt": "c"}\n')
    data = DataConfig(**{"train_files": ("rows.jsonl",), "val_files": ("rows.jsonl",), **keys})
    training = load_tasks([str(directory / name) for name in data.train_files], data, data.train_max_samples)
    held_out = load_tasks(
        [str(directory / name) for name in data.val_files], data, data.val_max_samples, validation=True
    )
    return [(item.messages, item.ground_truth, item.data_source) for part in (training, held_out) for item in part]


def reach(response: str) -> float:
    """A reward function: 1 where it can open a socket, 2 more where it sees a key."""
    try:
        socket.socket().close()
        opened = 1.0
    except PermissionError:
        opened = 0.0
    return opened + 2.0 * ("KEY_OF_A_JUDGE" in os.environ)


def worker_reach(**keys: Any) -> float:
    """What a function in a worker process can reach."""

    async def score() -> float:
        functions = {"reach": RewardFunctionConfig(path=f"{__name__}:reach", **keys)}
        async with await Scorer.create(RewardConfig(functions=functions, timeout_s=60.0)) as scorer:
            found = await scorer.score(Task("t", ()), Trajectory("t", 0, (), Outcome.ended(StopReason.STOP)))
        assert found is not None
        return found.value

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_A_JUDGE", "secret")
        return asyncio.run(score())


Case = tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]


def cases(prefix: str, observe: Callable[..., Any], *keys: tuple[Any, ...]) -> dict[str, Case]:
    """From (key, one value, another, what else must be set)."""
    found = {}
    for name, one, other, *rest in keys:
        fixed = rest[0] if rest else {}
        found[f"{prefix}.{name}"] = (observe, {**fixed, name: one}, {**fixed, name: other})
    return found


def actor_loss(**keys: Any) -> list[float]:
    return policy_loss("actor", **keys)


def named_loss(**keys: Any) -> list[float]:
    return policy_loss("policy_loss", **keys)


def corrected(**keys: Any) -> list[float]:
    return policy_loss("rollout_correction", **keys)


SAMPLED = (
    *(("n", 1, 2), ("temperature", 0.5, 0.7), ("top_p", 1.0, 0.9), ("top_k", -1, 5), ("min_p", 0.0, 0.1)),
    *(("repetition_penalty", 1.0, 1.1), ("presence_penalty", 0.0, 0.5), ("frequency_penalty", 0.0, 0.5)),
    ("stop", (), ("x",)),
)
SCHEDULED = (
    *(("lr", 1e-3, 2e-3), ("lr_scheduler_type", "constant", "linear"), ("lr_warmup_steps", 0, 5)),
    ("lr_warmup_steps_ratio", 0.0, 0.5),
    ("min_lr_ratio", 0.0, 0.5, {"lr_scheduler_type": "cosine"}),
    ("num_cycles", 0.5, 1.5, {"lr_scheduler_type": "cosine"}),
    ("wsd_decay_ratio", 0.1, 0.5, {"lr_scheduler_type": "wsd"}),
)
EFFECTS: dict[str, Case] = {
    **cases(
        "actor",
        actor_loss,
        *(("clip_ratio", 0.2, 0.5), ("clip_ratio_low", 0.1, 0.5), ("clip_ratio_high", 0.1, 0.5)),
        *(("clip_ratio_c", 1.3, 3.0), ("loss_agg_mode", "token-mean", "seq-mean-token-mean")),
        *(("entropy_coeff", 0.0, 0.1), ("use_kl_loss", False, True)),
        ("kl_loss_coef", 0.1, 0.2, {"use_kl_loss": True}),
        ("kl_loss_type", "k1", "k3", {"use_kl_loss": True}),
    ),
    **cases(
        "actor.policy_loss",
        named_loss,
        ("loss_mode", "vanilla", "gspo"),
        ("clip_cov_ratio", 0.1, 0.5, {"loss_mode": "clip_cov", "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}),
        ("clip_cov_lb", -9.0, 0.5, {"loss_mode": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_ub": 9.0}),
        ("clip_cov_ub", -0.2, 9.0, {"loss_mode": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": -9.0}),
        ("kl_cov_ratio", 0.1, 0.5, {"loss_mode": "kl_cov"}),
        ("ppo_kl_coef", 0.1, 0.5, {"loss_mode": "kl_cov", "kl_cov_ratio": 0.3}),
        ("cispo_max_ratio", 1.2, 2.0, {"loss_mode": "cispo"}),
        ("tau_pos", 1.0, 2.0, {"loss_mode": "sapo"}),
        ("tau_neg", 1.0, 2.0, {"loss_mode": "sapo"}),
    ),
    **cases(
        "algorithm.rollout_correction",
        corrected,
        ("rollout_is", "none", "token"),
        ("rollout_is_threshold", 1.1, 2.0, {"rollout_is": "token"}),
        ("rollout_rs", "none", "token"),
        ("rollout_rs_threshold", 1.2, 2.0, {"rollout_rs": "token"}),
        ("rollout_rs_threshold_lower", 0.5, 0.9, {"rollout_rs": "token", "rollout_rs_threshold": 2.0}),
        *(("off_policy_mask_threshold", None, 0.01), ("bypass_mode", False, True)),
    ),
    **cases(
        "algorithm",
        advantages,
        *(("adv_estimator", "grpo", "rloo"), ("norm_adv_by_std_in_grpo", True, False)),
        *(("norm_adv_scope", "group", "batch"), ("advantage_level", "trajectory", "turn")),
        ("gamma", 1.0, 0.9, {"adv_estimator": "gae"}),
        ("lam", 1.0, 0.9, {"adv_estimator": "gae"}),
    ),
    **cases("algorithm", kl_penalty, ("kl_penalty", "k1", "k2")),
    **cases(
        "algorithm.kl_ctrl",
        kl_weight,
        ("kl_coef", 0.1, 0.2),
        ("type", "fixed", "adaptive"),
        ("horizon", 10, 100, {"type": "adaptive"}),
        ("target_kl", 0.1, 0.105, {"type": "adaptive"}),
    ),
    **cases(
        "critic", value_loss, ("cliprange_value", 0.1, 0.5), ("loss_agg_mode", "token-mean", "seq-mean-token-mean")
    ),
    **cases("actor.optim", rates, *SCHEDULED),
    **cases("critic.optim", rates, *SCHEDULED),
    **cases("ref", lambda **keys: [RefConfig(**keys).syncs_after(step) for step in (1, 2)], ("sync_freq", -1, 2)),
    **cases("rollout", sampling, *SAMPLED, ("seed", 1, 2), ("ignore_eos", False, True), ("response_length", 8, 9)),
    **cases("rollout.val_kwargs", validation, *SAMPLED),
    **cases(
        "data",
        tasks,
        *(("train_files", ("rows.jsonl",), ("other.jsonl",)), ("val_files", ("rows.jsonl",), ("other.jsonl",))),
        *(("train_max_samples", -1, 2), ("val_max_samples", -1, 2), ("prompt_key", "prompt", "question")),
        *(("answer_key", "answer", "truth"), ("reward_fn_key", "data_source", "set")),
    ),
    **cases("reward.functions.*", worker_reach, ("sandbox", False, True), ("env", (), ("KEY_OF_A_JUDGE",))),
    **cases(
        "logging",
        lambda **keys: LoggingConfig(**keys).directory(),
        *(("project_name", "a", "b"), ("experiment_name", "a", "b"), ("run_dir", None, "elsewhere")),
    ),
}
KEYS = {".".join(path) for path in key_paths(TrainConfig)}
LISTED = """
    actor.data_loader_seed actor.dtype actor.fsdp_config.forward_prefetch actor.fsdp_config.fsdp_size
    actor.fsdp_config.offload_policy actor.fsdp_config.optimizer_offload actor.fsdp_config.param_offload
    actor.fsdp_config.reshard_after_forward actor.grad_clip actor.loss_scale_factor actor.model_dtype
    actor.optim.betas actor.optim.max_nonfinite_steps actor.optim.weight_decay actor.ppo_epochs
    actor.ppo_max_token_len_per_gpu actor.ppo_mini_batch_size actor.shuffle algorithm.filter_groups.enable
    algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.metric algorithm.mask_truncated
    algorithm.use_kl_in_reward checkpoint.grace_s checkpoint.keep_last checkpoint.resume_from_path
    checkpoint.resume_mode checkpoint.save_every_s checkpoint.save_freq cluster.address cluster.backend
    cluster.ray_init critic.dtype critic.fsdp_config.forward_prefetch critic.fsdp_config.fsdp_size
    critic.fsdp_config.offload_policy critic.fsdp_config.optimizer_offload critic.fsdp_config.param_offload
    critic.fsdp_config.reshard_after_forward critic.grad_clip critic.model_dtype critic.optim.betas
    critic.optim.max_nonfinite_steps critic.optim.weight_decay critic.path critic.ppo_epochs
    critic.ppo_max_token_len_per_gpu critic.ppo_mini_batch_size data.max_n data.seed data.shuffle data.source_kwargs
    data.train_batch_size logging.journal logging.journal_max_mb logging.log_val_generations logging.logger
    logging.prometheus_port model.allow_special_tokens model.apply_chat_template_kwargs model.custom_chat_template
    model.describe_tools model.enable_gradient_checkpointing model.override_config model.path model.prove
    model.tokenizer_path model.trust_remote_code ref.dtype ref.fsdp_config.forward_prefetch
    ref.fsdp_config.fsdp_size ref.fsdp_config.offload_policy ref.fsdp_config.optimizer_offload
    ref.fsdp_config.param_offload ref.fsdp_config.reshard_after_forward ref.log_prob_max_token_len_per_gpu
    ref.sync_mix reward.bounds reward.classifiers.*.device reward.classifiers.*.dtype
    reward.classifiers.*.endpoint.api_key_env reward.classifiers.*.endpoint.base_url
    reward.classifiers.*.endpoint.extra_body reward.classifiers.*.endpoint.model
    reward.classifiers.*.gpu_memory_utilization reward.classifiers.*.launch_timeout_s
    reward.classifiers.*.max_concurrency reward.classifiers.*.max_length reward.classifiers.*.max_num_batched_tokens
    reward.classifiers.*.memory_mb reward.classifiers.*.overlong reward.classifiers.*.path
    reward.classifiers.*.placement reward.classifiers.*.prompt reward.classifiers.*.timeout_s
    reward.classifiers.*.weight reward.cpu_time_s reward.environment_weight reward.functions.*.kwargs
    reward.functions.*.path reward.functions.*.scope reward.functions.*.weight
    reward.judges.*.apply_chat_template_kwargs reward.judges.*.bounds reward.judges.*.engine.dtype
    reward.judges.*.engine.enforce_eager reward.judges.*.engine.engine_kwargs
    reward.judges.*.engine.gpu_memory_utilization reward.judges.*.engine.launch_timeout_s
    reward.judges.*.engine.max_model_len reward.judges.*.engine.max_num_seqs reward.judges.*.engine.n_gpus
    reward.judges.*.engine.name reward.judges.*.engine.openai.api_key_env reward.judges.*.engine.openai.base_url
    reward.judges.*.engine.openai.extra_body reward.judges.*.engine.openai.model reward.judges.*.engine.replicas
    reward.judges.*.engine.scripted.failure_rate reward.judges.*.engine.scripted.hang_rate
    reward.judges.*.engine.scripted.latency_s reward.judges.*.engine.scripted.latency_tail
    reward.judges.*.engine.scripted.script reward.judges.*.engine.tensor_model_parallel_size
    reward.judges.*.max_concurrency reward.judges.*.n reward.judges.*.parser reward.judges.*.path
    reward.judges.*.pattern reward.judges.*.prompt reward.judges.*.response_length reward.judges.*.retries
    reward.judges.*.scope reward.judges.*.seed reward.judges.*.system reward.judges.*.temperature
    reward.judges.*.timeout_s reward.judges.*.top_p reward.judges.*.vote reward.judges.*.weight
    reward.judges.*.words reward.memory_mb reward.num_workers reward.on_timeout reward.rate_limit_per_s
    reward.retries reward.success_threshold reward.timeout_s reward.tools_weight
    rollout.agent.allow_imports_from_data rollout.agent.default_agent_loop rollout.agent.loops.*.kwargs
    rollout.agent.loops.*.path rollout.agent.max_concurrent_sessions rollout.agent.num_workers rollout.dtype
    rollout.enable_chunked_prefill rollout.enable_prefix_caching rollout.enforce_eager rollout.engine_kwargs
    rollout.failures.max_failed_fraction rollout.failures.min_finished rollout.failures.min_group_size
    rollout.failures.request_retries rollout.failures.session_retries rollout.free_cache_engine
    rollout.gpu_memory_utilization rollout.limits.close_timeout_s rollout.limits.launch_timeout_s
    rollout.limits.request_timeout_s rollout.limits.session_timeout_s rollout.limits.session_tool_time_s
    rollout.limits.stall_report_s rollout.max_model_len rollout.max_num_batched_tokens rollout.max_num_seqs
    rollout.multi_turn.environment rollout.multi_turn.environment_kwargs rollout.multi_turn.environment_timeout_s
    rollout.multi_turn.format rollout.multi_turn.max_assistant_turns rollout.multi_turn.max_invalid_calls
    rollout.multi_turn.max_parallel_calls rollout.multi_turn.max_tool_response_length
    rollout.multi_turn.max_user_turns rollout.multi_turn.mcp_servers.*.command rollout.multi_turn.mcp_servers.*.env
    rollout.multi_turn.mcp_servers.*.startup_timeout_s rollout.multi_turn.mcp_servers.*.tools
    rollout.multi_turn.mcp_servers.*.url rollout.multi_turn.tool_response_truncate_side
    rollout.multi_turn.tool_retries rollout.multi_turn.tool_timeout_s rollout.multi_turn.tools
    rollout.n_gpus_per_node rollout.name rollout.nnodes rollout.openai.api_key_env rollout.openai.base_url
    rollout.openai.extra_body rollout.openai.model rollout.overlong_prompts rollout.prompt_length
    rollout.replicas_per_node rollout.scripted.failure_rate rollout.scripted.hang_rate rollout.scripted.latency_s
    rollout.scripted.latency_tail rollout.scripted.script rollout.tensor_model_parallel_size trainer.critic_warmup
    trainer.max_staleness trainer.mode trainer.n_gpus_per_node trainer.nnodes trainer.on_weight_update
    trainer.parameter_sync_steps trainer.processes_per_node trainer.rank_timeout_s trainer.stale_samples
    trainer.test_freq trainer.total_epochs trainer.total_training_steps trainer.val_before_train trainer.val_only
    trainer.weights.bucket_mb trainer.weights.directory trainer.weights.transport
"""
UNPROVEN = set(LISTED.split())


@pytest.mark.parametrize("key", sorted(EFFECTS))
def test_another_value_gives_another_result(key, tmp_path):
    observe, one, other = EFFECTS[key]
    given = (tmp_path,) if observe is tasks else ()
    assert repr(observe(*given, **one)) == repr(observe(*given, **one)), "the same value must give the same"
    assert repr(observe(*given, **one)) != repr(observe(*given, **other)), f"{key} changes nothing"


def test_every_key_is_proven_or_named_as_unproven():
    assert KEYS - EFFECTS.keys() - UNPROVEN == set(), "new keys: show their effect"
    assert EFFECTS.keys() - KEYS == set(), "no such keys"
    assert not UNPROVEN & EFFECTS.keys() and not UNPROVEN - KEYS, "strike them out of UNPROVEN"
