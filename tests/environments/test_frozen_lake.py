"""The recipe frozen_lake trains as it stands, with Gymnasium in an interpreter of its own."""

import sys

import pytest

from tests.environments.test_adapters import PYTHON, ROOT
from treadle.cli.main import main
from treadle.inspect.run_records import RunRecords

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test-environments builds .venv-environments")


def test_the_lake_is_learned(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["treadle"])
    words = [f"logging.run_dir={tmp_path}", f"rollout.multi_turn.environment_python={PYTHON}"]
    steps = ["trainer.total_training_steps=5", "data.val_max_samples=8"]
    with pytest.raises(SystemExit) as left:
        main(["train", "frozen_lake", *words, *steps])
    assert left.value.code == 0
    records = RunRecords(tmp_path)
    first, last = ([one.reward for one in records.select(step) if one.reward is not None] for step in (1, 5))
    assert sum(last) / len(last) > sum(first) / len(first) + 0.2
