"""Every key of a config changes something: each is set to two values, and what reads it must tell them apart.

A new key needs a case in a module of `tests/effects`: what shows its effect, through the code that uses it, and two
values. `UNPROVEN` has the keys whose effect cannot be shown on any machine, each with the reason. Whole runs, training
steps, sharded networks and what starts processes are tried in `tests/integration/test_config_effects_runs.py`.
"""

from pathlib import Path

import pytest

from tests.effects import (
    classifiers,
    data,
    engines,
    gateway,
    losses,
    prompts,
    reward,
    rollout,
    runs,
    sandbox,
    schedule,
    sft,
    sharding,
    tools,
    training,
)
from tests.effects.cases import Case
from treadle.config import SFTRunConfig
from treadle.config.tree import key_paths

MODULES = (
    classifiers,
    data,
    engines,
    gateway,
    losses,
    prompts,
    reward,
    rollout,
    runs,
    sandbox,
    schedule,
    sft,
    sharding,
    tools,
    training,
)
EFFECTS = {key: case for module in MODULES for key, case in module.EFFECTS.items()}
INTEGRATION = {key for module in (runs, sandbox, sharding, training) for key in module.EFFECTS} | set(
    [
        "reward.cpu_time_s",
        "reward.functions.*.env",
        "reward.functions.*.sandbox",
        "reward.memory_mb",
        "reward.num_workers",
        "rollout.agent.num_workers",
        "rollout.limits.launch_timeout_s",
        "rollout.multi_turn.environment_python",
        "rollout.multi_turn.mcp_servers.*.command",
        "rollout.multi_turn.mcp_servers.*.env",
        "rollout.multi_turn.mcp_servers.*.scope",
        "rollout.multi_turn.mcp_servers.*.startup_timeout_s",
        "rollout.multi_turn.mcp_servers.*.tools",
        "rollout.multi_turn.mcp_servers.*.warm",
    ]
)
"""Keys whose cases train networks or start processes: most of the time that all cases take."""
KEYS = {".".join(path) for path in key_paths(SFTRunConfig)}
UNPROVEN = {
    "a GPU: where parameters are on the CPU already, nothing is moved there": """
        actor.fsdp_config.offload_policy actor.fsdp_config.optimizer_offload actor.fsdp_config.param_offload
        critic.fsdp_config.offload_policy critic.fsdp_config.optimizer_offload critic.fsdp_config.param_offload
        ref.fsdp_config.offload_policy ref.fsdp_config.optimizer_offload ref.fsdp_config.param_offload
    """,
    "a Ray cluster; tests/integration/test_ray_*.py start one": """
        cluster.address cluster.ray_init
    """,
    "processes that load torch, seconds each: tests/integration/test_reward_model.py, test_policy_rank_group.py": """
        reward.classifiers.*.memory_mb trainer.rank_timeout_s
    """,
}
"""The reason, and the keys it holds for."""


def observe(case: Case, directory: Path, keys: str) -> str:
    """What is seen with these keys; in words that do not have the directory."""
    directory.mkdir()
    return repr(case.observe(directory, **getattr(case, keys))).replace(str(directory), "")


def check_effect(key: str, directory: Path) -> None:
    case = EFFECTS[key]
    one = observe(case, directory / "first", "one")
    assert one == observe(case, directory / "again", "one"), "the same value must give the same"
    assert one != observe(case, directory / "other", "other"), f"{key} changes nothing"


@pytest.mark.parametrize("key", sorted(EFFECTS.keys() - INTEGRATION))
def test_another_value_gives_another_result(key, tmp_path):
    check_effect(key, tmp_path)


def test_every_key_is_proven_or_has_a_reason_not_to_be():
    unproven = [key for keys in UNPROVEN.values() for key in keys.split()]
    assert sum(len(module.EFFECTS) for module in MODULES) == len(EFFECTS), "a key has two cases"
    assert len(unproven) == len(set(unproven)), "a key has two reasons"
    assert KEYS - EFFECTS.keys() - set(unproven) == set(), "new keys: show their effect"
    assert EFFECTS.keys() - KEYS == set(), "no such keys"
    assert INTEGRATION - EFFECTS.keys() == set(), "strike them out of INTEGRATION"
    assert not set(unproven) & EFFECTS.keys() and not set(unproven) - KEYS, "strike them out of UNPROVEN"
