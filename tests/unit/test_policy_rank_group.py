"""The rank group: calls, deadlines and errors of all ranks; the rendezvous store where they meet."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from treadle.algorithm.metrics import MaxMetric, MeanMetric, SumMetric
from treadle.config.training import ActorConfig, FSDPActorConfig, FSDPConfig, FSDPCriticConfig, RefConfig
from treadle.errors import ConfigError, DeadlineError, MisuseError, RunError
from treadle.policy import rank_group as ranks_module
from treadle.policy.rank import RendezvousStore
from treadle.policy.rank_calls import needs_ranks
from treadle.policy.rank_group import RankDied, RankFailed, RankGroup, portable_error
from treadle.policy.rendezvous import RendezvousServer, join_store
from treadle.policy.update import SINGLE_RANK, _to_cpu
from treadle.weights.collective import CollectiveTransport
from treadle.weights.transfer import CastTensors

Act = Callable[[Future[Any]], object]


class Handles:
    """Ranks that do as they are told, each with its future."""

    names = ("policy rank 0", "policy rank 1")

    def __init__(self, *acts: Act) -> None:
        self._acts = acts

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[Future[Any]]:
        futures: list[Future[Any]] = [Future() for _ in self._acts]
        for act, future in zip(self._acts, futures, strict=True):
            act(future)
        return futures

    def close(self) -> None: ...


def answers(value: object) -> Act:
    return lambda future: future.set_result(value)


def fails(error: Exception, after_s: float = 0.0) -> Act:
    return lambda future: Timer(after_s, future.set_exception, [error]).start()


def hangs(future: Future[Any]) -> None:
    """As a rank does whose others have left a collective."""


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_S", 0.2)


def nothing(rank: object) -> None: ...


def test_every_ranks_answer_comes_back_in_order() -> None:
    assert RankGroup(Handles(answers("a"), answers("b")), 5).run("work", nothing) == ["a", "b"]


def test_a_rank_that_does_not_answer_is_named_with_what_it_was_doing() -> None:
    ranks = RankGroup(Handles(answers(1), hangs), 0.05)
    with pytest.raises(
        DeadlineError, match=r"^policy rank 1 did not finish training within 0\.05 s; .* trainer\.rank_timeout_s$"
    ):
        ranks.run("training", nothing)
    with pytest.raises(RunError, match="cannot go on: policy rank 1 did not finish training"):
        ranks.run("logprobs", nothing)


def test_a_death_is_the_cause_though_the_others_failed_first() -> None:
    broken = portable_error(RuntimeError("connection closed by peer"), "policy rank 0")
    ranks = RankGroup(Handles(fails(broken), fails(RankDied("policy rank 1 died: killed by SIGKILL"), 0.05)), 5)
    with pytest.raises(RankDied, match="policy rank 1 died: killed by SIGKILL"):
        ranks.run("training", nothing)
    with pytest.raises(RunError, match="cannot go on: policy rank 1 died"):
        ranks.run("training", nothing)


def test_an_error_on_purpose_comes_before_what_follows_from_it() -> None:
    broken = portable_error(RuntimeError("connection closed by peer"), "policy rank 0")
    with pytest.raises(ConfigError) as raised:
        RankGroup(Handles(fails(broken), fails(_mistake(), 0.05)), 5).run("training", nothing)
    assert raised.value.__notes__ == ["from policy rank 1, in training"]


def test_a_failure_does_not_wait_for_ranks_that_hang() -> None:
    ranks = RankGroup(Handles(fails(RunError("no")), hangs), 60)
    with pytest.raises(RunError, match=r"^no\b"):
        ranks.run("training", nothing)
    with pytest.raises(RunError, match="cannot go on: no"):
        ranks.run("training", nothing)


def test_ranks_that_all_refuse_alike_are_still_in_step() -> None:
    handles = Handles(fails(MisuseError("no returns")), fails(MisuseError("no returns")))
    ranks = RankGroup(handles, 5)
    with pytest.raises(MisuseError, match="no returns"):
        ranks.run("training", nothing)
    handles._acts = (answers(1), answers(2))
    assert ranks.run("training", nothing) == [1, 2]


def test_an_unexpected_error_travels_with_its_traceback() -> None:
    try:
        raise KeyError("layer")
    except KeyError as error:
        carried = portable_error(error, "policy rank 1")
    assert isinstance(carried, RankFailed)
    assert str(carried) == "policy rank 1 failed: KeyError: 'layer'"
    assert "test_policy_rank_group.py" in carried.__notes__[0]


def test_one_device_needs_ranks_only_for_what_fsdp_alone_does() -> None:
    assert not needs_ranks(1, ActorConfig(), RefConfig(), None) and not needs_ranks(1, FSDPActorConfig())
    assert needs_ranks(2, FSDPActorConfig())
    for key in ("param_offload", "optimizer_offload", "offload_policy"):
        assert needs_ranks(1, ActorConfig(), FSDPCriticConfig(fsdp_config=FSDPConfig(**{key: True})))


def test_a_group_of_one_rank_changes_nothing() -> None:
    values = torch.arange(3.0)
    metrics = {"loss": SumMetric(torch.tensor(1.0))}
    assert (
        SINGLE_RANK.total(values) is values
        and SINGLE_RANK.merge(metrics) is metrics
        and SINGLE_RANK.scale_loss(values) is values
    )


@pytest.mark.parametrize(
    "measure",
    [SumMetric(torch.tensor(2.0)), MeanMetric(torch.tensor(1.0), torch.tensor(4)), MaxMetric(torch.tensor(3.0))],
)
def test_metrics_are_sent_as_they_are(measure: Any) -> None:
    assert _to_cpu(measure) == measure


def _mistake() -> ConfigError:
    from treadle.errors import Mistake

    return ConfigError([Mistake("actor.ppo_max_token_len_per_gpu", "too small")])


def test_a_second_thread_waits_for_its_turn() -> None:
    """Two calls at once could reach two ranks in different orders, and each would wait for the other for ever."""
    running, most = [], []

    def works(future: Future[Any]) -> None:
        running.append(future)
        most.append(len(running))
        Timer(0.02, lambda: (running.remove(future), future.set_result(None))).start()

    ranks = RankGroup(Handles(works, answers(None)), 5)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(ranks.run, "work", nothing) for _ in range(4)]:
            done.result()
    assert max(most) == 1


def listening(port: int) -> set[str]:
    """The local addresses that something listens at, on this port, as the kernel spells them."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].rpartition(":")[0] for row in lines if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}


LOOPBACK = {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}


def test_ranks_meet_on_the_loopback_alone():
    store = RendezvousStore()
    assert listening(store.port) == LOOPBACK
    assert store.key and store.key != RendezvousStore().key


def test_weights_are_published_on_the_address_that_was_named():
    transport = CollectiveTransport(host="127.0.0.1", receivers=1)
    try:
        transfer = transport.publish(1, CastTensors({"w": torch.zeros(2)}, None))
        assert listening(transfer.address[1]) == LOOPBACK
    finally:
        transport.close()


def test_members_find_each_other_and_others_do_not():
    server = RendezvousServer("127.0.0.1", "right")
    join_store("127.0.0.1", server.port, "right").set("seat", "1")
    assert server.store.get("seat") == b"1"
    stranger = join_store("127.0.0.1", server.port, "wrong")
    stranger.set("seat", "2")
    assert server.store.get("seat") == b"1"
    assert not join_store("127.0.0.1", server.port, "other").check(["seat"])
