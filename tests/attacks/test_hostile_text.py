"""Hostile outputs through all that reads or prints what a model wrote; `bench/hostile_text.py` makes more of them."""

from tests.hostile import attack


def test_nothing_breaks_and_nothing_escapes() -> None:
    report = attack(1500, seed=7)
    assert report.texts == 1500
    assert not report.broken, "\n".join(report.broken[:5])
