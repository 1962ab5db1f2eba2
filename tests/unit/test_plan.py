"""The plan: who runs where and how batches divide, worked out before anything starts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import configs
from tests.configs import rollout_config
from treadle.cli.plan import describe_plan
from treadle.config import Machine, ModelConfig, RolloutConfig, TrainConfig, load, make_plan
from treadle.config.transport import describe_transport
from treadle.errors import ConfigError, Mistake
from treadle.policy.packed_inputs import balance_over_ranks

HERE = [Machine("here", 0)]
VLLM, RAY = "rollout.name=vllm", "cluster.backend=ray"
ASYNC = ["rollout.nnodes=1", "algorithm.rollout_correction.rollout_is=token"]


def training_config(*words: str, **options: str) -> TrainConfig:
    """A training run whose policy may be on several ranks."""
    return configs.training_config("actor._target_=treadle.config.FSDPActorConfig", *words, **options)


def machines(*sizes: int) -> list[Machine]:
    return [Machine(f"m{at}", size) for at, size in enumerate(sizes)]


def refusal(config, there) -> Mistake:
    with pytest.raises(ConfigError) as caught:
        make_plan(config, there)
    (only,) = caught.value.mistakes
    return only


def test_the_calculator_recipe_runs_on_one_machine_without_gpus():
    plan = make_plan(load("calculator"), HERE)
    assert (plan.mode, plan.replicas, plan.gpus_per_replica, plan.shares_devices) == ("sync", 1, 0, True)
    assert [str(placement) for placement in plan.placements] == ["trainer + rollout node 0: here, CPU"]


def test_batches_divide_into_steps_and_micro_batches():
    config = training_config(
        "data.train_batch_size=128",
        "rollout.n=8",
        "actor.ppo_mini_batch_size=32",
        "actor.ppo_epochs=2",
        "trainer.n_gpus_per_node=4",
        "actor.ppo_max_token_len_per_gpu=2500",
    )
    batches = make_plan(config, machines(4)).batches
    assert (batches.trajectories, batches.mini_batches, batches.optimizer_steps) == (1024, 4, 8)
    assert (batches.ranks, batches.trajectories_per_rank) == (4, 64)
    assert batches.max_micro_batches == 32, "two sequences of 1,024 tokens fit into 2,500, not 2.4"


def test_trajectories_need_not_divide_over_ranks():
    words = ("actor.ppo_mini_batch_size=1", "rollout.n=8", "trainer.n_gpus_per_node=3")
    assert make_plan(training_config(*words), machines(3)).batches.trajectories_per_rank == 3


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 64), st.integers(1, 5), st.integers(1, 5000), st.integers(0, 9000), st.integers(0, 2**32))
def test_no_rank_is_dealt_more_micro_batches_than_the_plan_says(count, ranks, length, spare, seed):
    config = training_config(
        f"data.train_batch_size={count}",
        f"actor.ppo_mini_batch_size={count}",
        f"trainer.n_gpus_per_node={ranks}",
        "rollout.n=1",
        "algorithm.adv_estimator=remax",
        "rollout.prompt_length=1",
        f"rollout.response_length={length}",
        f"actor.ppo_max_token_len_per_gpu={length + 1 + spare}",
    )
    limit = make_plan(config, machines(ranks)).batches.max_micro_batches
    draw = random.Random(seed)
    lengths = [draw.randint(1, length + 1) for _ in range(count)]
    dealt = balance_over_ranks(lengths, length + 1 + spare, "actor.ppo_max_token_len_per_gpu", ranks)
    assert max(map(len, dealt)) <= limit


@pytest.mark.parametrize(
    ("words", "staleness"),
    [
        (["trainer.mode=sync"], "0"),
        (["trainer.mode=one_step_off", *ASYNC], "1"),
        (["trainer.mode=fully_async", "trainer.max_staleness=3", *ASYNC], "0 to 3"),
        (["trainer.mode=fully_async", "trainer.max_staleness=0", *ASYNC], "0"),
    ],
)
def test_staleness_follows_from_the_schedule(words, staleness):
    assert str(make_plan(training_config(*words), HERE).staleness) == staleness


def test_a_rollout_that_shares_uses_the_trainers_devices():
    plan = make_plan(
        training_config("trainer.n_gpus_per_node=8", "rollout.tensor_model_parallel_size=2", VLLM), machines(8)
    )
    assert (plan.replicas, plan.gpus_per_replica, plan.shares_devices) == (4, 2, True)
    assert [str(item) for item in plan.placements] == ["trainer + rollout node 0: m0, GPU 0–7"]


def test_a_rollout_with_nodes_has_devices_of_its_own():
    config = training_config(
        "trainer.mode=one_step_off", *ASYNC, "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4"
    )
    plan = make_plan(config, machines(8))
    assert [str(item) for item in plan.placements] == ["trainer node 0: m0, GPU 0–3", "rollout node 0: m0, GPU 4–7"]
    assert not plan.shares_devices
    spread = make_plan(config, machines(8, 8))
    assert [item.machine for item in spread.placements] == ["m0", "m1"]
    assert spread.unused_gpus == 8


def test_a_large_role_finds_its_machine_whatever_the_order():
    words = ["trainer.mode=one_step_off", *ASYNC]
    for trainer, rollout in ((4, 8), (8, 4)):
        config = training_config(*words, f"trainer.n_gpus_per_node={trainer}", f"rollout.n_gpus_per_node={rollout}")
        for sizes in ((8, 4), (4, 8)):
            plan = make_plan(config, machines(*sizes))
            assert plan.unused_gpus == 0
            assert [len(item.gpus) for item in plan.placements] == [trainer, rollout]


def test_several_nodes_are_numbered_and_placed():
    plan = make_plan(training_config("trainer.nnodes=2", "trainer.n_gpus_per_node=8", RAY), machines(8, 8))
    assert [(item.node, item.machine) for item in plan.placements] == [(0, "m0"), (1, "m1")]
    assert len(plan.nodes("trainer + rollout")) == 2
    assert plan.batches.ranks == 16


def test_a_stand_alone_rollout_is_planned_from_its_own_section():
    plan = make_plan(rollout_config("rollout.n_gpus_per_node=2", "rollout.nnodes=2", RAY), machines(2, 2))
    assert (plan.mode, plan.replicas, plan.batches, plan.staleness) == ("rollout", 4, None, None)
    assert make_plan(rollout_config("rollout.replicas_per_node=3"), HERE).replicas == 3


def test_sessions_fill_the_engines_unless_the_config_says_how_many():
    words = ["rollout.nnodes=2", "rollout.n_gpus_per_node=8", "rollout.max_num_seqs=128", RAY]
    assert make_plan(rollout_config(*words), machines(8, 8)).places == 2 * 16 * 128
    told = rollout_config(*words, "rollout.agent.max_concurrent_sessions=7")
    assert make_plan(told, machines(8, 8)).places == 7


def test_engines_that_compute_elsewhere_take_no_gpus():
    plan = make_plan(rollout_config("rollout.name=scripted", "rollout.replicas_per_node=2"), machines(4))
    assert (plan.replicas, plan.gpus_per_replica, plan.unused_gpus) == (2, 0, 4)


def test_the_engine_in_the_policys_process_is_one():
    config = training_config("trainer.n_gpus_per_node=4")
    plan = make_plan(config, machines(4))
    assert (plan.replicas, plan.gpus_per_replica, plan.weights) == (1, 1, "own")
    assert "1 × native, 1 GPU each of the trainer's: the others wait while it samples" in describe_plan(config, plan)
    assert make_plan(training_config("trainer.n_gpus_per_node=4", VLLM), machines(4)).replicas == 4
    assert make_plan(training_config("trainer.n_gpus_per_node=4", RAY), machines(4)).replicas == 4


def test_more_gpus_than_there_are_is_refused_with_both_numbers():
    found = refusal(training_config("trainer.n_gpus_per_node=8"), machines(4))
    assert found.key == "trainer.n_gpus_per_node"
    assert found.problem == "8 GPUs wanted for trainer + rollout; there is 1 machine with 4 GPUs"
    assert str(found.origin) == "command line (trainer.n_gpus_per_node=8)"
    found = refusal(
        training_config("trainer.n_gpus_per_node=8", "trainer.nnodes=3", "rollout.n=3", RAY), machines(8, 8)
    )
    assert found.problem == "3 × 8 GPUs = 24 wanted for trainer + rollout; there are 2 machines with 8 GPUs"
    assert refusal(training_config("trainer.n_gpus_per_node=1"), HERE).fix == "no GPU is visible: 0 runs on the CPU"


def test_what_two_roles_want_together_is_refused_too():
    config = training_config(
        "trainer.mode=one_step_off", *ASYNC, "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=8"
    )
    found = refusal(config, machines(8))
    assert found.problem == "4 GPUs wanted for trainer, besides 8 for rollout; there is 1 machine with 8 GPUs"


def test_no_machine_at_all_is_refused():
    assert "there is no machine" in refusal(rollout_config(), []).problem


def test_a_config_built_in_code_is_checked_before_it_is_planned():
    config = TrainConfig(model=ModelConfig(path="x"), rollout=RolloutConfig(tensor_model_parallel_size=3))
    with pytest.raises(ConfigError) as caught:
        make_plan(config, HERE)
    assert "rollout.tensor_model_parallel_size" in {item.key for item in caught.value.mistakes}


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 8),
    st.integers(0, 3),
    st.integers(0, 8),
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
)
def test_no_gpu_is_given_twice_and_none_is_invented(nodes, gpus, rollout_nodes, rollout_gpus, sizes):
    words = [RAY, f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}"]
    words += ["actor.ppo_mini_batch_size=64", f"rollout.n={nodes * max(gpus, 1) * 2}"]
    if rollout_nodes:
        words += [f"rollout.nnodes={rollout_nodes}", f"rollout.n_gpus_per_node={rollout_gpus}"]
    there = machines(*sizes)
    try:
        plan = make_plan(training_config(*words), there)
    except ConfigError:
        assert gpus or rollout_gpus, "a CPU is always there"
        if rollout_nodes == 0:
            assert sum(size // gpus for size in sizes) < nodes, "it would have fitted"
        return
    given_out = [(item.machine, gpu) for item in plan.placements for gpu in item.gpus]
    assert len(given_out) == len(set(given_out)) == nodes * gpus + rollout_nodes * rollout_gpus
    assert set(given_out) <= {(machine.name, gpu) for machine in there for gpu in range(machine.num_gpus)}
    assert plan.unused_gpus == sum(sizes) - len(given_out)
    assert plan.replicas >= 1


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ([], "own"),
        (["rollout.nnodes=1"], "shared"),
        (["rollout.name=vllm"], "shared"),
        (["rollout.nnodes=1", "trainer.weights.transport=collective"], "collective"),
        (["rollout.name=vllm", "trainer.weights.transport=disk"], "disk"),
        (["cluster.backend=ray"], "store"),
        (["cluster.backend=ray", "rollout.name=vllm", "trainer.weights.transport=collective"], "collective"),
        (["cluster.backend=ray", "trainer.weights.transport=disk"], "disk"),
    ],
)
def test_the_plan_says_how_weights_travel(words, way):
    config = training_config(*words)
    assert make_plan(config, HERE).weights == way
    assert f"weights    {describe_transport(config)}" in describe_plan(config, make_plan(config, HERE))


def test_what_is_written_on_the_way_lies_in_the_run_directory_unless_told_otherwise():
    disk = ["rollout.nnodes=1", "trainer.weights.transport=disk", "logging.run_dir=/runs/a"]
    assert describe_transport(training_config(*disk)) == "through files in /runs/a/weights"
    assert describe_transport(training_config(*disk, "trainer.weights.directory=/nfs/a")) == "through files in /nfs/a"


def test_a_rollout_that_stands_alone_has_no_weights_to_send():
    assert make_plan(rollout_config(), HERE).weights is None


def validation_of(*words: str, there=HERE):
    placement = make_plan(training_config(*ASYNC, *words), there).validation
    return placement and placement.place()


def test_validation_beside_training_has_an_engine_of_its_own_where_one_fits():
    beside = ["trainer.mode=fully_async", "trainer.test_freq=5"]
    gpus = [*beside, "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=4"]
    gpus += [VLLM, "rollout.tensor_model_parallel_size=2"]
    assert validation_of(*beside) == "here, CPU"
    assert validation_of("trainer.mode=sync", "trainer.test_freq=5") is None
    assert validation_of("trainer.mode=fully_async") is None, "at the end, nobody waits for it"
    assert validation_of(*gpus, there=machines(8)) == "m0, GPU 6–7"
    assert validation_of(*gpus, there=machines(6)) is None, "no GPU is left"
    ray = [*gpus, RAY]
    assert validation_of(*ray, there=machines(8)) == "m0, GPU 6–7"
    assert make_plan(training_config(*ASYNC, *ray), machines(8)).unused_gpus == 0
    assert validation_of(*ray, there=machines(7)) is None, "one GPU holds no engine of two"


JUDGED = """
model: {path: somewhere}
data: {train_files: [tasks.jsonl], train_batch_size: 64}
rollout: {n: 8}
reward:
  classifiers: {helpful: {path: there, device: cuda}}
  judges: {fair: {path: there, prompt: Rate, engine: {name: vllm, n_gpus: 2, tensor_model_parallel_size: 2}}}
