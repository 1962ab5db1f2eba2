"""Migration rules of `trainer`, of the asynchronous recipes, and of the sections around training.

`trainer` is split into `trainer`, `checkpoint` and `logging`; with `trainer.v1`, verl's newer schedules. The recipes
add `rollout` and `async_training` at the top. Around training: profilers, queues, distillation, Ray, Hydra, sft.
"""

from typing import Any

from treadle.migrate.rule import (
    Conversion,
    Converted,
    LookUp,
    NotNeeded,
    Refused,
    Rules,
    asked,
    by_table,
    classes,
    fixed,
    frequency,
    ignored,
    kept,
    moved,
    none,
    nones,
    same,
    to,
    under,
    unless_null,
    versions_behind,
)
from treadle.migrate.rules.networks import BACKENDS, CONTENTS, PROFILER
from treadle.migrate.rules.rollout import FINE_TUNING

TRACKERS = ("console", "wandb", "mlflow", "tensorboard")
SHARED_ASYNC = (
    "Asynchronous training needs rollout devices of its own: use sync, or fully_async with rollout.nnodes above 0."
)
HYBRID = "Training devices do not sample for a separate rollout: size trainer and rollout by their own GPU counts."
REPLAY = "Samples are taken in the order they finish: leave it out."

_modes = by_table(
    {
        "sync": "sync",
        "separate_async": Converted("fully_async", "separate_async is written fully_async"),
        "colocate_async": Refused(SHARED_ASYNC),
    },
    "The schedules are sync, one_step_off and fully_async.",
)


def _trackers(value: Any, look: LookUp) -> Conversion:
    names = [value] if isinstance(value, str) else list(value or ())
    unknown = [str(name) for name in names if name not in (*TRACKERS, "file")]
    if unknown:
        return Refused(f"There is no tracker {', '.join(unknown)}: use {', '.join(TRACKERS)}; JSONL is always written.")
    kept_names = [name for name in names if name != "file"]
    return Converted(kept_names, "metrics are always written as JSONL too" if kept_names != names else "")


def _separate(look: LookUp) -> bool:
    return bool(look("trainer.v1.trainer_mode", "sync") == "separate_async")


def _staleness(value: Any, look: LookUp) -> Conversion:
    if not _separate(look):
        return NotNeeded("read by asynchronous schedules only")
    if not isinstance(value, int):
        return Refused("Staleness always has a bound: give trainer.max_staleness.")
    return Converted(value - 1, f"a sample that spans {value} versions is {value - 1} behind")


def _strategy(value: Any, look: LookUp) -> Conversion:
    if not _separate(look):
        return NotNeeded("read by asynchronous schedules only")
    return Converted(value) if value in ("wait", "drop") else Refused("Stale samples wait or are dropped.")


def _device(value: Any, look: LookUp) -> Conversion:
    if value in ("cuda", "gpu", None):
        return NotNeeded("trainer.n_gpus_per_node says how many GPUs; 0 is the CPU")
    if value == "cpu":
        return Converted(0, "0 GPUs is the CPU")
    return Refused("Networks train on CUDA GPUs or on the CPU.")


def _path(value: Any, look: LookUp) -> Conversion:
    if look("trainer.resume_mode", "auto") != "resume_path":
        return NotNeeded("verl reads it only where trainer.resume_mode is resume_path")
    return Converted(value) if isinstance(value, str) else NotNeeded("no path")


JOURNAL = "every trajectory is in the journal of the run directory"

