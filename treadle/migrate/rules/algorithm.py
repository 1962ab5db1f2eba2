"""Migration rules of `algorithm`, `critic` and `reward`: the same sections here, with some values spelled otherwise.

Also the older spellings `reward_model`, `custom_reward_function` and `sandbox_fusion`.
"""

from typing import Any

from treadle.migrate.rule import (
    Conversion,
    Convert,
    Converted,
    LookUp,
    NotNeeded,
    Refused,
    Rule,
    Rules,
    aggregation,
    asked,
    by_table,
    classes,
    dtype,
    equal_to,
    fixed,
    ignored,
    kept,
    kl_in_reward,
    none,
    same,
    section_class,
    sequences_to_tokens,
    to,
    token_budget,
    under,
    unless_null,
)
from treadle.migrate.rules.networks import (
    ACTOR,
    GLOBAL_MICRO_BATCH,
    PROFILER,
    TOKENS,
    ULYSSES,
    backends,
    contents,
    critic_model,
    optimizer,
    sharding,
)

CORRECTION = "algorithm.rollout_correction"
ESTIMATORS = "gae grpo dr_grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline remax opo optimal_token_baseline"
PREFERENCE = "There is no preference feedback PPO."

_estimators = by_table(
    {name: name for name in ESTIMATORS.split()}
    | {
        "grpo_vectorized": Converted("grpo", "grpo_vectorized computes what grpo does"),
        "rloo_vectorized": Converted("rloo", "rloo_vectorized computes what rloo does"),
        "optimal_token_baseline": Converted(
            "optimal_token_baseline",
            "samples are compared at the same number of sampled tokens; importance weights do not enter the baseline",
        ),
        "tir_optimal_token_baseline": Converted(
            "optimal_token_baseline",
            "the same, but for what only the longest sample has: it keeps its reward there, and verl's has advantage 0",
        ),
    },
    f"There is {ESTIMATORS.replace(' ', ', ')}; any other is named by import path, as package.module:function.",
)
_levels = by_table(
    {None: Converted("none", "null is written none"), "none": "none", "token": "token", "sequence": "sequence"},
    "Importance weights are per token or per sequence, or none.",
)
_rejections = by_table(
    {
        None: Converted("none", "null is written none"),
        "none": "none",
        "token": "token",
        "sequence": "sequence",
        "geometric": "geometric",
        "token_k1": Converted("token", "token_k1 is written token"),
        "seq_sum_k1": Converted("sequence", "seq_sum_k1 is written sequence"),
        "seq_mean_k1": Converted("geometric", "seq_mean_k1 is written geometric"),
    },
    "Rejection looks at one ratio, per token, sequence or geometric mean: token_k1, seq_sum_k1 or seq_mean_k1.",
)


def _upper_bound(value: Any, look: LookUp) -> Conversion:
    number = _number(value)
    if number is None:
        return Refused("Importance weights have an upper bound only; a lower one is rejection: use rollout_rs.")
    return Converted(number)


def _both_bounds(value: Any, look: LookUp) -> Conversion:
    if value is None:
        return NotNeeded("not given")
    lower, _, upper = str(value).rpartition("_")
    bounds = [_number(text) for text in (lower, upper) if text]
    if any(item is None for item in bounds):
        return Refused("One bound or two are needed, as 2.0 or 0.5_2.0.")
    also = {f"{CORRECTION}.rollout_rs_threshold_lower": bounds[0]} if lower else {}
    return Converted(bounds[-1], "both bounds have a key of their own" if lower else "", also)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _filter_metric(value: Any, look: LookUp) -> Conversion:
    if value in (None, "reward"):
        return Converted("reward") if value else NotNeeded("the reward, as by default")
    if value in ("score", "seq_reward", "seq_final_reward"):
        return Converted("reward", f"{value} is written reward")
    if look("algorithm.filter_groups.enable", False) is not True:
        return NotNeeded("verl does not read it while filter_groups.enable is false")
    return Refused("Groups are filtered by reward or by one reward function: name that function.")


