from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Timer
from typing import Any

import pytest
import torch

from treadle.algorithm.measures import Mean, Peak, Sum
from treadle.config.actor import ActorConfig, FSDPActorConfig, FSDPConfig, FSDPCriticConfig, RefConfig
from treadle.errors import ConfigError, DeadlineError, MisuseError, RunError
from treadle.policy import ranks as ranks_module
from treadle.policy.ranks import RankBroke, RankDied, Ranks, portable
from treadle.policy.sharded import needs_ranks
from treadle.policy.team import ALONE, _to_cpu

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
    assert Ranks(Handles(answers("a"), answers("b")), 5).run("work", nothing) == ["a", "b"]


def test_a_rank_that_does_not_answer_is_named_with_what_it_was_doing() -> None:
    ranks = Ranks(Handles(answers(1), hangs), 0.05)
    with pytest.raises(
        DeadlineError, match=r"^policy rank 1 did not finish training within 0\.05 s; .* trainer\.rank_timeout_s$"
    ):
        ranks.run("training", nothing)
    with pytest.raises(RunError, match="cannot go on: policy rank 1 did not finish training"):
        ranks.run("logprobs", nothing)


def test_a_death_is_the_cause_though_the_others_failed_first() -> None:
    broken = portable(RuntimeError("connection closed by peer"), "policy rank 0")
    ranks = Ranks(Handles(fails(broken), fails(RankDied("policy rank 1 died: killed by SIGKILL"), 0.05)), 5)
    with pytest.raises(RankDied, match="policy rank 1 died: killed by SIGKILL"):
        ranks.run("training", nothing)
    with pytest.raises(RunError, match="cannot go on: policy rank 1 died"):
        ranks.run("training", nothing)


def test_an_error_on_purpose_comes_before_what_follows_from_it() -> None:
    broken = portable(RuntimeError("connection closed by peer"), "policy rank 0")
    with pytest.raises(ConfigError) as raised:
        Ranks(Handles(fails(broken), fails(_mistake(), 0.05)), 5).run("training", nothing)
    assert raised.value.__notes__ == ["from policy rank 1, in training"]


def test_a_failure_does_not_wait_for_ranks_that_hang() -> None:
    ranks = Ranks(Handles(fails(RunError("no")), hangs), 60)
    with pytest.raises(RunError, match=r"^no\b"):
        ranks.run("training", nothing)
    with pytest.raises(RunError, match="cannot go on: no"):
        ranks.run("training", nothing)


def test_ranks_that_all_refuse_alike_are_still_in_step() -> None:
    handles = Handles(fails(MisuseError("no returns")), fails(MisuseError("no returns")))
    ranks = Ranks(handles, 5)
    with pytest.raises(MisuseError, match="no returns"):
        ranks.run("training", nothing)
    handles._acts = (answers(1), answers(2))
    assert ranks.run("training", nothing) == [1, 2]


def test_an_unexpected_error_travels_with_its_traceback() -> None:
    try:
        raise KeyError("layer")
    except KeyError as error:
        carried = portable(error, "policy rank 1")
    assert isinstance(carried, RankBroke)
    assert str(carried) == "policy rank 1 failed: KeyError: 'layer'"
    assert "test_policy_ranks.py" in carried.__notes__[0]


def test_one_device_needs_ranks_only_for_what_fsdp_alone_does() -> None:
    assert not needs_ranks(1, ActorConfig(), RefConfig(), None) and not needs_ranks(1, FSDPActorConfig())
    assert needs_ranks(2, FSDPActorConfig())
    for key in ("param_offload", "optimizer_offload", "offload_policy"):
        assert needs_ranks(1, ActorConfig(), FSDPCriticConfig(fsdp_config=FSDPConfig(**{key: True})))


def test_a_team_of_one_changes_nothing() -> None:
    values = torch.arange(3.0)
    measures = {"loss": Sum(torch.tensor(1.0))}
    assert ALONE.total(values) is values and ALONE.merge(measures) is measures and ALONE.enlarge(values) is values


@pytest.mark.parametrize(
    "measure", [Sum(torch.tensor(2.0)), Mean(torch.tensor(1.0), torch.tensor(4)), Peak(torch.tensor(3.0))]
)
def test_measures_travel_as_they_are(measure: Any) -> None:
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

    ranks = Ranks(Handles(works, answers(None)), 5)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(ranks.run, "work", nothing) for _ in range(4)]:
            done.result()
    assert max(most) == 1
