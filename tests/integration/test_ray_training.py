"""A whole run on Ray: the weights of a run in one process, bit for bit; and what is left after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests import ray_cluster
from treadle.cluster.ray.reaper import descendants
from treadle.journal import JournalReader

WORDS = (
    "calculator",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "rollout.n=4",
    "data.val_max_samples=8",
    "trainer.val_before_train=false",
    "checkpoint.save_freq=1",
)
RAY = ("cluster.backend=ray", "cluster.ray_init.num_cpus=2", "cluster.ray_init.object_store_memory=100000000")


def words(run_dir: Path, steps: int, *more: str) -> list[str]:
    return [*WORDS, f"logging.run_dir={run_dir}", f"trainer.total_training_steps={steps}", *more]


def checksums(run_dir: Path) -> dict[int, str]:
    with JournalReader.open(run_dir) as reader:
        return {event.fields["version"]: event.fields["checksum"] for event in reader.events(kind="weights")}


class Driver:
    """A run on Ray in a process that can be killed."""

    def __init__(self, run_dir: Path, steps: int, *more: str) -> None:
        command = [sys.executable, "-m", "treadle", "train", *words(run_dir, steps, *RAY, *more)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    def read_until(self, wanted: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if wanted in line:
                return line
        raise AssertionError(f"no line with {wanted!r}: {self.text()}")

    def text(self) -> str:
        return "\n".join(self.lines)

    def end(self, timeout_s: float = 120) -> int:
        """Read to the end; its status."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        status = self.process.wait(timeout_s)
        self.process.stdout.close()
        return status

    def actors(self, kind: str) -> list[int]:
        """The processes of actors of one kind; Ray gives them titles."""
        titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(self.process.pid)}
        return [pid for pid, title in titles.items() if title.startswith(f"ray::{kind}")]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The weights of a run of four steps in one process."""
    run_dir = tmp_path_factory.mktemp("here")
    command = [sys.executable, "-m", "treadle", "train", *words(run_dir, 4)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return checksums(run_dir)


@pytest.mark.parametrize("transport", ["store", "collective", "disk"])
def test_a_run_on_ray_has_the_weights_of_a_run_in_process(tmp_path, here, transport):
    driver = Driver(tmp_path, 4, f"trainer.weights.transport={transport}")
    assert driver.end() == 0, driver.text()
    assert checksums(tmp_path) == here and set(here) == {1, 2, 3, 4}
    assert not list((tmp_path / "weights").glob("*")), "what was written on the way is gone"


def test_a_killed_rank_ends_the_run_with_the_cause_and_the_run_goes_on_from_there(tmp_path):
    driver = Driver(tmp_path, 100)
    driver.read_until("step 2/")
    (pid,) = driver.actors("RankActor")
    left = descendants(driver.process.pid)
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    assert driver.end() != 0
    assert f"(pid {pid}) died" in driver.text(), driver.text()
    print(f"the run ended {time.monotonic() - killed_at:.1f} s after its rank")
    assert ray_cluster.gone_within(left, 20) == []
    again = Driver(tmp_path, 3)
    assert again.end() == 0, again.text()
    assert set(checksums(tmp_path)) >= {1, 2, 3}


def test_nothing_is_left_of_a_killed_driver_and_the_run_goes_on_to_the_same_weights(tmp_path, here):
    driver = Driver(tmp_path, 4)
    driver.read_until("step 2/")
    processes = descendants(driver.process.pid)
    assert len(processes) > 4, "daemons, a rank and a replica"
    driver.process.kill()
    killed_at = time.monotonic()
    driver.end()
    assert ray_cluster.gone_within(processes, 30) == []
    print(f"nothing was left {time.monotonic() - killed_at:.1f} s after the driver was killed")
    again = Driver(tmp_path, 4)
    assert again.end() == 0, again.text()
    assert checksums(tmp_path) == here


def test_ctrl_c_saves_and_leaves_nothing(tmp_path):
    driver = Driver(tmp_path, 100)
    driver.read_until("step 1/")
    processes = descendants(driver.process.pid)
    driver.process.send_signal(signal.SIGINT)
    assert driver.end() == 130, driver.text()
    assert ray_cluster.gone_within(processes, 20) == []
    assert (tmp_path / "checkpoints").is_dir()


@pytest.mark.parametrize("transport", ["store", "collective", "disk"])
def test_a_replica_that_is_killed_during_training_comes_back_and_training_goes_on(tmp_path, transport):
    """With the weights that are current then, whichever way they came."""
    driver = Driver(tmp_path, 6, f"trainer.weights.transport={transport}")
    driver.read_until("step 2/")
    (pid,) = driver.actors("EngineActor")
    os.kill(pid, signal.SIGKILL)
    assert driver.end() == 0, driver.text()
    assert "native-0 serves again after" in driver.text(), driver.text()
    assert set(checksums(tmp_path)) == {1, 2, 3, 4, 5, 6}
    with JournalReader.open(tmp_path) as reader:
        (event,) = reader.events(kind="replica")
    assert event.fields["replica"] == "native-0" and event.fields["replacement"] == "native-0"


def test_ranks_and_replicas_on_nodes_of_their_own_train_fully_async(tmp_path):
    """Two sharded ranks, one replica apart from them, samples that are a version old; weights by broadcast."""
    more = (
        "cluster.ray_init.num_cpus=4",
        "trainer.nnodes=2",
        "actor._target_=treadle.config.FSDPActorConfig",
        "rollout.nnodes=1",
        "rollout.agent.num_workers=2",
        "trainer.mode=fully_async",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.weights.transport=collective",
        "trainer.weights.bucket_mb=1",
        "trainer.test_freq=1",
    )
    driver = Driver(tmp_path, 3, *more)
    driver.read_until("step 1/")
    assert len(driver.actors("RankActor")) == 2
    assert len(driver.actors("WorkerActor")) == 4 and len(driver.actors("EngineActor")) == 2, "to train and to validate"
    assert driver.end() == 0, driver.text()
    assert set(checksums(tmp_path)) >= {1, 2, 3}
    with JournalReader.open(tmp_path) as reader:
        steps = [found.step for found in reader.metrics() if "validation/success" in found.values]
    assert sorted(steps) == [1, 2, 3], "beside training, each on its own version"
