"""`rollout.stop` in a training run, whose native engine is in the trainer's process and writes no text of its own."""

import asyncio
from pathlib import Path

import pytest

from tests.effects.runs import View, prepared
from treadle.cluster import training as cluster
from treadle.engine.remote import load_decoder
from treadle.journal import JournalReader
from treadle.types import StopReason

STOPS = list("abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])  # the policy's own module, and a module of the engine's own
def test_a_training_run_ends_responses_at_the_stop_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = prepared(
        {
            "rollout.stop": STOPS,
            "rollout.response_length": 32,
            "rollout.dtype": dtype,
            "trainer.total_training_steps": 1,
            "checkpoint.save_freq": 0,
        }
    )
    assert asyncio.run(cluster.train(config, View())).steps == 1
    with JournalReader.open(Path("run")) as reader:
        rows = [entry.trajectory.rows[0] for entry in reader.trajectories()]
    assert len(rows) == 4
    ended = [row.ids for row in rows if row.turns[-1].stop is StopReason.STOP]
    assert ended
    decode = load_decoder(config.model)
    for ids in ended:
        assert _has_stop(decode(ids)) and not _has_stop(decode(ids[:-1])), "the token that completes one is the last"


def _has_stop(text: str) -> bool:
    return any(stop in text for stop in STOPS)
