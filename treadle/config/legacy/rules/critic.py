"""`critic`: the same section here, with fewer copies of what the actor says."""

from typing import Any

from treadle.config.legacy.conversion import (
    aggregation,
    equal_to,
    number_format,
    section_class,
    sequences_to_tokens,
    token_budget,
    unless_null,
)
from treadle.config.legacy.rule import (
    Answer,
    Look,
    Nothing,
    Refused,
    Rule,
    Rules,
    asked,
    fixed,
    ignored,
    kept,
    none,
    same,
    to,
    under,
)
from treadle.config.legacy.rules.actor import ACTOR, GLOBAL_MICRO_BATCH, TOKENS
from treadle.config.legacy.rules.model import critic_model
from treadle.config.legacy.rules.network import PROFILER, ULYSSES, backends, contents, optimizer, sharding

DYNAMIC = "critic.use_dynamic_bsz"
_FORWARD = "values are computed in micro batches of critic.ppo_max_token_len_per_gpu"


def _follows_estimator(value: Any, look: Look) -> Answer:
    wanted = look("algorithm.adv_estimator", "gae") == "gae"
    if value is None or value == wanted:
        return Nothing("a critic is built exactly when algorithm.adv_estimator reads one")
    return Refused("A critic is built exactly when algorithm.adv_estimator reads one (gae): leave it out.")


def _as_the_actor(name: str, default: Any) -> Rule:
    note = "the critic takes the actor's"
    otherwise = f"The critic takes the actor's: give actor.{name} alone."
    return asked(equal_to(f"{ACTOR}.{name}", note, otherwise, default))


RULES: Rules = (
    kept("critic", "cliprange_value grad_clip")
    | optimizer("critic.optim", "critic")
    | sharding("critic.fsdp", "critic", "Critic", to("critic.model_dtype", convert=number_format))
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
            "ppo_max_token_len_per_gpu": same(token_budget(DYNAMIC, "critic.ppo_micro_batch_size_per_gpu")),
            "ppo_micro_batch_size_per_gpu": to(
                "critic.ppo_max_token_len_per_gpu", convert=sequences_to_tokens(DYNAMIC)
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
