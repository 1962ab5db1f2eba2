import pytest

from treadle.config.actor import OptimConfig
from treadle.policy.schedule import learning_rate


def rates(total: int, **keys: object) -> list[float]:
    return [learning_rate(OptimConfig(lr=1.0, **keys), step, total) for step in range(1, total + 1)]


def test_constant_stays() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_reaches_the_peak_at_its_last_step_and_wastes_none() -> None:
    assert rates(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_by_ratio_counts_only_where_no_steps_are_given() -> None:
    assert rates(4, lr_warmup_steps_ratio=0.5) == [0.5, 1.0, 1.0, 1.0]
    assert rates(4, lr_warmup_steps_ratio=0.5, lr_warmup_steps=0) == [1.0, 1.0, 1.0, 1.0]


def test_cosine_falls_from_the_peak_after_warm_up() -> None:
    found = rates(6, lr_scheduler_type="cosine", lr_warmup_steps=2)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[3:] == pytest.approx([0.8535534, 0.5, 0.1464466])


def test_cosine_never_goes_below_its_lowest() -> None:
    found = [
        learning_rate(OptimConfig(lr=2.0, lr_scheduler_type="cosine", min_lr_ratio=0.1), at, 5) for at in range(1, 9)
    ]
    assert found == sorted(found, reverse=True)
    assert found[5:] == pytest.approx([0.2, 0.2, 0.2])


def test_more_cycles_rise_again() -> None:
    found = rates(8, lr_scheduler_type="cosine", num_cycles=1.0)
    assert found[4] == pytest.approx(0.0) and found[7] > 0.8
