"""Config rules: what must hold between keys, beyond each key's own type; all checked after loading.

Each rule is a generator of mistakes and names the two values that clash. Rules read devices from no machine; the plan
does that.
"""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from treadle.config.reward import SESSION_PARTS, group_rewards_are_whole, reward_models_are_whole, scores_are_bounded
from treadle.config.rollout import AGENT_LOOPS
from treadle.config.root import Config, TrainConfig
from treadle.config.section import TARGET, Section
from treadle.config.training import (
    GROUP_ESTIMATORS,
    OTHER_ESTIMATORS,
    TURN_ESTIMATORS,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPRefConfig,
)
from treadle.config.training_rules import LOSS_CAUTIONS, LOSS_RULES
from treadle.config.transport import transport_can_work
from treadle.config.validate import Bounds
from treadle.errors import Mistake, nearest

Clash = Iterator[tuple[str, str, str | None]]
"""The key to blame, what is wrong, and how to mend it."""


class UnknownValueRead(Exception):
    """A rule asked for a value that nobody knows."""


class _Unknown:
    """Stands for a value that has a mistake of its own: whoever looks at it stops asking."""

    def _stop(self, *_: object) -> NoReturn:
        raise UnknownValueRead

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __str__ = __format__ = _stop
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _stop
    __rfloordiv__ = __iter__ = __len__ = __contains__ = __getattr__ = _stop


UNKNOWN: Any = _Unknown()


def check_rules(config: Config) -> list[Mistake]:
    """Every clash between the values of a config."""
    rules: list[Callable[..., Clash]] = [*ROLLOUT_RULES, *(TRAINING_RULES if isinstance(config, TrainConfig) else ())]
    return [_mistake(config, *clash) for rule in rules for clash in _known(rule(config))]


def check_cautions(config: Config) -> list[Mistake]:
    """What works and is perhaps not meant: a warning each, and never a reason to stop."""
    rules: list[Callable[..., Clash]] = list(TRAINING_CAUTIONS if isinstance(config, TrainConfig) else ())
    return [_mistake(config, *clash) for rule in rules for clash in _known(rule(config))]


def _known(clashes: Clash) -> Clash:
    try:
        yield from clashes
    except UnknownValueRead:
        return


def _mistake(config: Config, name: str, problem: str, fix: str | None) -> Mistake:
    value: object = config
    for part in name.split("."):
        if part == TARGET:
            value = type(value).__name__
        else:
            value = getattr(value, part) if isinstance(value, Section) else value[part]  # type: ignore[index]
    return Mistake(name, problem, value, config.origin(name), fix)