def _bounded(value: Any, look: LookUp) -> Conversion:
    if isinstance(value, int) and value >= 1:
        return Converted(value)
    if look("algorithm.filter_groups.enable", False) is not True:
        return NotNeeded("verl does not read it while filter_groups.enable is false")
    return Refused("Sampling again always has a bound: give the number of batches, or leave it out for 10.")


ALGORITHM_RULES: Rules = (
    kept("algorithm", "gamma lam norm_adv_by_std_in_grpo use_kl_in_reward filter_groups.enable")
    | kept("algorithm.kl_ctrl", "type kl_coef horizon target_kl")
    | kept(CORRECTION, "bypass_mode")
    | classes("algorithm", ". filter_groups kl_ctrl")
    | under(
        "algorithm",
        {
            "adv_estimator": same(_estimators),
            "kl_penalty": same(kl_in_reward),
            "filter_groups.metric": same(_filter_metric),
            "filter_groups.max_num_gen_batches": same(_bounded),
            "filter_groups.max_inflight_gen_batches": fixed(1, note="groups are replaced as they are found wanting"),
            "use_pf_ppo": fixed(False, note="no preference feedback", otherwise=PREFERENCE),
            "pf_ppo.**": none(PREFERENCE),
        },
    )
    | under(
        CORRECTION,
        {
            "rollout_is": same(_levels),
            "rollout_is_threshold": same(_upper_bound),
            "rollout_rs": same(_rejections),
            "rollout_rs_threshold": same(_both_bounds),
            "loss_type": fixed("ppo_clip", note="the loss is actor.policy_loss", otherwise="Use actor.policy_loss."),
            "rollout_is_batch_normalize": fixed(
                False, note="weights are used as they are", otherwise="Importance weights are never normalised."
            ),
        },
    )
)


CRITIC_DYNAMIC = "critic.use_dynamic_bsz"
_FORWARD = "values are computed in micro batches of critic.ppo_max_token_len_per_gpu"


def _follows_estimator(value: Any, look: LookUp) -> Conversion:
    wanted = look("algorithm.adv_estimator", "gae") == "gae"
    if value is None or value == wanted:
        return NotNeeded("a critic is built exactly when algorithm.adv_estimator reads one")
    return Refused("A critic is built exactly when algorithm.adv_estimator reads one (gae): leave it out.")


def _as_the_actor(name: str, default: Any) -> Rule:
    note = "the critic takes the actor's"
    otherwise = f"The critic takes the actor's: give actor.{name} alone."
    return asked(equal_to(f"{ACTOR}.{name}", note, otherwise, default))


CRITIC_RULES: Rules = (
    kept("critic", "cliprange_value grad_clip")
    | optimizer("critic.optim", "critic")
    | sharding("critic.fsdp", "critic", "Critic", to("critic.model_dtype", convert=dtype))
    | contents("critic.checkpoint")
    | backends("critic")
    | critic_model()
    | under(
        "critic",
        {
            "_target_": same(section_class("Critic")),
            "strategy": to("critic._target_", convert=section_class("Critic")),
            "enable": asked(_follows_estimator),
            "rollout_n": to("rollout.n"),
            "ppo_mini_batch_size": same(unless_null("null is the actor's")),
            "ppo_epochs": same(unless_null("null is the actor's")),
            "loss_agg_mode": same(aggregation),
            "loss_scale_factor": _as_the_actor("loss_scale_factor", None),
            "shuffle": _as_the_actor("shuffle", False),
            "data_loader_seed": _as_the_actor("data_loader_seed", 42),
            "ppo_max_token_len_per_gpu": same(token_budget(CRITIC_DYNAMIC, "critic.ppo_micro_batch_size_per_gpu")),
            "ppo_micro_batch_size_per_gpu": to(
                "critic.ppo_max_token_len_per_gpu", convert=sequences_to_tokens(CRITIC_DYNAMIC)
            ),
            "ppo_micro_batch_size": fixed(None, note="not given", otherwise=GLOBAL_MICRO_BATCH),
            "use_dynamic_bsz": fixed(True, False, note=TOKENS),
            "forward_max_token_len_per_gpu": ignored(_FORWARD),
            "forward_micro_batch_size": ignored(_FORWARD),
            "forward_micro_batch_size_per_gpu": ignored(_FORWARD),
            "ulysses_sequence_parallel_size": fixed(1, note="no sequence parallelism", otherwise=ULYSSES),
            "nccl_timeout": none("Collectives may take as long as trainer.rank_timeout_s."),
            "profiler.**": none(PROFILER),
        },
    )
)


