"""Migration rules of earlier verl versions, for which verl 0.9.1 has no default; and of flat section classes.

Flat: verl's classes in `_target_` of sections that are spelled as ours, the shape that verl configs grow towards.
"""

from treadle.migrate.rule import (
    Converted,
    NotNeeded,
    Rules,
    by_table,
    classes,
    dtype,
    fixed,
    ignored,
    moved,
    none,
    nones,
    same,
    section_class,
    to,
    under,
    unless_null,
)
from treadle.migrate.rules.algorithm import CORRECTION, OVERLONG, REWARD_MODEL, SANDBOX, per_minute
from treadle.migrate.rules.networks import ACTOR, GLOBAL_MICRO_BATCH, PROFILER, REF, sharding
from treadle.migrate.rules.rollout import ALWAYS_ASYNC, LOGPROBS, NO_SGLANG, ROLLOUT, TOOLS, VISION, VLLM
from treadle.migrate.rules.trainer import SKIP

VETO = "There is no veto by single tokens: use rollout_rs."
_CAP = (
    "A cap on importance weights needs a level: set algorithm.rollout_correction.rollout_is and rollout_is_threshold."
)
_METRICS = "Metrics of the mismatch between sampler and trainer are in every run: leave it out."

_ROLLOUT: Rules = {
    "micro_batch_size": fixed(None, note="not given", otherwise=LOGPROBS),
    "limit_images": fixed(None, note="text only", otherwise=VISION),
    "chat_scheduler": fixed(
        None, note="agent loops run the chat", otherwise="Write an agent loop: rollout.agent.loops."
    ),
    "use_fire_sampling": fixed(False, note="no fire sampling", otherwise="There is no fire sampling."),
    "repetition_penalty": to("rollout.repetition_penalty"),
    "enable_sleep_mode": fixed(True, False, note="rollout.free_cache_engine says whether memory is given back"),
    "update_weights_bucket_megabytes": none("Weights are pushed in bounded memory: leave it out."),
    "skip_rollout": fixed(False, note="no rollout is skipped", otherwise=SKIP),
    "skip_dump_dir": none(SKIP),
    "skip_use_default_dir": none(SKIP),
    "multi_turn.max_turns": to("rollout.multi_turn.max_assistant_turns", convert=unless_null("no limit")),
    "multi_turn.interaction_config_path": fixed(
        None, note="no simulator", otherwise="Give rollout.multi_turn.environment and the loop environment_agent."
    ),
    "multi_turn.completion_callback": fixed(None, note="none", otherwise=TOOLS),
    "multi_turn.enable_tokenization_sanity_check": ignored(
        "history keeps its token ids, so there is nothing to compare"
    ),
    "server.timeout": to("rollout.limits.request_timeout_s"),
    "server.max_start_wait_time": to("rollout.limits.launch_timeout_s"),
    "server.max_attempts": to(
        "rollout.failures.request_retries",
        convert=lambda value, look: Converted(int(value) - 1, f"{value} attempts") if value else NotNeeded("not given"),
    ),
    "server.retry_delay": none("Retries go to another replica without delay: leave it out."),
    "server.max_connections": none("Give rollout.agent.max_concurrent_sessions."),
    "checkpoint_manager_class": fixed(None, note="none", otherwise="Weight transport is not pluggable."),
    "moe_tensor_parallel_size": fixed(1, None, note="one engine per replica", otherwise=VLLM),
    "sglang_engine_mode": none(NO_SGLANG),
    "custom.**": none("Give your agent loop its arguments in rollout.agent.loops."),
    "layer_name_map.**": none("Engines and policy share parameter names: leave it out."),
}

_REWARDS: Rules = {
    "launch_reward_fn_async": fixed(True, False, note="every trajectory is scored as it ends"),
    "use_reward_loop": fixed(True, False, note="every trajectory is scored as it ends"),
    "overlong_buffer.enable": fixed(False, note="no overlong penalty", otherwise=OVERLONG),
    "overlong_buffer.**": none(OVERLONG),
    "reward_kwargs.overlong_buffer_cfg.enable": fixed(False, note="no overlong penalty", otherwise=OVERLONG),
    "reward_kwargs.overlong_buffer_cfg.**": none(OVERLONG),
    "reward_kwargs.max_resp_len": none(OVERLONG),
    "max_rpm": to("reward.rate_limit_per_s", convert=per_minute),
    "timeout": to("reward.timeout_s"),
    "max_concurrent": none("Give reward.num_workers, or reward.rate_limit_per_s."),
    "max_tpm": none("Scores are limited by number, not by tokens: reward.rate_limit_per_s."),
}

_REWARD_MODEL = (
    "strategy micro_batch_size micro_batch_size_per_gpu max_length use_dynamic_bsz forward_max_token_len_per_gpu"
    " ulysses_sequence_parallel_size mean std profiler.** megatron.** model_config.**"
)

