"""Which GPUs a process sees, and which of them a rollout that stands alone takes."""

import asyncio
import os
from pathlib import Path

import pytest

import treadle
from tests.configs import training_config
from tests.rollouts import renderer
from treadle.cluster.local import EngineProcesses, ValidationEngine
from treadle.cluster.runtime import name_devices
from treadle.config import Config, Machine, ModelConfig, RolloutConfig, load, make_plan
from treadle.config.plan import place_trainer
from treadle.cores import _quota, num_cores
from treadle.engine.gpus import visible_gpus
from treadle.engine.protocol import Gpu
from treadle.errors import ConfigError
from treadle.rollout.engines import start_engines, start_process_engine
from treadle.simulate.stand_ins import NoSender
from treadle.weights.sync import WeightSync


@pytest.mark.parametrize(
    ("visible", "names"),
    [("", []), ("-1", []), ("2,3", ["2", "3"]), (" 0 , GPU-8f ", ["0", "GPU-8f"])],
)
def test_gpus_are_those_that_the_environment_leaves(monkeypatch, visible, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in visible_gpus()] == names
    assert [gpu.number for gpu in visible_gpus()] == list(range(len(names)))


def start(monkeypatch, *, visible: str, **keys) -> list[str]:
    """The device of each engine that is started."""
    devices: list[str] = []

    async def hire(self, name, start):
        return await start()

    async def apart(rollout, model, name, device, num_threads):
        devices.append(device if num_threads is None else f"{device} with {num_threads} threads")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("treadle.engine.replica_supervisor.ReplicaSupervisor.add", hire)
    monkeypatch.setattr("treadle.rollout.engines.start_native_remote", apart)
    monkeypatch.setattr("treadle.rollout.engines.num_cores", lambda: 7)
    asyncio.run(start_engines(RolloutConfig(**keys), ModelConfig(path="unused"), renderer(), None))
    return devices


def test_a_rollout_that_stands_alone_has_an_engine_on_each_of_its_gpus(monkeypatch):
    assert start(monkeypatch, visible="4,5,6", n_gpus_per_node=2) == ["cuda:0", "cuda:1"]
    assert start(monkeypatch, visible="4,5,6", n_gpus_per_node=0, replicas_per_node=2) == ["cpu with 3 threads"] * 2


def test_gpus_that_are_not_there_are_a_mistake_of_their_key(monkeypatch):
    with pytest.raises(ConfigError) as caught:
        start(monkeypatch, visible="0", n_gpus_per_node=2)
    (mistake,) = caught.value.mistakes
    problem = "2 GPUs wanted for rollout; there is 1 machine with 1 GPU"
    assert (mistake.key, mistake.problem, mistake.missing) == ("rollout.n_gpus_per_node", problem, "GPU")


def test_vllm_on_this_machine_gets_gpus_by_the_names_that_count_there(monkeypatch):
    seen: list[dict[str, str]] = []

    async def create(rollout, model, *, name, device, environment, load_decode):
        seen.append({"device": device, **environment})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr("treadle.engine.vllm.engine.VLLMEngine.create", create)
    monkeypatch.setattr("treadle.engine.vllm.engine.require_vllm", lambda rollout: None)
    config = training_config("rollout.name=vllm")
    asyncio.run(start_process_engine(config.rollout, config.model, "vllm-0", visible_gpus()[1:], 1))
    asyncio.run(start_process_engine(config.rollout, config.model, "vllm-1", (), 1))
    assert seen.pop() == {"device": "cpu", "OMP_NUM_THREADS": "1"}
    assert seen == [{"device": "cuda", "CUDA_VISIBLE_DEVICES": "5,6"}]
    assert visible_gpus()[1] == Gpu(1, "5")


def test_a_training_run_of_one_machine_sits_on_the_gpus_of_its_plan(monkeypatch):
    """Also where the rollout has more GPUs than the trainer, which then does not have the first."""
    started: dict[str, str] = {}

    async def start_remote(rollout, model, name, device, num_threads):
        started[name] = device

    async def add(self, name, start):
        return await start()

    words = ("rollout.nnodes=1", "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=1", "trainer.mode=fully_async")
    validating = ("trainer.test_freq=1", "data.val_files=unused")
    config = training_config(*words, *validating, "algorithm.rollout_correction.rollout_is=token")
    plan = make_plan(config, [Machine("here", 4)])
    places = {str(placement.role): placement.gpus for placement in (*plan.placements, plan.validation)}
    assert places == {"trainer": (2,), "rollout": (0, 1), "validation": (3,)}
    monkeypatch.setattr("treadle.engine.replica_supervisor.ReplicaSupervisor.add", add)
    monkeypatch.setattr("treadle.rollout.engines.start_native_remote", start_remote)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")

    async def main() -> None:
        weights = WeightSync.of(config, NoSender())
        for backend in (
            EngineProcesses(config.rollout, config.model, plan, weights),
            ValidationEngine(plan, weights, policy=None),  # its weights are not pushed here
        ):
            await backend.start_engines(config.rollout, config.model, renderer(), None)

    asyncio.run(main())
    assert started == {"native-0": "cuda:0", "native-1": "cuda:1", "validation-0": "cuda:3"}
    assert name_devices(config.trainer, plan.trainer_gpus()) == ("cuda:2",)


def test_cores_are_those_that_this_process_may_use(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5, 7})
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _quota(tmp_path) == 64
    monkeypatch.setattr("treadle.cores._quota", lambda: 64)
    assert num_cores() == 4


def test_cores_are_counted_in_one_place():
    """Elsewhere `os.cpu_count` would ignore the affinity and the quota of a container."""
    package = Path(treadle.__file__).parent
    assert [str(file) for file in package.rglob("*.py") if "cpu_count" in file.read_text()] == [
        str(package / "cores.py")
    ]


def test_a_container_with_a_cpu_quota_has_fewer_cores(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert _quota(tmp_path) == 3
    assert _quota(tmp_path / "no cgroup") == os.cpu_count()


def test_a_rollout_of_a_training_file_is_planned_without_its_trainer():
    """Rules and GPUs of training are not those of an evaluation; mistakes in its sections are still found."""
    words = ["rollout.n=1", "trainer.n_gpus_per_node=8", "rollout.n_gpus_per_node=1"]
    config = load("calculator", words, rollout=True)
    assert type(config) is Config and config.origin("rollout.n").place == "rollout.n=1"
    plan = make_plan(config, [Machine("here", 1)])
    assert plan.mode == "rollout" and plan.replica_gpus() == ((0,),)
    with pytest.raises(ConfigError, match="compares the samples"):
        load("calculator", words)
    with pytest.raises(ConfigError, match=r"trainer\.modee"):
        load("calculator", ["trainer.modee=sync"], rollout=True)


def test_a_replay_has_the_gpus_of_one_node_of_the_trainer():
    config = training_config("trainer.n_gpus_per_node=1", "rollout.nnodes=0")
    assert place_trainer(config, Machine("here", 4)) == (0,)
    with pytest.raises(ConfigError, match="1 GPU wanted"):
        place_trainer(config, Machine("here"))
