"""From a plan to bundles on unequal nodes: actors where it says, and refusals that name what is missing."""

import asyncio
import os
import time

import pytest

pytest.importorskip("ray")

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from tests import ray_cluster
from tests.configs import training_config
from treadle.cluster.ray.actor import ActorEnvironment
from treadle.cluster.ray.connection import find_nodes
from treadle.cluster.ray.placement import Reservation
from treadle.config.plan import make_plan
from treadle.errors import DeadlineError


@pytest.fixture(scope="module")
def unequal():
    """A head with three CPUs and no GPU, a node with four GPUs, a node with two."""
    shapes = {"num_cpus": 3}, {"num_cpus": 2, "num_gpus": 4}, {"num_cpus": 1, "num_gpus": 2}
    with ray_cluster.ray_cluster(*shapes) as cluster:
        yield cluster


def machines(nodes):
    return [node.machine for node in nodes]


async def reserved(plan, nodes, body):
    """Run `body` on a reservation that is given back."""
    reservation = await Reservation.reserve(plan, nodes, timeout_s=60)
    try:
        await body(reservation)
    finally:
        reservation.release()


def ask_witnesses(slots):
    """What actors in these slots say: where they run, and which GPUs they see."""

    class Witness:  # inside, so that Ray sends its code along
        def __init__(self, surroundings) -> None:
            surroundings.settle()

        def tell(self):
            return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

    actors = [ray.remote(Witness).options(**slot.options()).remote(ActorEnvironment.here(slot.gpus)) for slot in slots]
    return ray.get([actor.tell.remote() for actor in actors], timeout=60)


def test_actors_sit_where_the_plan_says_on_unequal_nodes(unequal):
    nodes = find_nodes()
    by_name = {node.machine.name: node for node in nodes}
    config = training_config(
        "trainer.n_gpus_per_node=4", "rollout.nnodes=1", "rollout.n_gpus_per_node=2", "trainer.mode=one_step_off",
        "rollout.name=vllm", "rollout.tensor_model_parallel_size=2", "actor._target_=treadle.config.FSDPActorConfig",
        "algorithm.rollout_correction.rollout_is=token",
    )  # fmt: skip
    plan = make_plan(config, machines(nodes))

    async def main(reservation) -> None:
        trainer, sampler = plan.nodes("trainer")[0], plan.nodes("rollout")[0]
        ranks, replicas = reservation.rank_slots(), reservation.replica_slots()
        assert [slot.gpus for slot in ranks] == [("0",), ("1",), ("2",), ("3",)]
        assert [slot.gpus for slot in replicas] == [("0", "1")], "one engine over both GPUs"
        told = await asyncio.to_thread(ask_witnesses, (*ranks[:2], *replicas))
        train_id, sample_id = by_name[trainer.machine].id, by_name[sampler.machine].id
        assert told == [(train_id, "0"), (train_id, "1"), (sample_id, "0,1")]

    asyncio.run(reserved(plan, nodes, main))


def test_colocated_engines_share_the_bundle_of_the_ranks(unequal):
    nodes = find_nodes()
    plan = make_plan(training_config(*RAY_RANKS, "trainer.n_gpus_per_node=2", "trainer.nnodes=2"), machines(nodes))

    async def main(reservation) -> None:
        assert plan.shares_devices
        assert [str(slot) for slot in reservation.rank_slots()] == [str(slot) for slot in reservation.replica_slots()]
        assert len({slot.node.id for slot in reservation.rank_slots()}) == 2

    asyncio.run(reserved(plan, nodes, main))


RAY_RANKS = ("cluster.backend=ray", "actor._target_=treadle.config.FSDPActorConfig")
BESIDE = (
    "trainer.mode=fully_async", "rollout.nnodes=1", "algorithm.rollout_correction.rollout_is=token",
    "trainer.test_freq=5", "cluster.backend=ray",
)  # fmt: skip