OLDER_RULES: Rules = (
    under(ROLLOUT, _ROLLOUT)
    | classes(ROLLOUT, "trace prometheus server")
    | under("reward_model", _REWARDS)
    | under("reward", _REWARDS)
    | nones("reward_model", _REWARD_MODEL, REWARD_MODEL)
    | nones("reward_model", "sandbox_fusion.**", SANDBOX)
    | under(
        ACTOR,
        {
            "fsdp_config.grad_offload": fixed(
                False, note="gradients stay with their parameters", otherwise="Use offload_policy."
            ),
            "tis_imp_ratio_cap": fixed(-1, None, note="no cap", otherwise=_CAP),
            "recompute_old_log_prob": fixed(
                True, note="algorithm.rollout_correction.bypass_mode says", otherwise="Use bypass_mode."
            ),
            "router_replay.mode": fixed("disabled", note="no routing replay", otherwise="There is no routing replay."),
            "router_replay.**": none("There is no routing replay."),
            "policy_loss.rollout_correction.**": none(f"Give {CORRECTION}."),
            "ppo_infer_micro_batch_size_per_gpu": none(GLOBAL_MICRO_BATCH),
            "ppo_infer_max_token_len_per_gpu": none(
                "One token budget serves both passes: actor.ppo_max_token_len_per_gpu."
            ),
            "profile.**": none(PROFILER),
        },
    )
    | under(
        REF,
        {
            "fsdp_config.grad_offload": fixed(False, note="the reference has no gradients"),
            "model.**": none("The reference policy is model.path as it was before training: leave it out."),
            "include_ref": fixed(True, False, note="built when the loss or the reward reads it"),
        },
    )
    | sharding("critic.model.fsdp_config", "critic", "Critic", to("critic.model_dtype", convert=dtype))
    | {
        "critic.model.fsdp_config.grad_offload": fixed(False, note="gradients stay with their parameters"),
        "critic.kl_ctrl.**": none("Give algorithm.kl_ctrl."),
        "critic.cliprange": none("Give critic.cliprange_value."),
    }
    | under(
        "algorithm",
        {
            "rollout_is": fixed(None, False, note="no correction", otherwise=f"Give {CORRECTION}.rollout_is."),
            "rollout_is_level": to(
                f"{CORRECTION}.rollout_is", convert=by_table({"token": "token", "sequence": "sequence"}, VETO)
            ),
            "rollout_is_threshold": to(f"{CORRECTION}.rollout_is_threshold", convert=unless_null("no correction")),
            "rollout_is_threshold_lower": to(
                f"{CORRECTION}.rollout_rs_threshold_lower", convert=unless_null("one over the upper bound")
            ),
            "rollout_is_mode": none(f"Truncation is rollout_is, masking is rollout_rs: give them in {CORRECTION}."),
            "rollout_is_veto_threshold": fixed(None, note="no veto", otherwise=VETO),
            "rollout_correction.rollout_token_veto_threshold": fixed(None, note="no veto", otherwise=VETO),
            "rollout_correction.use_policy_gradient": fixed(
                False, note="the loss is actor.policy_loss", otherwise=_METRICS
            ),
            "rollout_correction.bypass_old_logprob_for_rollout": to(f"{CORRECTION}.bypass_mode"),
        },
    )
    | under(
        "data",
        {
            "need_tools_kwargs": fixed(True, False, note="a task always keeps its tool arguments"),
            "filter_prompts": fixed(True, False, note="rollout.overlong_prompts says what happens"),
            "cache_dir": none("Files are read from where they are: leave it out."),
            "chat_template_func": fixed(None, note="none", otherwise="Give model.custom_chat_template."),
            "return_tensors": none("Tasks are messages, not tensors: leave it out."),
            "sampler.**": none("Tasks are drawn at random by data.seed, or in order: data.shuffle."),
            "datagen.**": none("Tasks come from files or generators: data.train_files."),
            "output_path": none("Trajectories are written to the run directory: logging.run_dir."),
            "n_samples": to("rollout.n"),
            "batch_size": to("data.train_batch_size"),
        },
    )
    | under(
        "trainer",
        {
            "remove_previous_ckpt_in_save": to(
                "checkpoint.keep_last",
                convert=lambda value, look: Converted(1, "the previous one goes") if value else NotNeeded("keep them"),
            ),
            "val_generations_to_log_to_wandb": to("logging.log_val_generations"),
            "hybrid_engine": fixed(True, False, note="rollout.nnodes says whether rollout and trainer share devices"),
            "use_legacy_worker_impl": ignored("there is one implementation"),
            "rejection_sample": fixed(
                False, note="see algorithm.filter_groups", otherwise="Use algorithm.filter_groups."
            ),
            "profile_steps": fixed(None, note="no profiler", otherwise=PROFILER),
            "controller_nsight_options.**": none(PROFILER),
            "worker_nsight_options.**": none(PROFILER),
        },
    )
    | under(
        "async_training",
        {
            "checkpoint_engine.**": none("How weights travel follows from where engine and policy run: leave it out."),
            "use_rollout_log_probs": to(f"{CORRECTION}.bypass_mode"),
            "compute_prox_log_prob": to(
                f"{CORRECTION}.bypass_mode",
                convert=lambda value, look: Converted(not value, "the opposite of bypass_mode"),
            ),
        },
    )
    | {
        "rollout.test_freq": to("trainer.test_freq"),
        "rollout.total_epochs": to("trainer.total_epochs"),
    }
    | moved("ray_init", "cluster.ray_init", "num_cpus", convert=unless_null("Ray's own choice"))
    | {"ray_init.timeline_json_file": fixed(None, note="no timeline file", otherwise="Every run times its spans.")}
)


FLAT_RULES: Rules = {
    "actor._target_": same(section_class("Actor")),
    "ref._target_": same(section_class("Ref")),
    "rollout.mode": ALWAYS_ASYNC,
    **classes("actor", "optim policy_loss fsdp_config"),
    **classes("ref", "fsdp_config"),
    **classes("critic", "fsdp_config"),
    **classes("rollout", ". val_kwargs agent multi_turn"),
    **classes("data"),
    **classes("trainer"),
    **classes("algorithm.rollout_correction"),
}
