"""What keys of `fsdp_config` change: in how PyTorch FSDP2 cuts a network, as the first of four ranks sees it.

The other ranks are torch's own pretence: what would travel to them does not, so weights are not looked at.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.effects.cases import Case, config_cases, training
from tests.effects.models import tiny_model
from tests.effects.training import BASE
from treadle.cluster.runtime import sharded_spec
from treadle.policy.rank import FSDPRank, RankSpec

SHARDED = {"actor._target_": "treadle.config.FSDPActorConfig", "trainer.processes_per_node": 4}
ALSO = {
    "policy": {},
    "reference": {"ref._target_": "treadle.config.FSDPRefConfig", "actor.use_kl_loss": True},
    "critic": {"critic._target_": "treadle.config.FSDPCriticConfig", "algorithm.adv_estimator": "gae"},
}
"""What a config needs to have each network."""


def cut(name: str) -> Callable[..., Any]:
    """For each part of a network: how many ranks share it, whether it is cut again, what is gathered ahead of it."""

    def observe(directory: Path, **keys: Any) -> Any:
        config = training(BASE, {**SHARDED, **ALSO[name], "model.path": str(tiny_model()), **keys})
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            rank_spec = RankSpec(0, 4, "127.0.0.1", 0, "", "cpu", 60.0)
            rank = FSDPRank(rank_spec, sharded_spec(config, steps=1))
            network: Any = getattr(rank, name)._network
            return [_describe(part) for part in network.module.modules() if isinstance(part, FSDPModule)]
        finally:
            distributed.destroy_process_group()

    return observe


def _describe(part: Any) -> Any:
    state = part._get_fsdp_state()
    meshes = {tuple(parameter.device_mesh.shape) for parameter in part.parameters()}
    group = state._fsdp_param_group
    return sorted(meshes), group.post_forward_mesh_info is not None, len(state._states_to_forward_prefetch)


def rows(section: str, network: str) -> dict[str, Case]:
    return config_cases(
        f"{section}.fsdp_config",
        cut(network),
        *(("fsdp_size", -1, 2), ("reshard_after_forward", True, False), ("forward_prefetch", False, True)),
    )


EFFECTS: dict[str, Case] = {**rows("actor", "policy"), **rows("ref", "reference"), **rows("critic", "critic")}
