"""A run has the same weights whichever way they travel, as a person runs it."""

from pathlib import Path

import pytest

from tests.chaos import Start, tiny_run
from treadle.journal import JournalReader

STEPS = 3
TINY = tiny_run(STEPS)


def train(run_dir: Path, *words: str) -> dict[int, str]:
    """The checksum of each version, as the engines confirmed it."""
    with Start(run_dir, *TINY, *words) as start:
        assert start.end() == 0, start.said()
    with JournalReader.open(run_dir) as reader:
        return {event.fields["version"]: event.fields["checksum"] for event in reader.events(kind="weights")}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Of a run in which nothing travels."""
    return train(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("transport", ["shared", "collective", "disk"])
def test_a_run_has_the_same_weights_whichever_way_they_travel(
    tmp_path: Path, own: dict[int, str], transport: str
) -> None:
    """Two engines in processes of their own, and buckets that are smaller than the model."""
    words = ("rollout.nnodes=1", "rollout.replicas_per_node=2", f"trainer.weights.transport={transport}")
    assert train(tmp_path, *words, "trainer.weights.bucket_mb=1") == own and set(own) == {1, 2, 3}
    left = list((tmp_path / "weights").glob("*"))
    assert not left, "what was written on the way is gone"