def test_validation_has_a_gpu_that_nobody_uses_and_does_without_where_others_took_it(unequal, caplog):
    nodes = find_nodes()
    config = training_config(*BESIDE, "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=1",
                             "actor._target_=treadle.config.FSDPActorConfig")  # fmt: skip
    plan = make_plan(config, machines(nodes))
    assert plan.validation is not None and plan.validation.gpus == (1,)

    async def main(reservation) -> None:
        (replica,) = reservation.replica_slots()
        slot = await reservation.validation_slot(timeout_s=60)
        assert slot.node == replica.node and {*slot.gpus, *replica.gpus} == {"0", "1"}
        assert await reservation.validation_slot(timeout_s=0.5) is None, "there is no other"
        assert "validation shares the engines, and the next push of weights waits for it: " in caplog.text

    asyncio.run(reserved(plan, nodes, main))


def test_validation_without_gpus_sits_with_the_engines_and_is_counted_among_them(unequal):
    nodes = find_nodes()
    plan = make_plan(training_config(*BESIDE), machines(nodes))

    async def main(reservation) -> None:
        (replica,), (rank,) = reservation.replica_slots(), reservation.rank_slots()
        slot = await reservation.validation_slot(timeout_s=0)
        assert (slot.node, slot.bundle, slot.sharers) == (replica.node, replica.bundle, 2)
        assert rank.node != replica.node and replica.sharers == 2

    asyncio.run(reserved(plan, nodes, main))


JUDGED = """
model: {path: somewhere}
data: {train_files: [tasks.jsonl], train_batch_size: 64}
rollout: {n: 8}
reward:
  classifiers: {helpful: {path: there, device: cuda}, harmless: {path: there, device: cuda}}
trainer: {}
cluster: {backend: ray}
"""


@pytest.mark.parametrize("trained", [4, 2, 1])
def test_the_scorer_sits_with_the_gpus_of_its_reward_models(unequal, trained):
    nodes = find_nodes()
    config = training_config(
        f"trainer.n_gpus_per_node={trained}", "actor._target_=treadle.config.FSDPActorConfig", text=JUDGED
    )
    plan = make_plan(config, machines(nodes))

    async def main(reservation) -> None:
        slot, held = reservation.scorer_slot(3), reservation.reward_gpus()
        assert slot.node.machine.name == plan.rewards.placement.machine
        assert [gpu.name for gpus in held.values() for gpu in gpus] == list(slot.gpus)
        assert [gpu.number for gpus in held.values() for gpu in gpus] == [0, 1]
        ranks = {(rank.node.id, gpu) for rank in reservation.rank_slots() for gpu in rank.gpus}
        assert not ranks & {(slot.node.id, gpu) for gpu in slot.gpus}, "nobody else has them"
        told = await asyncio.to_thread(ask_witnesses, [slot])
        assert told == [(slot.node.id, ",".join(slot.gpus))]

    asyncio.run(reserved(plan, nodes, main))


def test_reward_models_share_the_engines_gpus_where_no_other_is_left(unequal):
    nodes = find_nodes()
    words = [*RAY_RANKS, "trainer.n_gpus_per_node=2", "trainer.nnodes=3"]
    plan = make_plan(training_config(*words, "rollout.n=9", text=JUDGED), machines(nodes))
    assert plan.rewards is not None and plan.rewards.shared_with == "trainer + rollout"

    async def main(reservation) -> None:
        slot = reservation.scorer_slot(0)
        assert [(slot.node.id, gpu) for gpu in slot.gpus] == [
            (rank.node.id, gpu) for rank in reservation.rank_slots()[:2] for gpu in rank.gpus
        ]

    asyncio.run(reserved(plan, nodes, main))


def test_a_place_that_others_hold_is_refused_in_time_and_by_name(unequal):
    nodes = find_nodes()
    taken = placement_group([{"GPU": 3.0}], bundle_label_selector=[{"ray.io/node-id": _with_gpus(nodes, 4).id}])
    assert taken.wait(10)
    plan = make_plan(training_config(*RAY_RANKS, "trainer.n_gpus_per_node=4"), machines(nodes))
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"within 1 s: trainer \+ rollout node 0 wants 4 GPU on .*, 1 free"):
        asyncio.run(Reservation.reserve(plan, nodes, timeout_s=1))
    assert time.monotonic() - began < 5
    remove_placement_group(taken)
    asyncio.run(Reservation.reserve(plan, nodes, timeout_s=60)).release()


def _with_gpus(nodes, count):
    return next(node for node in nodes if node.machine.num_gpus == count)
