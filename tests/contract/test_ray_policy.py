"""Networks on Ray keep every promise of `test_policy`: on one rank, and sharded over two."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests import ray_cluster
from tests.contract import test_policy_contract
from tests.contract.test_policy_contract import Load, Networks, make_spec
from treadle.cluster.ray.placement import ActorSlot
from treadle.cluster.ray.ranks import RemoteRanks
from treadle.cluster.ray.single_rank import SingleRank, SingleRankSpec
from treadle.policy.rank import FSDPRank, NetworksSpec
from treadle.policy.rank_calls import ShardedCritic, ShardedPolicy, ShardedReference
from treadle.policy.rank_group import RankGroup


@pytest.fixture(scope="module")
def slot() -> Iterator[ActorSlot]:
    with ray_cluster.ray_here() as nodes, ray_cluster.bundle(nodes[0]) as slot:
        yield slot


def solo(spec: NetworksSpec) -> SingleRankSpec:
    return SingleRankSpec(**{field.name: getattr(spec, field.name) for field in fields(SingleRankSpec)})


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def load(request: pytest.FixtureRequest, slot: ActorSlot, directory: Path) -> Iterator[Load]:
    spec = make_spec(directory)
    alone = request.param == 1
    handles = RemoteRanks.start(
        solo(spec) if alone else spec, [slot] * request.param, launch_timeout_s=180, timeout_s=60
    )
    ranks = RankGroup(handles, 60)

    def load_networks(wanted: NetworksSpec) -> Networks:
        if alone:
            ranks.run("loading", SingleRank.load, solo(wanted))
        else:
            ranks.run("loading", FSDPRank.load, wanted)
        return Networks(ShardedPolicy(ranks), ShardedReference(ranks), ShardedCritic(ranks))

    try:
        yield load_networks
    finally:
        ranks.close()
        ranks.close()  # harmless


directory, networks = test_policy_contract.directory, test_policy_contract.networks
globals().update({name: test for name, test in vars(test_policy_contract).items() if name.startswith("test_")})