TRAINER_RULES: Rules = (
    kept("trainer", "nnodes n_gpus_per_node total_epochs total_training_steps val_before_train val_only critic_warmup")
    | moved("trainer", "logging", "project_name experiment_name log_val_generations")
    | moved("trainer", "checkpoint", "resume_mode")
    | under(
        "trainer",
        {
            "test_freq": same(frequency),
            "save_freq": to("checkpoint.save_freq", convert=frequency),
            "resume_from_path": to("checkpoint.resume_from_path", convert=_path),
            "max_actor_ckpt_to_keep": to("checkpoint.keep_last"),
            "max_critic_ckpt_to_keep": to("checkpoint.keep_last"),
            "max_ckpt_to_keep": to("checkpoint.keep_last"),
            "default_local_dir": to("logging.run_dir", convert=unless_null("the default run directory")),
            "logger": to("logging.logger", convert=_trackers),
            "rollout_data_dir": ignored(JOURNAL),
            "validation_data_dir": ignored(JOURNAL),
            "device": to("trainer.n_gpus_per_node", convert=_device),
            "balance_batch": fixed(
                True, note="micro batches are packed by tokens", otherwise="Batches are always balanced by tokens."
            ),
            "default_hdfs_dir": fixed(
                None, note="local paths only", otherwise="Give a mounted path as logging.run_dir."
            ),
            "del_local_ckpt_after_load": fixed(
                False, note="checkpoint.keep_last says what stays", otherwise="Use checkpoint.keep_last."
            ),
            "esi_redundant_time": fixed(
                0, note="an interrupted run saves and ends", otherwise="An interrupted run saves: leave it out."
            ),
            "checkpoint_callback_class": fixed(
                None, note="no callback", otherwise="There are no checkpoint callbacks."
            ),
            "ray_wait_register_center_timeout": none("Ray's own timeouts apply: see cluster.ray_init."),
            "use_v1": fixed(True, False, note="there is one trainer; trainer.mode says the schedule"),
            "npu_profile.**": none(PROFILER),
            "profile_interval": none(PROFILER),
            "seed": none(FINE_TUNING),
        },
    )
    | classes("trainer.v1.separate_async", "hybrid_rollout")
    | under(
        "trainer.v1",
        {
            "trainer_mode": to("trainer.mode", convert=_modes),
            "sync": fixed({}, None, note="sync has no options"),
            "colocate_async.num_warmup_batches": none(SHARED_ASYNC),
            "separate_async.num_warmup_batches": none("Sampling runs ahead as far as trainer.max_staleness allows."),
            "separate_async.parameter_sync_step": ignored(
                "weights go out once per data.train_batch_size tasks, which is every step here"
            ),
            "separate_async.hybrid_rollout.enable_switch": fixed(
                False, note="roles keep their devices", otherwise=HYBRID
            ),
            "sampler.max_off_policy_threshold": to("trainer.max_staleness", convert=_staleness),
            "sampler.max_off_policy_strategy": to("trainer.stale_samples", convert=_strategy),
            "sampler.sync_refill_failed_groups": fixed(
                True,
                note="failed groups are sampled again",
                otherwise="Failed groups are sampled again: rollout.failures.",
            ),
            "sampler.custom_sampler.path": fixed(None, note="none", otherwise=REPLAY),
            "sampler.custom_sampler.name": fixed(None, note="none", otherwise=REPLAY),
            "sampler.sampler_kwargs": fixed({}, None, note="none", otherwise=REPLAY),
        },
    )
    | nones(
        "trainer.v1.separate_async.hybrid_rollout",
        "adaptive_switch_threshold switch_cost_window_size switch_threshold_ratio switch_threshold_release_steps"
        " switch_threshold_step_down switch_threshold_step_up",
        HYBRID,
    )
)


MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_MARKS = (
    "async_training.staleness_threshold",
    "async_training.trigger_parameter_sync_step",
    "async_training.require_batches",
    "rollout.total_rollout_steps",
)
ELASTIC = "Roles keep their devices: size trainer and rollout by their own GPU counts."


def step_size(look: LookUp) -> int | None:
    """Tasks that one training step of the fully asynchronous recipe takes."""
    mini, batches = look(MINI_BATCH, 256), look("async_training.require_batches", 1)
    whole = isinstance(mini, int) and isinstance(batches, int)
    return mini * batches if whole else None


