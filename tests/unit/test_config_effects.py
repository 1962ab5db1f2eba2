"""Every key of a config changes something: each is set to two values, and what reads it must tell them apart.

A new key needs a case in a module of `tests/effects`: what shows its effect, through the code that uses it, and two
values. `UNPROVEN` has the keys whose effect cannot be shown on any machine, each with the reason.
"""

from pathlib import Path

import pytest

from tests.effects import (
    data,
    losses,
    reward,
    rollout,
    runs,
)
from tests.effects.cases import Case
from treadle.config import TrainConfig
from treadle.config.outline import key_paths

MODULES = (data, losses, reward, rollout, runs)
EFFECTS = {key: case for module in MODULES for key, case in module.EFFECTS.items()}
KEYS = {".".join(path) for path in key_paths(TrainConfig)}
UNPROVEN = {
    "nothing here shows it yet": """
        actor.data_loader_seed actor.dtype actor.fsdp_config.forward_prefetch actor.fsdp_config.fsdp_size
        actor.fsdp_config.offload_policy actor.fsdp_config.optimizer_offload actor.fsdp_config.param_offload
        actor.fsdp_config.reshard_after_forward actor.grad_clip actor.loss_scale_factor actor.model_dtype
        actor.optim.betas actor.optim.max_nonfinite_steps actor.optim.weight_decay actor.ppo_epochs
        actor.ppo_max_token_len_per_gpu actor.ppo_mini_batch_size actor.shuffle algorithm.filter_groups.enable
        algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.metric algorithm.mask_truncated
        algorithm.use_kl_in_reward cluster.address cluster.backend cluster.ray_init critic.dtype
        critic.fsdp_config.forward_prefetch critic.fsdp_config.fsdp_size critic.fsdp_config.offload_policy
        critic.fsdp_config.optimizer_offload critic.fsdp_config.param_offload
        critic.fsdp_config.reshard_after_forward critic.grad_clip critic.model_dtype critic.optim.betas
        critic.optim.max_nonfinite_steps critic.optim.weight_decay critic.path critic.ppo_epochs
        critic.ppo_max_token_len_per_gpu critic.ppo_mini_batch_size data.train_batch_size
        logging.log_val_generations model.allow_special_tokens model.apply_chat_template_kwargs
        model.custom_chat_template model.describe_tools model.enable_gradient_checkpointing
        model.override_config model.path model.prove model.tokenizer_path model.trust_remote_code ref.dtype
        ref.fsdp_config.forward_prefetch ref.fsdp_config.fsdp_size ref.fsdp_config.offload_policy
        ref.fsdp_config.optimizer_offload ref.fsdp_config.param_offload ref.fsdp_config.reshard_after_forward
        ref.log_prob_max_token_len_per_gpu ref.sync_freq ref.sync_mix reward.classifiers.*.device
        reward.classifiers.*.dtype reward.classifiers.*.endpoint.api_key_env
        reward.classifiers.*.endpoint.base_url reward.classifiers.*.endpoint.extra_body
        reward.classifiers.*.endpoint.model reward.classifiers.*.gpu_memory_utilization
        reward.classifiers.*.launch_timeout_s reward.classifiers.*.max_concurrency
        reward.classifiers.*.max_length reward.classifiers.*.max_num_batched_tokens
        reward.classifiers.*.memory_mb reward.classifiers.*.overlong reward.classifiers.*.path
        reward.classifiers.*.placement reward.classifiers.*.prompt reward.classifiers.*.timeout_s
        reward.classifiers.*.weight reward.judges.*.engine.dtype reward.judges.*.engine.enforce_eager
        reward.judges.*.engine.engine_kwargs reward.judges.*.engine.gpu_memory_utilization
        reward.judges.*.engine.max_num_seqs reward.judges.*.engine.n_gpus
        reward.judges.*.engine.tensor_model_parallel_size reward.success_threshold rollout.dtype
        rollout.enable_chunked_prefill rollout.enable_prefix_caching rollout.enforce_eager rollout.engine_kwargs
        rollout.free_cache_engine rollout.gpu_memory_utilization rollout.max_model_len
        rollout.max_num_batched_tokens rollout.max_num_seqs rollout.multi_turn.mcp_servers.*.command
        rollout.multi_turn.mcp_servers.*.env rollout.multi_turn.mcp_servers.*.startup_timeout_s
        rollout.multi_turn.mcp_servers.*.tools rollout.multi_turn.mcp_servers.*.url rollout.n_gpus_per_node
        rollout.name rollout.nnodes rollout.openai.api_key_env rollout.openai.base_url rollout.openai.extra_body
        rollout.openai.model rollout.replicas_per_node rollout.tensor_model_parallel_size trainer.critic_warmup
        trainer.max_staleness trainer.mode trainer.n_gpus_per_node trainer.nnodes trainer.on_weight_update
        trainer.parameter_sync_steps trainer.processes_per_node trainer.rank_timeout_s trainer.stale_samples
        trainer.test_freq trainer.total_epochs trainer.total_training_steps trainer.val_before_train
        trainer.val_only trainer.weights.bucket_mb trainer.weights.directory trainer.weights.transport
    """,
}
"""The reason, and the keys it holds for."""


def observe(case: Case, directory: Path, keys: str) -> str:
    """What is seen with these keys; in words that do not have the directory."""
    directory.mkdir()
    return repr(case.observe(directory, **getattr(case, keys))).replace(str(directory), "")


@pytest.mark.parametrize("key", sorted(EFFECTS))
def test_another_value_gives_another_result(key, tmp_path):
    case = EFFECTS[key]
    one = observe(case, tmp_path / "first", "one")
    assert one == observe(case, tmp_path / "again", "one"), "the same value must give the same"
    assert one != observe(case, tmp_path / "other", "other"), f"{key} changes nothing"


def test_every_key_is_proven_or_has_a_reason_not_to_be():
    unproven = [key for keys in UNPROVEN.values() for key in keys.split()]
    assert sum(len(module.EFFECTS) for module in MODULES) == len(EFFECTS), "a key has two cases"
    assert len(unproven) == len(set(unproven)), "a key has two reasons"
    assert KEYS - EFFECTS.keys() - set(unproven) == set(), "new keys: show their effect"
    assert EFFECTS.keys() - KEYS == set(), "no such keys"
    assert not set(unproven) & EFFECTS.keys() and not set(unproven) - KEYS, "strike them out of UNPROVEN"