REWARD_MODEL = "A reward model is reward.classifiers.NAME or reward.judges.NAME here, with keys of its own."
NO_MODEL_NAMED = (
    "Name its model, for a classifier; or write a judge in reward.judges, or a reward function that asks it."
)
ASKS_ITSELF = "A reward function that asks verl's model has no address to ask here: write a judge in reward.judges."
ONE_DEVICE = "A classifier computes on one device: serve a larger one, and give reward.classifiers.NAME.endpoint."
SANDBOX = "Reward functions run in killable processes of their own: reward.cpu_time_s, memory_mb and timeout_s."
MANAGER = "There is one reward loop: list the functions in reward.functions; their scores are summed by weight."
OVERLONG = (
    "Add the reward function soft_overlong: kwargs.max_length is the response length, kwargs.buffer the buffer's len, "
    "weight its penalty_factor."
)
FUNCTION = "reward.functions.custom.path"

CLASSIFIER = "reward.classifiers.reward_model"
_FUNCTIONS = ("reward.custom_reward_function.path", "custom_reward_function.path")

_managers = by_table(
    {
        None: NotNeeded("not given"),
        "naive": NotNeeded("every trajectory is scored on its own, as it ends"),
        "batch": NotNeeded("every trajectory is scored on its own, as it ends"),
        "dapo": NotNeeded("without an overlong penalty, dapo scores as naive does"),
        "rate_limited": NotNeeded("reward.rate_limit_per_s holds over all workers"),
    },
    MANAGER,
)


def _function(name: str) -> Any:
    """verl names a file and a function; here both are one import path."""

    def convert(value: Any, look: LookUp) -> Conversion:
        if value is None:
            return NotNeeded("no reward function of your own")
        file = str(value)
        if file.startswith("pkg://"):
            file = file.removeprefix("pkg://").removesuffix(".py").replace("/", ".")
        elif not file.endswith(".py"):
            return Refused(f"A function is named as file.py:function or package.module:function: give {FUNCTION}.")
        path = f"{file}:{look(name) or 'compute_score'}"
        return Converted(path, "called with the parameters it names, verl's included")

    return convert


def _functions(old: str) -> Rules:
    name = f"{old}.name"
    return {
        f"{old}.path": to(FUNCTION, convert=_function(name)),
        name: asked(lambda value, look: NotNeeded(f"part of {FUNCTION}")),
        f"{old}.reward_kwargs.**": to("reward.functions.custom.kwargs.**"),
    }


def _sandbox(old: str) -> Rules:
    return {
        f"{old}.url": fixed(None, note="functions run in processes of their own", otherwise=SANDBOX),
        f"{old}.max_concurrent": fixed(None, note="not given", otherwise=SANDBOX),
        f"{old}.memory_limit_mb": fixed(None, note="not given", otherwise=SANDBOX),
    }