def _tasks_per_step(value: Any, look: LookUp) -> Conversion:
    size = step_size(look)
    if size is None:
        return Refused("Give data.train_batch_size, the number of tasks per training step.")
    return Converted(size, f"{value} × {look(MINI_BATCH, 256)} tasks")


def _steps(value: Any, look: LookUp) -> Conversion:
    if value is None:
        return NotNeeded("trainer.total_epochs counts")
    size = step_size(look)
    if size is None or not isinstance(value, int) or value < size:
        return Refused("It counts tasks, and they make no whole training step: give trainer.total_training_steps.")
    return Converted(value // size, f"{value} tasks at {size} a step")


def is_recipe(look: LookUp) -> bool:
    """Whether the keys at hand are those of the fully asynchronous recipe."""
    return any(look(key) is not None for key in _MARKS)


def _samples(value: Any, look: LookUp) -> Conversion:
    if is_recipe(look) and look("actor_rollout_ref.rollout.n") is not None:
        return NotNeeded("verl reads actor_rollout_ref.rollout.n instead")
    return Converted(value)


RECIPE_RULES: Rules = (
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
                convert=lambda value, look: Converted("continue" if value else "drop", "what running sessions do"),
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


QUEUE = "Samples go from rollout to trainer in memory; there is no queue to configure."
DISTILLATION = "A teacher is ref.path, and its weight algorithm.distill_coef: docs/distillation.md."
SKIP = "Rollouts are not skipped from files: a run resumes from its journal."
HYDRA = (
    "There is no Hydra: give several files on the command line, later ones win; logging.run_dir is the run directory."
)
DEFAULTS = (
    "There is no list of defaults: give several files on the command line, later ones win."
    " `treadle config migrate` writes verl's defaults out."
)


def _ray_argument(value: Any, look: LookUp) -> Conversion:
    return NotNeeded("Ray's own choice") if value in (None, {}) else Converted(value)


def _search_path(value: Any, look: LookUp) -> Conversion:
    ours = all("verl/trainer/config" in str(item) or "verl.trainer.config" in str(item) for item in value or ())
    return NotNeeded("the folder of verl's own files") if ours else Refused(HYDRA)


SURROUNDING_RULES: Rules = (
    {
        "defaults": none(DEFAULTS),
        "hydra.searchpath": asked(_search_path),
        "hydra.**": none(HYDRA),
        "model_engine": fixed("dp", note="FSDP2 is the class of a section", otherwise=BACKENDS["megatron"]),
        "engine.**": none(FINE_TUNING),
        "optim.**": none(FINE_TUNING),
        "profiler.**": none(PROFILER),
        "checkpoint.save_contents": none(CONTENTS),
        "checkpoint.load_contents": none(CONTENTS),
    }
    | classes("checkpoint")
    | under(
        "global_profiler",
        {
            "tool": fixed(None, note="no profiler", otherwise=PROFILER),
            "steps": fixed(None, [], note="no profiler", otherwise=PROFILER),
            "**": none(PROFILER),
        },
    )
    | {
        "transfer_queue.enable": fixed(True, False, note="samples go to the trainer in memory"),
        "transfer_queue.**": none(QUEUE),
        "distillation.enabled": fixed(False, note="no distillation", otherwise=DISTILLATION),
        "distillation.**": none(DISTILLATION),
        "skip.rollout.enable": fixed(False, note="no rollout is skipped", otherwise=SKIP),
        "skip.rollout_tq.enable": fixed(False, note="no rollout is skipped", otherwise=SKIP),
        "skip.async_rollout.enable": fixed(False, note="no rollout is skipped", otherwise=SKIP),
        "skip.**": none(SKIP),
        "ray_kwargs.ray_init.**": to("cluster.ray_init.**", convert=_ray_argument),
        "ray_kwargs.timeline_json_file": fixed(
            None, note="no timeline file", otherwise="Every run times its spans: leave it out."
        ),
    }
)
