"""Ranks that fail, hang and die: real processes, real kills."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.policies import save_tiny_model
from tests.sharded import load, make_batch, make_spec, ragged, start
from treadle.errors import ConfigError, DeadlineError, RunError
from treadle.policy.local_ranks import LocalRanks
from treadle.policy.rank import FSDPRank
from treadle.policy.rank_calls import ShardedPolicy
from treadle.policy.rank_group import RankDied, RankFailed, RankGroup


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[RankGroup]:
    ranks = start(make_spec(directory), 2)
    yield ranks
    ranks.close()


def stumble(rank: FSDPRank) -> None:
    if rank.rank_spec.rank == 1:
        raise KeyError("layer 7")


def test_an_unexpected_error_names_its_rank_and_ends_the_run(pair: RankGroup) -> None:
    ranks = RankGroup(pair._handles, 60)
    with pytest.raises(RankFailed, match=r"policy rank 1 \(pid \d+\) failed: KeyError: 'layer 7'"):
        ranks.run("a push", stumble)
    with pytest.raises(RunError, match="cannot go on: policy rank 1"):
        ShardedPolicy(ranks).train(make_batch(ragged(1)))


def wait_in_collective(rank: FSDPRank) -> None:
    """The first rank waits for the last, which never comes."""
    if rank.rank_spec.rank == rank.rank_spec.size - 1:
        time.sleep(600)
    torch.distributed.barrier()


def test_a_rank_that_hangs_is_named_and_ended(directory: Path) -> None:
    ranks = start(make_spec(directory), 1, timeout_s=1)
    (pid,) = ranks.run("asking", ask_pid)
    with pytest.raises(DeadlineError, match=rf"policy rank 0 \(pid {pid}\) did not finish waiting within 1 s"):
        ranks.run("waiting", wait_in_collective)
    ranks.close()
    assert not is_alive(pid)


def test_a_killed_rank_ends_the_run_with_its_cause(directory: Path) -> None:
    ranks = start(make_spec(directory), 2)
    pids = ranks.run("asking", ask_pid)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    assert f"pid {pids[1]}" in str(ranks._handles.gone.result(timeout=10)), "known while nobody calls"
    with pytest.raises(RankDied, match=rf"policy rank 1 \(pid {pids[1]}\) died: killed by SIGKILL"):
        ShardedPolicy(ranks).train(make_batch(ragged(1)))
    assert time.monotonic() - began < 15
    ranks.close()
    assert not is_alive(pids[0])


def test_a_model_that_cannot_be_loaded_is_the_users_mistake(pair: RankGroup, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load(pair, make_spec(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.path"):
        LocalRanks.start(make_spec(tmp_path), ["cpu"], launch_timeout_s=120, timeout_s=60)


DRIVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.integration.test_fsdp_faults import ask_pid, make_spec, start, wait_in_collective
ranks = start(make_spec(Path({model!r})), 1)
print(*ranks.run("asking", ask_pid), flush=True)
ranks.run("waiting", wait_in_collective)
"""


def test_ranks_do_not_outlive_a_killed_driver(directory: Path) -> None:
    here = str(Path(__file__).parents[2])
    code = DRIVER.format(here=here, model=str(directory))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=here) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.kill()
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(pid)


def ask_pid(rank: FSDPRank) -> int:
    return os.getpid()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
