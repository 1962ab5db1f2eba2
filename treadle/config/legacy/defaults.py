"""What verl assumes where a script says nothing, wherever we assume something else.

A launch script relies on these without naming them, so a migrated config names them. Keys are ours, values are written
as ours. Keys on which the two agree are not here; neither are keys that nothing reads in the run at hand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.config.legacy.interpolation import MISSING


class View(Protocol):
    """The migrated config so far: the value of a key, or `default` if it is not there."""

    def __call__(self, key: str, default: Any = None) -> Any: ...


def _always(view: View) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Default:
    """A key, the value verl assumes (or how it follows from others), and when that matters."""

    key: str
    value: Any
    when: Callable[[View], bool] = _always


def _trains_critic(view: View) -> bool:
    return bool(view("algorithm.adv_estimator", "gae") == "gae")


def _reads_reference(view: View) -> bool:
    return view("actor.use_kl_loss") is True or view("algorithm.use_kl_in_reward") is True


def _has_kl_loss(view: View) -> bool:
    return view("actor.use_kl_loss") is True


def _calls_tools(view: View) -> bool:
    return bool(view("rollout.agent.default_agent_loop", "single_turn_agent") != "single_turn_agent")


def _clips_otherwise(view: View) -> bool:
    return bool(view("actor.clip_ratio", 0.2) != 0.2)


def _has_own_nodes(view: View) -> bool:
    return view("rollout.nnodes", 0) not in (0, None)


def _shares_devices(view: View) -> bool:
    return not _has_own_nodes(view)


def _follows_actor(key: str, needed: Callable[[View], bool]) -> Callable[[View], bool]:
    return lambda view: needed(view) and view(key) is not None


ALWAYS: tuple[Default, ...] = (
    Default("model.path", "~/models/deepseek-llm-7b-chat"),
    Default("data.train_files", ["~/data/rlhf/gsm8k/train.parquet"]),
    Default("data.val_files", ["~/data/rlhf/gsm8k/test.parquet"]),
    Default("data.train_batch_size", 1024),
    Default("rollout.tensor_model_parallel_size", 2),
    Default("rollout.dtype", "bfloat16"),
    Default("rollout.free_cache_engine", True, _shares_devices),
    Default("rollout.agent.num_workers", 8),
    Default("rollout.multi_turn.max_parallel_calls", 1, _calls_tools),
    Default("rollout.multi_turn.max_tool_response_length", 256, _calls_tools),
    Default("rollout.n_gpus_per_node", "${trainer.n_gpus_per_node}", _has_own_nodes),
    Default("reward.num_workers", 8),
    Default("logging.project_name", "verl_examples"),
    Default("logging.experiment_name", "gsm8k"),
    Default("logging.run_dir", "checkpoints/${logging.project_name}/${logging.experiment_name}"),
    Default("logging.logger", ["console", "wandb"]),
    Default("cluster.backend", "ray"),
    Default("actor._target_", "treadle.config.FSDPActorConfig"),
    Default("actor.ppo_mini_batch_size", 256),
    Default("actor.clip_ratio_low", 0.2, _clips_otherwise),
    Default("actor.clip_ratio_high", 0.2, _clips_otherwise),
    Default("actor.kl_loss_type", "k3", _has_kl_loss),
    Default("ref._target_", "treadle.config.FSDPRefConfig", _reads_reference),
    Default(
        "ref.log_prob_max_token_len_per_gpu",
        "${actor.ppo_max_token_len_per_gpu}",
        _follows_actor("actor.ppo_max_token_len_per_gpu", _reads_reference),
    ),
    Default("critic._target_", "treadle.config.FSDPCriticConfig", _trains_critic),
    Default("critic.path", "~/models/deepseek-llm-7b-chat", _trains_critic),
    Default("critic.loss_agg_mode", "${actor.loss_agg_mode}", _follows_actor("actor.loss_agg_mode", _trains_critic)),
    Default("algorithm.adv_estimator", "gae"),
    Default("trainer.mode", "sync"),
    Default("trainer.n_gpus_per_node", 8),
    Default("trainer.total_epochs", 30),
    Default("checkpoint.keep_last", None),
)

_OWN_ROLLOUT: tuple[Default, ...] = (
    Default("rollout.nnodes", 1),
    Default("rollout.n_gpus_per_node", 8),
    Default("algorithm.rollout_correction.rollout_is", "none"),
    Default("algorithm.rollout_correction.bypass_mode", True),
)

ONE_STEP_OFF: tuple[Default, ...] = _OWN_ROLLOUT


def _step(view: View) -> Any:
    return view("actor.ppo_mini_batch_size", 256)


def _steps(view: View) -> Any:
    return 100 // view("data.train_batch_size", _step(view))


def _makes_a_step(view: View) -> bool:
    size = view("data.train_batch_size", _step(view))
    return isinstance(size, int) and 1 <= size <= 100


FULLY_ASYNC: tuple[Default, ...] = (
    *_OWN_ROLLOUT,
    Default("data.train_batch_size", _step),
    Default("trainer.total_training_steps", _steps, _makes_a_step),
    Default("trainer.parameter_sync_steps", 4),
    Default("trainer.max_staleness", 3),
)

SEPARATE_ASYNC: tuple[Default, ...] = (
    Default("algorithm.rollout_correction.rollout_is", "none"),
    Default("trainer.max_staleness", 7),
    Default("trainer.stale_samples", "drop"),
)
"""verl's newer trainer in its separate_async mode, which has no recipe of its own."""

BY_RECIPE = {
    "main_ppo": ALWAYS,
    "separate_async": (*SEPARATE_ASYNC, *ALWAYS),
    "one_step_off": (*ONE_STEP_OFF, *ALWAYS),
    "fully_async": (*FULLY_ASYNC, *ALWAYS),
}
"""What is assumed, by entry point. A recipe's own assumptions come first, and the first one counts."""

_PLAIN = {item.key: item.value for item in ALWAYS if item.when is _always}


def verl_default(key: str) -> Any:
    """What verl assumes for a key of ours, where that differs from our own default; else MISSING."""
    return _PLAIN.get(key, MISSING)
