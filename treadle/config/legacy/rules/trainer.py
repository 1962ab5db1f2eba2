"""`trainer`: split into `trainer`, `checkpoint` and `logging`. With `trainer.v1`, verl's newer schedules."""

from typing import Any

from treadle.config.legacy.conversion import frequency, unless_null, words
from treadle.config.legacy.rule import (
    Answer,
    Look,
    Nothing,
    Refused,
    Rules,
    Said,
    classes,
    fixed,
    ignored,
    kept,
    moved,
    none,
    nones,
    same,
    to,
    under,
)
from treadle.config.legacy.rules.data import FINE_TUNING
from treadle.config.legacy.rules.network import PROFILER

TRACKERS = ("console", "wandb", "mlflow", "tensorboard")
SHARED_ASYNC = (
    "Asynchronous training needs rollout devices of its own: use sync, or fully_async with rollout.nnodes above 0."
)
HYBRID = "Training devices do not sample for a separate rollout: size trainer and rollout by their own GPU counts."
REPLAY = "Samples are taken in the order they finish: leave it out."

_modes = words(
    {
        "sync": "sync",
        "separate_async": Said("fully_async", "separate_async is written fully_async"),
        "colocate_async": Refused(SHARED_ASYNC),
    },
    "The schedules are sync, one_step_off and fully_async.",
)


def _trackers(value: Any, look: Look) -> Answer:
    names = [value] if isinstance(value, str) else list(value or ())
    unknown = [str(name) for name in names if name not in (*TRACKERS, "file")]
    if unknown:
        return Refused(f"There is no tracker {', '.join(unknown)}: use {', '.join(TRACKERS)}; JSONL is always written.")
    kept_names = [name for name in names if name != "file"]
    return Said(kept_names, "metrics are always written as JSONL too" if kept_names != names else "")


def _separate(look: Look) -> bool:
    return bool(look("trainer.v1.trainer_mode", "sync") == "separate_async")


def _staleness(value: Any, look: Look) -> Answer:
    if not _separate(look):
        return Nothing("read by asynchronous schedules only")
    if not isinstance(value, int):
        return Refused("Staleness always has a bound: give trainer.max_staleness.")
    return Said(value - 1, f"a sample that spans {value} versions is {value - 1} behind")


def _strategy(value: Any, look: Look) -> Answer:
    if not _separate(look):
        return Nothing("read by asynchronous schedules only")
    return Said(value) if value in ("wait", "drop") else Refused("Stale samples wait or are dropped.")


def _device(value: Any, look: Look) -> Answer:
    if value in ("cuda", "gpu", None):
        return Nothing("trainer.n_gpus_per_node says how many GPUs; 0 is the CPU")
    if value == "cpu":
        return Said(0, "0 GPUs is the CPU")
    return Refused("Networks train on CUDA GPUs or on the CPU.")


def _path(value: Any, look: Look) -> Answer:
    if look("trainer.resume_mode", "auto") != "resume_path":
        return Nothing("verl reads it only where trainer.resume_mode is resume_path")
    return Said(value) if isinstance(value, str) else Nothing("no path")


JOURNAL = "every trajectory is in the journal of the run directory"

RULES: Rules = (
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
