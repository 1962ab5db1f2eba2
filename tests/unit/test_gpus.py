"""Which GPUs a process sees, and which of them a rollout that stands alone takes."""

import asyncio
import os

import pytest

from tests.rollouts import renderer
from treadle.config import ModelConfig, RolloutConfig
from treadle.cores import _quota, num_cores
from treadle.engine.gpus import visible_gpus
from treadle.engine.protocol import Gpu
from treadle.errors import ConfigError
from treadle.rollout.engines import start_engines


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
    assert (mistake.key, mistake.problem) == ("rollout.n_gpus_per_node", "2, but a process here sees 1 GPUs")


def test_vllm_on_this_machine_gets_gpus_by_the_names_that_count_there(monkeypatch):
    from treadle.cluster.local import _start_vllm

    seen: list[dict[str, str]] = []

    async def create(rollout, model, *, name, device, environment):
        seen.append({"device": device, **environment})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr("treadle.engine.vllm.engine.VLLMEngine.create", create)
    from tests.configs import training_config

    asyncio.run(_start_vllm(training_config(), "vllm-0", (1, 2), None))
    assert seen == [{"device": "cuda", "CUDA_VISIBLE_DEVICES": "5,6"}]
    assert visible_gpus()[1] == Gpu(1, "5")


def test_cores_are_those_that_this_process_may_use(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5, 7})
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _quota(tmp_path) == 64
    monkeypatch.setattr("treadle.cores._quota", lambda: 64)
    assert num_cores() == 4


def test_a_container_with_a_cpu_quota_has_fewer_cores(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert _quota(tmp_path) == 3
    assert _quota(tmp_path / "no cgroup") == os.cpu_count()
