"""verl's sections around training: profilers, queues, distillation, Ray, Hydra, and fine-tuning's own sections."""

from typing import Any

from treadle.config.legacy.rule import (
    Answer,
    Look,
    Nothing,
    Refused,
    Rules,
    Said,
    asked,
    classes,
    fixed,
    none,
    to,
    under,
)
from treadle.config.legacy.rules.data import FINE_TUNING
from treadle.config.legacy.rules.network import BACKENDS, CONTENTS, PROFILER

QUEUE = "Samples go from rollout to trainer in memory; there is no queue to configure."
DISTILLATION = "There is no distillation section."
SKIP = "Rollouts are not skipped from files: a run resumes from its journal."
HYDRA = (
    "There is no Hydra: give several files on the command line, later ones win; logging.run_dir is the run directory."
)
DEFAULTS = (
    "There is no list of defaults: give several files on the command line, later ones win."
    " `treadle config migrate` writes verl's defaults out."
)


def _ray_argument(value: Any, look: Look) -> Answer:
    return Nothing("Ray's own choice") if value in (None, {}) else Said(value)


def _search_path(value: Any, look: Look) -> Answer:
    ours = all("verl/trainer/config" in str(item) or "verl.trainer.config" in str(item) for item in value or ())
    return Nothing("the folder of verl's own files") if ours else Refused(HYDRA)


RULES: Rules = (
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
