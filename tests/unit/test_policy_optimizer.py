import pytest

from treadle.config.training import OptimConfig
from treadle.policy.optimizer import learning_rate_at


def rates(total: int, **keys: object) -> list[float]:
    return [learning_rate_at(OptimConfig(lr=1.0, **keys), step, total) for step in range(1, total + 1)]


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
        learning_rate_at(OptimConfig(lr=2.0, lr_scheduler_type="cosine", min_lr_ratio=0.1), at, 5) for at in range(1, 9)
    ]
    assert found == sorted(found, reverse=True)
    assert found[5:] == pytest.approx([0.2, 0.2, 0.2])


def test_more_cycles_rise_again() -> None:
    found = rates(8, lr_scheduler_type="cosine", num_cycles=1.0)
    assert found[4] == pytest.approx(0.0) and found[7] > 0.8


def test_linear_falls_in_equal_parts_after_warm_up() -> None:
    """Written out: peak times what is left of the steps after warm-up, over all of them."""
    found = rates(10, lr_scheduler_type="linear", lr_warmup_steps=2)
    assert found == pytest.approx([0.5, 1.0] + [(8 - done) / 8 for done in range(8)])
    lowest = rates(10, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.2)
    assert lowest == pytest.approx([0.5, 1.0] + [0.2 + 0.8 * (8 - done) / 8 for done in range(8)])


def test_wsd_stays_and_then_falls_over_its_last_steps() -> None:
    found = rates(20, lr_scheduler_type="wsd", lr_warmup_steps=2, wsd_decay_ratio=0.2)
    assert found == pytest.approx([0.5, 1.0] + [1.0] * 14 + [1.0, 0.75, 0.5, 0.25])
    assert rates(30, lr_scheduler_type="wsd")[26:] == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3])


def test_wsd_that_falls_from_warm_up_on_is_linear_and_one_that_never_falls_constant() -> None:
    keys = {"lr_warmup_steps": 3, "min_lr_ratio": 0.1}
    assert rates(9, lr_scheduler_type="wsd", wsd_decay_ratio=1.0, **keys) == rates(
        9, lr_scheduler_type="linear", **keys
    )
    assert rates(9, lr_scheduler_type="wsd", wsd_decay_ratio=0.0, **keys) == rates(9, **keys)


@pytest.mark.parametrize(("ours", "theirs"), [("linear", "linear"), ("wsd", "warmup_stable_decay")])
def test_the_shape_after_warm_up_is_that_of_transformers(ours: str, theirs: str) -> None:
    """Whose first step is step 0: one earlier than ours, and shifted by the step that warm-up does not waste."""
    from torch import nn, optim
    from transformers import get_scheduler

    total, warmup, decay = 24, 4, 6
    more = {"num_decay_steps": decay, "decay_type": "linear"} if ours == "wsd" else {}
    adam = optim.AdamW([nn.Parameter()], lr=1.0)
    schedule = get_scheduler(theirs, adam, warmup, total, scheduler_specific_kwargs=more)
    expected = []
    for _ in range(total):
        expected.append(schedule.get_last_lr()[0])
        adam.step()
        schedule.step()
    found = rates(total, lr_scheduler_type=ours, lr_warmup_steps=warmup, wsd_decay_ratio=decay / total)
    assert found[warmup:] == pytest.approx(expected[warmup:])