SAMPLED_PLAINLY = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""The settings under which tokens are drawn from the whole softmax."""


def samples_come_from_the_policy(config: TrainConfig) -> Clash:
    weights = config.algorithm.rollout_correction.rollout_is
    how = f"divides by it ({weights})" if weights in ("token", "sequence") else "does not correct for it"
    for name, plain in SAMPLED_PLAINLY.items():
        if getattr(config.rollout, name) != plain:
            problem = (
                "tokens are drawn from another distribution than that of the policy in training; "
                f"algorithm.rollout_correction.rollout_is {how}; rollout_corr/processed_k3_kl tells how far they differ"
            )
            yield f"rollout.{name}", problem, f"leave it at {plain} for training, and set rollout.val_kwargs.{name}"


def sequence_fits(config: Config) -> Clash:
    rollout = config.rollout
    needed = rollout.trajectory_length()
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        problem = f"{rollout.max_model_len} is less than prompt_length + response_length = {needed}"
        yield "rollout.max_model_len", problem, f"raise it to {needed}, or leave it null"
    longest, at_once = rollout.sequence_length(), rollout.max_num_batched_tokens
    if not rollout.enable_chunked_prefill and at_once < longest:
        problem = f"{at_once} holds no sequence of {longest} tokens, and enable_chunked_prefill is false"
        yield "rollout.max_num_batched_tokens", problem, f"raise it to {longest}, or split prompts"


def engine_takes_arguments(config: Config) -> Clash:
    given = {"rollout.engine_kwargs": config.rollout.engine_kwargs}
    given |= {
        f"reward.judges.{name}.engine.engine_kwargs": it.engine.engine_kwargs
        for name, it in config.reward.judges.items()
    }
    for place, by_engine in given.items():
        for engine in by_engine:
            if engine != "vllm":
                problem = f"{engine} takes no further arguments: vllm alone does"
                yield place, problem, "write {vllm: {name: value}}, or leave it out"


def engine_has_its_devices(config: Config) -> Clash:
    rollout = config.rollout
    shares = isinstance(config, TrainConfig) and rollout.nnodes == 0
    if shares and rollout.n_gpus_per_node:
        problem = f"{rollout.n_gpus_per_node}, but rollout.nnodes is 0, so the rollout shares the trainer's devices"
        yield "rollout.n_gpus_per_node", problem, "set rollout.nnodes for devices of its own, or leave this 0"
    elif rollout.n_gpus_per_node and not rollout.uses_gpus():
        yield "rollout.n_gpus_per_node", f"{rollout.n_gpus_per_node}, but {rollout.name} uses no GPU", "leave it 0"
    else:
        yield from _engine_is_split_evenly(config, shares)


def _engine_is_split_evenly(config: Config, shares: bool) -> Clash:
    rollout = config.rollout
    devices = config.trainer if shares and isinstance(config, TrainConfig) else rollout
    gpus = devices.n_gpus_per_node if rollout.uses_gpus() else 0
    split, where = rollout.tensor_model_parallel_size, "trainer" if shares else "rollout"
    if split > 1 and (gpus % split or not gpus):
        problem = f"{split} does not divide {where}.n_gpus_per_node {devices.n_gpus_per_node}"
        fix = "an engine lives on one node" if gpus > split else f"{gpus} GPUs hold no engine of {split}"
        yield "rollout.tensor_model_parallel_size", problem, fix
    if split > 1 and rollout.name == "native":
        problem = f"{split}, but an engine of rollout.name native runs on one GPU"
        yield "rollout.tensor_model_parallel_size", problem, "leave it 1, or set rollout.name=vllm"
    if gpus and rollout.replicas_per_node > 1:
        problem = f"{rollout.replicas_per_node}, but with {gpus} GPUs a node has {gpus // split}"
        yield "rollout.replicas_per_node", problem, "leave it 1: it counts engines that use no GPU"
    elif shares and config.cluster.backend == "local" and rollout.replicas_per_node > 1:
        problem = f"{rollout.replicas_per_node}, but one engine shares the trainer's devices (rollout.nnodes is 0)"
        yield "rollout.replicas_per_node", problem, "leave it 1, or set rollout.nnodes=1 for engines of their own"


def endpoint_is_named(config: Config) -> Clash:
    if config.rollout.name == "openai" and not config.rollout.openai.base_url:
        fix = "give the endpoint, as http://host:port/v1"
        yield "rollout.openai.base_url", "is needed by rollout.name: openai", fix


def faults_are_fractions(config: Config) -> Clash:
    scripted = config.rollout.scripted
    if scripted.failure_rate + scripted.hang_rate > 1:
        problem = f"{scripted.hang_rate:g}, and failure_rate {scripted.failure_rate:g}, are together more than 1"
        yield "rollout.scripted.hang_rate", problem, "lower one of them"


def agent_loop_exists(config: Config) -> Clash:
    agent, multi_turn = config.rollout.agent, config.rollout.multi_turn
    name, known = agent.default_agent_loop, [*AGENT_LOOPS, *agent.loops]
    if name not in known and Bounds(names=()).problem(name):
        problem = f"no agent loop is called {name!r}; there are {', '.join(known)}"
        fix = nearest(name, known) or "or give an import path (package.module:Class)"
        yield "rollout.agent.default_agent_loop", problem, fix
    if name == "environment_agent" and name not in agent.loops and not multi_turn.environment:
        fix = "give the import path of an environment (package.module:Class)"
        yield "rollout.multi_turn.environment", "is needed by the agent loop environment_agent", fix


def every_worker_has_sessions(config: Config) -> Clash:
    agent = config.rollout.agent
    places = agent.max_concurrent_sessions
    if places is not None and places < (agent.num_workers or 1):
        problem = f"{places} is less than rollout.agent.num_workers {agent.num_workers}"
        yield "rollout.agent.max_concurrent_sessions", problem, "every worker needs at least one"


def mcp_servers_have_command_or_url(config: Config) -> Clash:
    for name, server in config.rollout.multi_turn.mcp_servers.items():
        if bool(server.command) == bool(server.url):
            given = "both are set" if server.url else "neither is set"
            yield f"rollout.multi_turn.mcp_servers.{name}.url", f"give command or url: {given}", None


def groups_can_be_complete(config: Config) -> Clash:
    n, least = config.rollout.n, config.rollout.failures.min_group_size
    if least > n:
        problem = f"{least} is more than rollout.n {n}: no group could have enough"
        yield "rollout.failures.min_group_size", problem, f"at most {n}"


def cluster_is_asked_for(config: Config) -> Clash:
    cluster = config.cluster
    if cluster.backend != "ray":
        for name, value in (("address", cluster.address), ("ray_init", cluster.ray_init)):
            if value:
                yield (
                    f"cluster.{name}",
                    f"is given, but cluster.backend is {cluster.backend}",
                    "set cluster.backend=ray",
                )


def several_nodes_need_ray(config: Config) -> Clash:
    nodes = {"rollout.nnodes": config.rollout.nnodes}
    if isinstance(config, TrainConfig):
        nodes["trainer.nnodes"] = config.trainer.nnodes
    for name, count in nodes.items():
        if count > 1 and config.cluster.backend == "local":
            problem = f"{count}, but cluster.backend local is this machine alone"
            yield name, problem, "set cluster.backend=ray, or ask for one node"


def several_ranks_are_sharded(config: TrainConfig) -> Clash:
    ranks = config.trainer.num_ranks()
    kinds = {"actor": FSDPActorConfig, "ref": FSDPRefConfig, "critic": FSDPCriticConfig}
    for (section, kind), network in zip(kinds.items(), config.used_networks(), strict=True):
        if ranks > 1 and network is not None and not isinstance(network, kind):
            problem = f"{type(network).__name__} holds a network on one device, but {ranks} ranks train"
            yield f"{section}.{TARGET}", problem, f"set {section}.{TARGET}=treadle.config.{kind.__name__}"


def async_modes_have_their_own_rollout(config: TrainConfig) -> Clash:
    trainer = config.trainer
    if trainer.mode != "sync" and config.rollout.nnodes == 0:
        problem = f"0, but trainer.mode {trainer.mode} needs a rollout server of its own"
        yield "rollout.nnodes", problem, "set rollout.nnodes=1 or more, or trainer.mode=sync"


def async_modes_choose_a_correction(config: TrainConfig) -> Clash:
    mode = config.trainer.mode
    if mode != "sync" and config.algorithm.rollout_correction.rollout_is is None:
        problem = f"trainer.mode {mode} trains on samples of older weights: choose a correction"
        yield "algorithm.rollout_correction.rollout_is", problem, "token, sequence, or none if you mean it"


def weights_arrive_before_samples_are_too_old(config: TrainConfig) -> Clash:
    trainer = config.trainer
    if trainer.mode == "fully_async" and trainer.parameter_sync_steps > trainer.max_staleness + 1:
        problem = (
            f"{trainer.parameter_sync_steps}, but with trainer.max_staleness {trainer.max_staleness} no sample of the "
            f"same weights may train more than {trainer.max_staleness + 1} steps"
        )
        yield "trainer.parameter_sync_steps", problem, "lower it, or raise trainer.max_staleness"


def samples_can_train(config: TrainConfig) -> Clash:
    rollout = config.rollout
    if rollout.name == "openai":
        yield "rollout.name", "an external endpoint cannot take new weights, so it cannot be trained", "native or vllm"
    if rollout.name == "scripted":
        yield "rollout.name", "scripted answers come from no weights, so there is nothing to train", "native or vllm"
    if rollout.temperature == 0:
        problem = "0 samples greedily: such tokens have no probability to train"
        yield "rollout.temperature", problem, "validation has its own: rollout.val_kwargs.temperature"


def tasks_are_given(config: TrainConfig) -> Clash:
    data, trainer = config.data, config.trainer
    if not data.train_files and not trainer.val_only:
        yield "data.train_files", "is empty: there is nothing to train on", "list task files or generators"
    if not data.val_files and (trainer.val_only or trainer.test_freq > 0):
        why = "trainer.val_only" if trainer.val_only else f"trainer.test_freq {trainer.test_freq}"
        yield "data.val_files", f"is empty, but {why} asks for validation", "list task files or generators"


def mini_batches_are_equal(config: TrainConfig) -> Clash:
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


def a_gpu_has_one_process(config: TrainConfig) -> Clash:
    trainer = config.trainer
    if trainer.n_gpus_per_node and trainer.processes_per_node > 1:
        problem = f"{trainer.processes_per_node}, but with {trainer.n_gpus_per_node} GPUs there is one for each"
        yield "trainer.processes_per_node", problem, "leave it 1"
    elif config.cluster.backend == "ray" and trainer.processes_per_node > 1:
        problem = f"{trainer.processes_per_node}, but on Ray a node without GPUs has one"
        yield "trainer.processes_per_node", problem, "leave it 1, or set cluster.backend=local"


def ranks_divide_into_copies(config: TrainConfig) -> Clash:
    ranks = config.trainer.num_ranks()
    for section, network in (("actor", config.actor), ("ref", config.ref), ("critic", config.critic)):
        if isinstance(network, FSDPActorConfig | FSDPRefConfig | FSDPCriticConfig):
            size = network.fsdp_config.fsdp_size
            if size != -1 and (size < 1 or ranks % size):
                yield f"{section}.fsdp_config.fsdp_size", f"{size} does not divide {ranks} ranks", "-1 uses all"


def micro_batches_hold_a_sequence(config: TrainConfig) -> Clash:
    longest = config.rollout.trajectory_length()
    budgets = {"actor.ppo_max_token_len_per_gpu": config.actor.ppo_max_token_len_per_gpu}
    if config.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        budgets["ref.log_prob_max_token_len_per_gpu"] = config.ref.log_prob_max_token_len_per_gpu
    if config.algorithm.needs_critic():
        budgets["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
    for name, budget in budgets.items():
        if budget < longest:
            yield name, f"{budget} holds no sequence of {longest} tokens", f"raise it to {longest} or more"


def reward_models_can_score(config: Config) -> Clash:
    yield from scores_are_bounded(config.reward)
    yield from reward_models_are_whole(config.reward)
    yield from group_rewards_are_whole(config.reward)


def rewards_exist(config: TrainConfig) -> Clash:
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


def _sessions_give_rewards(config: TrainConfig) -> Clash:
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


def groups_can_be_compared(config: TrainConfig) -> Clash:
    n, estimator = config.rollout.n, config.algorithm.adv_estimator
    if n == 1 and estimator in GROUP_ESTIMATORS:
        problem = f"1, but {estimator} compares the samples of one task: every advantage would be zero"
        yield "rollout.n", problem, f"draw at least 2 samples, or choose {', '.join(OTHER_ESTIMATORS)}"
    groups, known = config.algorithm.filter_groups, ["reward", *config.reward.weights(), *SESSION_PARTS]
    if groups.enable and groups.metric not in known:
        problem = f"{groups.metric!r} is not measured; there are {', '.join(known)}"
        yield "algorithm.filter_groups.metric", problem, nearest(groups.metric, known)


def advantages_are_of_one_kind(config: TrainConfig) -> Clash:
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


def critic_exists(config: TrainConfig) -> Clash:
    warmup, estimator = config.trainer.critic_warmup, config.algorithm.adv_estimator
    if warmup and estimator in (*GROUP_ESTIMATORS, *OTHER_ESTIMATORS) and not config.algorithm.needs_critic():
        yield "trainer.critic_warmup", f"{warmup}, but {estimator} has no critic to warm up", "leave it 0"


def loss_bounds_are_ordered(config: TrainConfig) -> Clash:
    loss = config.actor.policy_loss
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        problem = f"{loss.clip_cov_lb:g} is not below clip_cov_ub {loss.clip_cov_ub:g}"
        yield "actor.policy_loss.clip_cov_lb", problem, None


def resume_path_is_read(config: TrainConfig) -> Clash:
    checkpoint = config.checkpoint
    by_path = checkpoint.resume_mode == "resume_path"
    if by_path and not checkpoint.resume_from_path:
        yield "checkpoint.resume_from_path", "is needed by checkpoint.resume_mode: resume_path", None
    if checkpoint.resume_from_path and not by_path:
        problem = f"is given, but checkpoint.resume_mode is {checkpoint.resume_mode}"
        yield "checkpoint.resume_from_path", problem, "set checkpoint.resume_mode=resume_path"


ROLLOUT_RULES: tuple[Callable[[Config], Clash], ...] = (
    sequence_fits,
    engine_takes_arguments,
    engine_has_its_devices,
    endpoint_is_named,
    faults_are_fractions,
    agent_loop_exists,
    every_worker_has_sessions,
    mcp_servers_have_command_or_url,
    groups_can_be_complete,
    cluster_is_asked_for,
    several_nodes_need_ray,
    reward_models_can_score,
)
TRAINING_RULES: tuple[Callable[[TrainConfig], Clash], ...] = (
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
    *LOSS_RULES,
    resume_path_is_read,
)
TRAINING_CAUTIONS: tuple[Callable[[TrainConfig], Clash], ...] = (samples_come_from_the_policy, *LOSS_CAUTIONS)
