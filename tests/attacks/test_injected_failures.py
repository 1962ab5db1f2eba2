"""Failures that have nothing to do with the answers leave the statistics of groups where they are.

`bench/injected_failures.py` prints them for failures of 1 to 50 %.
"""

import pytest

from bench.injected_failures import Statistics, measure

TASKS, N = 60, 8


@pytest.fixture(scope="module")
def without(tmp_path_factory) -> Statistics:
    return measure(0.0, TASKS, N, 0, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_failures_move_neither_the_mean_reward_nor_the_mean_advantage(rate, without, tmp_path):
    found = measure(rate, TASKS, N, 0, tmp_path / "model")
    assert without.failed == 0.0
    assert found.failed == pytest.approx(rate, abs=0.08), "they were injected"
    assert found.advantage == pytest.approx(0.0, abs=1e-5)
    # As zeros they would lower it by half of what it is; the sampling of half a group moves it by 0.02.
    assert found.reward == pytest.approx(without.reward, abs=0.06)
    assert found.right > 0 > found.wrong
