"""verl's classes in `_target_` of sections that are spelled as ours: the flat shape that verl configs grow towards."""

from treadle.config.legacy.conversion import section_class
from treadle.config.legacy.rule import Rules, classes, same
from treadle.config.legacy.rules.rollout import ALWAYS_ASYNC

RULES: Rules = {
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
