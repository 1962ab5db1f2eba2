"""What the asynchronous recipes add at the top: `rollout`, `async_training`."""

from typing import Any

from treadle.config.legacy.conversion import versions_behind
from treadle.config.legacy.rule import (
    Answer,
    Look,
    Nothing,
    Refused,
    Rules,
    Said,
    fixed,
    ignored,
    kept,
    none,
    nones,
    same,
    to,
    under,
)

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_MARKS = (
    "async_training.staleness_threshold",
    "async_training.trigger_parameter_sync_step",
    "async_training.require_batches",
    "rollout.total_rollout_steps",
)
ELASTIC = "Roles keep their devices: size trainer and rollout by their own GPU counts."


def step_size(look: Look) -> int | None:
    """Tasks that one training step of the fully asynchronous recipe takes."""
    mini, batches = look(MINI_BATCH, 256), look("async_training.require_batches", 1)
    whole = isinstance(mini, int) and isinstance(batches, int)
    return mini * batches if whole else None


def _tasks_per_step(value: Any, look: Look) -> Answer:
    size = step_size(look)
    if size is None:
        return Refused("Give data.train_batch_size, the number of tasks per training step.")
    return Said(size, f"{value} × {look(MINI_BATCH, 256)} tasks")


def _steps(value: Any, look: Look) -> Answer:
    if value is None:
        return Nothing("trainer.total_epochs counts")
    size = step_size(look)
    if size is None or not isinstance(value, int) or value < size:
        return Refused("It counts tasks, and they make no whole training step: give trainer.total_training_steps.")
    return Said(value // size, f"{value} tasks at {size} a step")


def is_recipe(look: Look) -> bool:
    """Whether the keys at hand are those of the fully asynchronous recipe."""
    return any(look(key) is not None for key in _MARKS)


def _samples(value: Any, look: Look) -> Answer:
    if is_recipe(look) and look("actor_rollout_ref.rollout.n") is not None:
        return Nothing("verl reads actor_rollout_ref.rollout.n instead")
    return Said(value)


RULES: Rules = (
    kept("rollout", "nnodes n_gpus_per_node")
    | {"rollout.n": same(_samples)}
    | {"rollout.total_rollout_steps": to("trainer.total_training_steps", convert=_steps)}
    | under(
        "async_training",
        {
            "staleness_threshold": to("trainer.max_staleness", convert=versions_behind),
            "trigger_parameter_sync_step": to("trainer.parameter_sync_steps"),
            "require_batches": to("data.train_batch_size", convert=_tasks_per_step),
            "partial_rollout": to(
                "trainer.on_weight_update",
                convert=lambda value, look: Said("continue" if value else "drop", "what running sessions do"),
            ),
            "use_trainer_do_validate": ignored("validation goes through the rollout in every schedule"),
            "use_dynamic_resource_scheduling": fixed(False, note="roles keep their devices", otherwise=ELASTIC),
            "concurrent_samples_per_replica": none("Give rollout.agent.max_concurrent_sessions, over all replicas."),
        },
    )
    | nones(
        "async_training",
        "dynamic_schedule_policy dynamic_schedule_deactivate_ratio dynamic_schedule_enable_rebalance",
        ELASTIC,
    )
)