def _reward_model(old: str, path: str) -> Rules:
    """verl's reward model: without a function of the user's it is a classifier over the conversation, on a GPU."""

    def enable(value: Any, look: LookUp) -> Conversion:
        if not value:
            return NotNeeded("no reward model")
        if any(look(name) for name in _FUNCTIONS):
            return Refused(ASKS_ITSELF)
        return NotNeeded(f"its score is {CLASSIFIER}") if look(f"{old}.{path}") else Refused(NO_MODEL_NAMED)

    def enabled(convert: Convert) -> Convert:
        def only_then(value: Any, look: LookUp) -> Conversion:
            asked_for = value is not None and look(f"{old}.enable", False)
            return convert(value, look) if asked_for else NotNeeded("no reward model")

        return only_then

    def one_device(value: Any, look: LookUp) -> Conversion:
        return NotNeeded("one device") if value in (0, 1) else Refused(ONE_DEVICE)

    placement = by_table({True: "process", False: "thread"}, REWARD_MODEL)
    on_gpu = {f"{CLASSIFIER}.device": "cuda"}
    length = "a classifier writes nothing; its text may have max_length tokens"
    return under(
        old,
        {
            "enable": asked(enable),
            path: to(f"{CLASSIFIER}.path", convert=enabled(lambda value, look: Converted(value, also=on_gpu))),
            "enable_resource_pool": to(f"{CLASSIFIER}.placement", convert=enabled(placement)),
            "n_gpus_per_node": asked(enabled(one_device)),
            "nnodes": asked(enabled(one_device)),
            "rollout.name": asked(enabled(lambda value, look: NotNeeded("treadle computes classifiers itself"))),
            "rollout.dtype": to(f"{CLASSIFIER}.dtype", convert=enabled(lambda value, look: Converted(value))),
            "rollout.gpu_memory_utilization": to(
                f"{CLASSIFIER}.gpu_memory_utilization", convert=enabled(lambda value, look: Converted(value))
            ),
            "rollout.max_model_len": to(
                f"{CLASSIFIER}.max_length", convert=enabled(lambda value, look: Converted(value))
            ),
            "rollout.prompt_length": asked(enabled(lambda value, look: NotNeeded(length))),
            "rollout.response_length": asked(enabled(lambda value, look: NotNeeded(length))),
            "rollout.tensor_model_parallel_size": asked(enabled(one_device)),
            "rollout.**": asked(enabled(lambda value, look: Refused(REWARD_MODEL))),
        },
    )


REWARD_RULES: Rules = (
    kept("reward", "num_workers")
    | classes("reward", ". reward_manager reward_manager.module sandbox_fusion reward_model reward_model.rollout")
    | _functions("reward.custom_reward_function")
    | _functions("custom_reward_function")
    | _sandbox("reward.sandbox_fusion")
    | _sandbox("sandbox_fusion")
    | _reward_model("reward.reward_model", "model_path")
    | _reward_model("reward_model", "model.path")
    | under(
        "reward",
        {
            "reward_manager.name": asked(_managers),
            "reward_manager.source": fixed("register", note="one reward loop", otherwise=MANAGER),
            "reward_manager.module.**": none(MANAGER),
        },
    )
    | under(
        "reward_model",
        {
            "num_workers": to("reward.num_workers", convert=unless_null("not given")),
            "reward_manager": asked(_managers),
            "reward_loop_source": fixed(None, "register", note="one reward loop", otherwise=MANAGER),
            "reward_loop_module_path": fixed(None, note="one reward loop", otherwise=MANAGER),
            "reward_loop_class_name": fixed(None, note="one reward loop", otherwise=MANAGER),
            "model.trust_remote_code": fixed(None, False, note="not trusted", otherwise=REWARD_MODEL),
            "model.external_lib": fixed(None, note="not given", otherwise=REWARD_MODEL),
        },
    )
)


def per_minute(value: Any, look: LookUp) -> Conversion:
    """A rate in scores per minute."""
    if value is None:
        return NotNeeded("no limit")
    if not isinstance(value, int | float):
        return Refused("A rate is a number.")
    return Converted(value / 60, f"{value} a minute")