trainer: {}
"""


def judged(*words: str) -> TrainConfig:
    return training_config(*words, text=JUDGED)


def test_reward_models_have_gpus_of_their_own_where_some_are_free():
    plan = make_plan(judged("trainer.n_gpus_per_node=4"), machines(8))
    assert plan.rewards.gpus == {"helpful": (4,), "fair": (5, 6)} and plan.rewards.shared_with is None
    assert [item.role for item in plan.held()] == ["trainer + rollout", "reward"]
    assert plan.unused_gpus == 1


def test_reward_models_share_the_engines_gpus_where_none_is_free():
    plan = make_plan(judged("trainer.n_gpus_per_node=4"), machines(4))
    assert plan.rewards.gpus == {"helpful": (0,), "fair": (1, 2)}
    assert plan.rewards.shared_with == "trainer + rollout" and plan.held() == plan.placements
    apart = judged(*ASYNC, "trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=3")
    assert make_plan(apart, machines(4)).rewards.shared_with == "rollout", "a trainer alone needs its GPU more"


def test_no_gpu_is_asked_for_more_memory_than_it_has():
    found = refusal(judged("trainer.n_gpus_per_node=2"), machines(2))
    assert found.key == "reward.judges.fair.engine.n_gpus"
    assert found.problem == "'fair' shares GPU 0 with trainer + rollout: 1.10 of its memory is asked for"
    assert make_plan(judged("trainer.n_gpus_per_node=2", "rollout.gpu_memory_utilization=0.4"), machines(2)).rewards


def test_a_reward_model_that_no_machine_holds_is_refused():
    found = refusal(judged("trainer.n_gpus_per_node=1"), machines(1))
    assert found.problem.startswith("2 GPUs of one machine wanted for the reward model 'fair'")
    assert refusal(judged("reward.judges={}"), HERE).key == "reward.classifiers.helpful.device"


def test_a_gpu_that_the_config_names_is_left_to_it_but_on_ray():
    named = ["reward.judges={}", "reward.classifiers.helpful.device=cuda:1", "trainer.n_gpus_per_node=1"]
    assert make_plan(judged(*named), machines(2)).rewards.gpus == {"helpful": (1,)}
    assert refusal(judged(*named), machines(1)).problem == "no machine has that GPU"
    assert refusal(judged(*named, "cluster.backend=ray"), machines(2)).fix == "write cuda"


def test_validation_shares_the_engines_where_its_reward_models_would_not_fit():
    words = [*ASYNC, "trainer.mode=fully_async", "trainer.test_freq=5", "data.val_files=[held_out.jsonl]"]
    words += ["reward.judges={}", "trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=1", "cluster.backend=ray"]
    assert make_plan(judged(*words), machines(8)).validation is not None
    full = "reward.classifiers.helpful.gpu_memory_utilization=0.6"
    assert make_plan(judged(*words, full), machines(8)).validation is None


def test_a_plan_of_supervised_fine_tuning_divides_rows_of_its_own_length():
    words = ["model.path=unused", "data.train_files=unused", "actor.ppo_max_token_len_per_gpu=64", "sft.max_length=16"]
    plan = make_plan(
        load((), [*words, "data.train_batch_size=8", "actor.ppo_mini_batch_size=8"], sft=True), machines(0)
    )
    assert plan.batches is not None and plan.batches.trajectories == 8 and plan.batches.max_micro_batches == 2
