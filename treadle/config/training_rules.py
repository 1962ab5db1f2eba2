"""Config rules of training: schedules, batches, ranks, rewards and losses.

A rule refuses: what was asked for would have no effect, or cannot run. A caution warns: the run works, and is not what
its name says. Both yield the key to blame, what is wrong, and how to mend it, as every rule does (see `rules`).
"""

from collections.abc import Callable

from treadle.config.reward import SESSION_PARTS
from treadle.config.root import Config, SFTRunConfig, TrainConfig
from treadle.config.section import TARGET, Source
from treadle.config.training import (
    GROUP_ESTIMATORS,
    OTHER_ESTIMATORS,
    PREFERENCE_ESTIMATORS,
    SEQUENCE_MEAN_LOSSES,
    TURN_ESTIMATORS,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPRefConfig,
    LoraConfig,
)
from treadle.config.transport import transport_can_work
from treadle.config.validate import Clashes
from treadle.errors import nearest

WIDEST_GEOMETRIC = 1.2
"""A mean ratio per token this far from 1 is a product of 10^16 over 200 tokens: no sequence that trains gets there."""

SAMPLED_PLAINLY = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""The settings under which tokens are drawn from the whole softmax."""


def several_ranks_are_sharded(config: TrainConfig) -> Clashes:
    ranks = config.trainer.num_ranks()
    kinds = {"actor": FSDPActorConfig, "ref": FSDPRefConfig, "critic": FSDPCriticConfig}
    for (section, kind), network in zip(kinds.items(), config.used_networks(), strict=True):
        if ranks > 1 and network is not None and not isinstance(network, kind):
            problem = f"{type(network).__name__} holds a network on one device, but {ranks} ranks train"
            yield f"{section}.{TARGET}", problem, f"set {section}.{TARGET}=treadle.config.{kind.__name__}"


def a_gpu_has_one_process(config: TrainConfig) -> Clashes:
    trainer = config.trainer
    if trainer.n_gpus_per_node and trainer.processes_per_node > 1:
        problem = f"{trainer.processes_per_node}, but with {trainer.n_gpus_per_node} GPUs there is one for each"
        yield "trainer.processes_per_node", problem, "leave it 1"
    elif config.cluster.backend == "ray" and trainer.processes_per_node > 1:
        problem = f"{trainer.processes_per_node}, but on Ray a node without GPUs has one"
        yield "trainer.processes_per_node", problem, "leave it 1, or set cluster.backend=local"


def ranks_divide_into_copies(config: TrainConfig) -> Clashes:
    ranks = config.trainer.num_ranks()
    for section, network in (("actor", config.actor), ("ref", config.ref), ("critic", config.critic)):
        if isinstance(network, FSDPActorConfig | FSDPRefConfig | FSDPCriticConfig):
            size = network.fsdp_config.fsdp_size
            if size != -1 and (size < 1 or ranks % size):
                yield f"{section}.fsdp_config.fsdp_size", f"{size} does not divide {ranks} ranks", "-1 uses all"


def async_modes_have_their_own_rollout(config: TrainConfig) -> Clashes:
    trainer = config.trainer
    if trainer.mode != "sync" and config.rollout.nnodes == 0:
        problem = f"0, but trainer.mode {trainer.mode} needs a rollout server of its own"
        yield "rollout.nnodes", problem, "set rollout.nnodes=1 or more, or trainer.mode=sync"


def async_modes_choose_a_correction(config: TrainConfig) -> Clashes:
    mode = config.trainer.mode
    if mode != "sync" and config.algorithm.rollout_correction.rollout_is is None:
        problem = f"trainer.mode {mode} trains on samples of older weights: choose a correction"
        yield "algorithm.rollout_correction.rollout_is", problem, "token, sequence, or none if you mean it"


def weights_arrive_before_samples_are_too_old(config: TrainConfig) -> Clashes:
    trainer = config.trainer
    if trainer.mode == "fully_async" and trainer.parameter_sync_steps > trainer.max_staleness + 1:
        problem = (
            f"{trainer.parameter_sync_steps}, but with trainer.max_staleness {trainer.max_staleness} no sample of the "
            f"same weights may train more than {trainer.max_staleness + 1} steps"
        )
        yield "trainer.parameter_sync_steps", problem, "lower it, or raise trainer.max_staleness"


def samples_can_train(config: TrainConfig) -> Clashes:
    rollout = config.rollout
    if rollout.name == "openai":
        yield "rollout.name", "an external endpoint cannot take new weights, so it cannot be trained", "native or vllm"
    if rollout.name == "scripted":
        yield "rollout.name", "scripted answers come from no weights, so there is nothing to train", "native or vllm"
    if rollout.temperature == 0:
        problem = "0 samples greedily: such tokens have no probability to train"
        yield "rollout.temperature", problem, "validation has its own: rollout.val_kwargs.temperature"


def samples_come_from_the_policy(config: TrainConfig) -> Clashes:
    weights = config.algorithm.rollout_correction.rollout_is
    how = f"divides by it ({weights})" if weights in ("token", "sequence") else "does not correct for it"
    for name, plain in SAMPLED_PLAINLY.items():
        if getattr(config.rollout, name) != plain:
            problem = (
                "tokens are drawn from another distribution than that of the policy in training; "
                f"algorithm.rollout_correction.rollout_is {how}; rollout_corr/processed_k3_kl tells how far they differ"
            )
            yield f"rollout.{name}", problem, f"leave it at {plain} for training, and set rollout.val_kwargs.{name}"


def tasks_are_given(config: TrainConfig) -> Clashes:
    data, trainer = config.data, config.trainer
    if not data.train_files and not trainer.val_only:
        yield "data.train_files", "is empty: there is nothing to train on", "list task files or generators"
    if not data.val_files and (trainer.val_only or trainer.test_freq > 0):
        why = "trainer.val_only" if trainer.val_only else f"trainer.test_freq {trainer.test_freq}"
        yield "data.val_files", f"is empty, but {why} asks for validation", "list task files or generators"


def mini_batches_are_equal(config: TrainConfig) -> Clashes:
    batch = config.data.train_batch_size
    minis = {"actor": config.actor.ppo_mini_batch_size}
    if config.algorithm.needs_critic():
        minis["critic"] = config.critic.ppo_mini_batch_size or minis["actor"]
    for section, mini in minis.items():
        name = f"{section}.ppo_mini_batch_size"
        if mini > batch:
            yield name, f"{mini} is more than data.train_batch_size {batch}", f"at most {batch}"
        elif batch % mini:
            problem = f"{mini} does not divide data.train_batch_size {batch}: {batch % mini} would be left over"
            yield name, problem, f"use a divisor of {batch}"


def micro_batches_hold_a_sequence(config: TrainConfig) -> Clashes:
    longest = config.rollout.trajectory_length()
    budgets = {"actor.ppo_max_token_len_per_gpu": config.actor.ppo_max_token_len_per_gpu}
    if config.actor.use_kl_loss or config.algorithm.needs_reference():
        budgets["ref.log_prob_max_token_len_per_gpu"] = config.ref.log_prob_max_token_len_per_gpu
    if config.algorithm.needs_critic():
        budgets["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
    for name, budget in budgets.items():
        if budget < longest:
            yield name, f"{budget} holds no sequence of {longest} tokens", f"raise it to {longest} or more"


def rewards_exist(config: TrainConfig) -> Clashes:
    """A reward that can differ from 0: a function or a model, or what sessions give where the config counts on it."""
    reward = config.reward
    if config.trainer.val_only:
        return
    if config.algorithm.adv_estimator == "remax" and (of_groups := reward.group_parts()):
        problem = f"remax compares with a greedy answer, which has no siblings, but {of_groups[0]} has scope group"
        yield "algorithm.adv_estimator", problem, "use another estimator, such as rloo"
    weights = reward.weights()
    if not reward.gives_scores():
        turns, tools = _may_reward_turns(config), _may_reward_calls(config)
        keys = [f"reward.{name}_weight=1.0" for name, may in (("environment", turns), ("tools", tools)) if may]
        where = f", or set {' or '.join(keys)} where sessions give the reward" if keys else ""
        yield "reward.functions", "is empty: without a reward nothing trains", f"name a function or a model{where}"
    elif not any([*weights.values(), reward.environment_weight, reward.tools_weight]):
        yield "reward.functions", "every weight is 0: without a reward nothing trains", "give one of them a weight"
    elif not any(weights.values()):
        yield from _sessions_give_rewards(config)


def _sessions_give_rewards(config: TrainConfig) -> Clashes:
    """The only reward is what sessions give: something must be there that can."""
    reward, loop = config.reward, config.rollout.agent.default_agent_loop
    turns, tools = reward.environment_weight, reward.tools_weight
    if (turns and _may_reward_turns(config)) or (tools and _may_reward_calls(config)):
        return
    if turns:
        problem = f"is the only reward, but rollout.agent.default_agent_loop {loop} has nothing that rewards a turn"
        yield "reward.environment_weight", problem, "use environment_agent or a loop of your own, or name a function"
    else:
        problem = f"is the only reward, but rollout.agent.default_agent_loop {loop} has no tool that could give one"
        yield "reward.tools_weight", problem, "list rollout.multi_turn.tools for tool_agent, or name a function"


def _may_reward_turns(config: Config) -> bool:
    agent = config.rollout.agent
    return agent.default_agent_loop not in ("single_turn_agent", "tool_agent") or bool(agent.loops)


def _may_reward_calls(config: Config) -> bool:
    return bool(config.rollout.multi_turn.tools) and config.rollout.agent.default_agent_loop != "single_turn_agent"


def groups_can_be_compared(config: TrainConfig) -> Clashes:
    n, estimator = config.rollout.n, config.algorithm.adv_estimator
    if n == 1 and estimator in GROUP_ESTIMATORS:
        problem = f"1, but {estimator} compares the samples of one task: every advantage would be zero"
        yield "rollout.n", problem, f"draw at least 2 samples, or choose {', '.join(OTHER_ESTIMATORS)}"
    groups, known = config.algorithm.filter_groups, ["reward", *config.reward.weights(), *SESSION_PARTS]
    if groups.enable and groups.metric not in known:
        problem = f"{groups.metric!r} is not measured; there are {', '.join(known)}"
        yield "algorithm.filter_groups.metric", problem, nearest(groups.metric, known)


def advantages_are_of_one_kind(config: TrainConfig) -> Clashes:
    algorithm = config.algorithm
    estimator = algorithm.adv_estimator
    if algorithm.advantage_level == "turn" and estimator not in TURN_ESTIMATORS and ":" not in estimator:
        problem = f"turn, but {estimator} does not compare turns"
        yield "algorithm.advantage_level", problem, f"choose {', '.join(TURN_ESTIMATORS)}, or leave it trajectory"
    if algorithm.norm_adv_scope == "batch" and not (estimator == "grpo" and algorithm.norm_adv_by_std_in_grpo):
        problem = "batch, but only grpo with norm_adv_by_std_in_grpo divides by it"
        yield "algorithm.norm_adv_scope", problem, "choose grpo, or leave it group"
    if estimator == "gdpo" and algorithm.use_kl_in_reward:
        problem = "gdpo compares the parts of the reward, and KL is none of them"
        yield "algorithm.use_kl_in_reward", problem, "use actor.use_kl_loss instead"


def critic_exists(config: TrainConfig) -> Clashes:
    warmup, estimator = config.trainer.critic_warmup, config.algorithm.adv_estimator
    if warmup and estimator in (*GROUP_ESTIMATORS, *OTHER_ESTIMATORS) and not config.algorithm.needs_critic():
        yield "trainer.critic_warmup", f"{warmup}, but {estimator} has no critic to warm up", "leave it 0"


def loss_bounds_are_ordered(config: TrainConfig) -> Clashes:
    loss = config.actor.policy_loss
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        problem = f"{loss.clip_cov_lb:g} is not below clip_cov_ub {loss.clip_cov_ub:g}"
        yield "actor.policy_loss.clip_cov_lb", problem, None


def resume_path_is_read(config: TrainConfig) -> Clashes:
    checkpoint = config.checkpoint
    by_path = checkpoint.resume_mode == "resume_path"
    if by_path and not checkpoint.resume_from_path:
        yield "checkpoint.resume_from_path", "is needed by checkpoint.resume_mode: resume_path", None
    if checkpoint.resume_from_path and not by_path:
        problem = f"is given, but checkpoint.resume_mode is {checkpoint.resume_mode}"
        yield "checkpoint.resume_from_path", problem, "set checkpoint.resume_mode=resume_path"


def kl_cov_has_old_logprobs(config: TrainConfig) -> Clashes:
    """kl_cov penalises the distance from the old policy, which is 0 in the first update of a step."""
    actor, bypass = config.actor, config.algorithm.rollout_correction.bypass_mode
    single = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    if actor.policy_loss.loss_mode == "kl_cov" and single and not bypass:
        problem = "kl_cov, but a step has one update, in which the old policy is the current one: its penalty is zero"
        fix = "raise actor.ppo_epochs, lower actor.ppo_mini_batch_size, or set bypass_mode; clip_cov needs none of that"
        yield "actor.policy_loss.loss_mode", problem, fix


def geometric_bounds_bind(config: TrainConfig) -> Clashes:
    correction = config.algorithm.rollout_correction
    if correction.rollout_rs != "geometric":
        return
    lower, upper = correction.rejection_bounds()
    name, value = ("", upper) if upper > WIDEST_GEOMETRIC else ("_lower", lower)
    if upper > WIDEST_GEOMETRIC or lower < 1 / WIDEST_GEOMETRIC:
        problem = (
            f"{value:g} bounds the mean ratio per token of a sequence, which never gets there: nothing is rejected"
        )
        fix = f"between {1 / WIDEST_GEOMETRIC:.3g} and {WIDEST_GEOMETRIC:g}; null for 1.001 and one over it"
        yield f"algorithm.rollout_correction.rollout_rs_threshold{name}", problem, fix


def dual_clip_is_above_the_clip(config: TrainConfig) -> Clashes:
    actor = config.actor
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    bound = actor.clip_ratio_c
    if actor.policy_loss.loss_mode == "vanilla" and bound is not None and bound < 1 + high:
        problem = f"{bound:g} is below 1 + clip_ratio_high = {1 + high:g}: it would cut ratios inside the clip range"
        yield "actor.clip_ratio_c", problem, f"{1 + high:g} or more, or null for no such bound"


def reference_exists_to_follow(config: TrainConfig) -> Clashes:
    freq, path, estimator = config.ref.sync_freq, config.ref.path, config.algorithm.adv_estimator
    is_read = config.actor.use_kl_loss or config.algorithm.needs_reference()
    if freq > 0 and not is_read:
        problem = f"{freq}, but nothing reads a reference policy"
        yield "ref.sync_freq", problem, "set actor.use_kl_loss or algorithm.use_kl_in_reward, or leave it -1"
    if path is not None and not is_read:
        problem = f"{path!r}, but nothing reads a reference policy"
        yield "ref.path", problem, "set algorithm.distill_coef, actor.use_kl_loss or algorithm.use_kl_in_reward"
    if path is not None and freq > 0:
        problem = f"{freq}, but ref.path is another model, which cannot take the policy's weights"
        yield "ref.sync_freq", problem, "leave it -1"
    if estimator == "on_policy_distill" and not config.algorithm.distill_coef:
        problem = "0, but adv_estimator on_policy_distill has no other signal"
        yield "algorithm.distill_coef", problem, "set it to 1"
    template = config.ref.prompt_template
    if template is not None and not config.algorithm.distill_coef:
        problem = "is of a teacher, but algorithm.distill_coef is 0"
        yield "ref.prompt_template", problem, "set algorithm.distill_coef=1, or leave it out"
    if config.algorithm.distill_coef and path is None and template is None:
        problem = "is needed by algorithm.distill_coef: the teacher"
        fix = "give the directory of a model with the same tokenizer, or ref.prompt_template: the model, shown more"
        yield "ref.path", problem, fix


def aggregation_is_the_losses_own(config: TrainConfig) -> Clashes:
    name, mode = config.actor.policy_loss.loss_mode, config.actor.loss_agg_mode
    given = config.origin("actor.loss_agg_mode").source is not Source.DEFAULT
    if name in SEQUENCE_MEAN_LOSSES and given and mode != "seq-mean-token-mean":
        problem = f"{mode} weighs the KL term and the entropy bonus only: {name} is a mean over sequences"
        yield "actor.loss_agg_mode", problem, "seq-mean-token-mean weighs all terms alike"


def dr_grpo_has_its_aggregation(config: TrainConfig) -> Clashes:
    mode, estimator = config.actor.loss_agg_mode, config.algorithm.adv_estimator
    if estimator == "dr_grpo" and mode != "seq-mean-token-sum-norm":
        problem = f"{mode}, but dr_grpo sums tokens and divides by a constant: lengths weigh in again"
        yield "actor.loss_agg_mode", problem, "seq-mean-token-sum-norm"


def preferences_sum_tokens(config: TrainConfig) -> Clashes:
    mode, estimator = config.actor.loss_agg_mode, config.algorithm.adv_estimator
    if estimator in PREFERENCE_ESTIMATORS and mode != "seq-mean-token-sum":
        problem = f"{mode}, but {estimator} is a loss of whole answers, whose tokens add up"
        yield "actor.loss_agg_mode", problem, "seq-mean-token-sum"


def preferences_take_one_update(config: TrainConfig) -> Clashes:
    """DPO and IPO have their margins from the policy before a step; each of its updates would need new ones."""
    actor, batch, estimator = config.actor, config.data.train_batch_size, config.algorithm.adv_estimator
    updates = actor.ppo_epochs * max(1, batch // actor.ppo_mini_batch_size)
    if estimator in PREFERENCE_ESTIMATORS and updates > 1:
        key = "actor.ppo_epochs" if actor.ppo_epochs > 1 else "actor.ppo_mini_batch_size"
        value = actor.ppo_epochs if actor.ppo_epochs > 1 else actor.ppo_mini_batch_size
        problem = (
            f"{value} makes {updates} updates a step, but {estimator} takes its margins once, before the first: the "
            "later ones go on by old margins, and the ratio is clipped (actor.clip_ratio) as in PPO"
        )
        yield key, problem, f"actor.ppo_epochs=1 and actor.ppo_mini_batch_size={batch}: one update a step"


def kl_in_the_loss_has_a_gradient(config: TrainConfig) -> Clashes:
    actor = config.actor
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        problem = "k1's gradient is zero on average: it holds nothing near the reference"
        yield "actor.kl_loss_type", problem, "k1+ has the same value and the gradient of the divergence"


def reference_can_take_small_steps(config: TrainConfig) -> Clashes:
    ref = config.ref
    if ref.sync_freq > 0 and ref.dtype == "bf16" and ref.sync_mix < 0.05:
        problem = f"{ref.sync_mix:g} of a difference is mostly less than bf16 can add to a weight"
        yield "ref.sync_mix", problem, "set ref.dtype=fp32, or mix more in at a time"


def supervision_runs_here(config: SFTRunConfig) -> Clashes:
    if config.cluster.backend != "local":
        problem = f"{config.cluster.backend}, but supervised fine-tuning runs on this machine alone"
        yield "cluster.backend", problem, "leave it local; trainer.n_gpus_per_node shards over the GPUs of this machine"
    if not config.data.train_files:
        fix = "list data files with conversations, or run directories"
        yield "data.train_files", "is empty: there is nothing to train on", fix
    if not config.data.val_files and config.trainer.test_freq > 0:
        problem = f"is empty, but trainer.test_freq {config.trainer.test_freq} asks for validation"
        yield "data.val_files", problem, "list data files with conversations, or leave trainer.test_freq -1"
    if config.trainer.val_only:
        yield "trainer.val_only", "true, but treadle sft trains", "treadle rollout CONFIG --validation evaluates"


def a_micro_batch_holds_a_conversation(config: SFTRunConfig) -> Clashes:
    longest, budget = config.longest_row(), config.actor.ppo_max_token_len_per_gpu
    if longest > budget:
        problem = f"{longest}, but actor.ppo_max_token_len_per_gpu {budget} holds no row of that length"
        yield "sft.max_length", problem, f"lower it, or raise actor.ppo_max_token_len_per_gpu to {longest}"


def adapters_are_asked_for(config: TrainConfig) -> Clashes:
    """Keys of `actor.lora` have an effect with a rank alone; adapters are fp32, whatever the weights beside them."""
    lora, default = config.actor.lora, LoraConfig()
    if lora.r is None:
        for name, value in lora.values().items():
            if value != getattr(default, name):
                yield f"actor.lora.{name}", "is given, but actor.lora.r is null: no adapter trains", "set actor.lora.r"
    elif config.actor.model_dtype != "fp32":
        problem = f"{config.actor.model_dtype}, but adapters (actor.lora.r {lora.r}) train in fp32"
        yield "actor.model_dtype", problem, "leave it fp32; the frozen weights have actor.dtype"


def adapters_learn_faster(config: TrainConfig) -> Clashes:
    lr, r = config.actor.optim.lr, config.actor.lora.r
    if r is not None and config.origin("actor.optim.lr").source is Source.DEFAULT:
        problem = f"{lr:g} is the default for all parameters; adapters learn with about ten times as much"
        yield "actor.optim.lr", problem, f"set it, to {10 * lr:g} for instance"


TRAINING_RULES: tuple[Callable[[TrainConfig], Clashes], ...] = (
    async_modes_have_their_own_rollout,
    async_modes_choose_a_correction,
    weights_arrive_before_samples_are_too_old,
    transport_can_work,
    samples_can_train,
    rewards_exist,
    tasks_are_given,
    mini_batches_are_equal,
    a_gpu_has_one_process,
    ranks_divide_into_copies,
    several_ranks_are_sharded,
    micro_batches_hold_a_sequence,
    groups_can_be_compared,
    advantages_are_of_one_kind,
    critic_exists,
    loss_bounds_are_ordered,
    kl_cov_has_old_logprobs,
    geometric_bounds_bind,
    dual_clip_is_above_the_clip,
    reference_exists_to_follow,
    adapters_are_asked_for,
    resume_path_is_read,
)
TRAINING_CAUTIONS: tuple[Callable[[TrainConfig], Clashes], ...] = (
    samples_come_from_the_policy,
    aggregation_is_the_losses_own,
    dr_grpo_has_its_aggregation,
    preferences_sum_tokens,
    preferences_take_one_update,
    kl_in_the_loss_has_a_gradient,
    reference_can_take_small_steps,
    adapters_learn_faster,
)
SFT_RULES: tuple[Callable[..., Clashes], ...] = (
    supervision_runs_here,
    a_micro_batch_holds_a_conversation,
    a_gpu_has_one_process,
    ranks_divide_into_copies,
    several_ranks_are_sharded,
    adapters_are_asked_for,
    resume_path_is_read,
)
