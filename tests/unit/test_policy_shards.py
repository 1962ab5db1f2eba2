from pathlib import Path

import pytest
import torch
from torch import Tensor

from treadle.errors import RunError
from treadle.policy.shard_files import ShardFile, ShardReader, save_shards, write_shard

WEIGHTS = {"a": torch.arange(35.0).view(7, 5), "b": torch.arange(3.0), "a.step": torch.tensor(4.0)}


def cut(tensors: dict[str, Tensor], ranks: int, folder: Path) -> None:
    """What `ranks` ranks would write: equal runs of rows, the last ones shorter or absent."""
    for rank in range(ranks):
        kept, starts = {}, {}
        for name, tensor in tensors.items():
            if not tensor.dim():
                if rank == 0:
                    kept[name], starts[name] = tensor, 0
                continue
            share = -(-len(tensor) // ranks)
            if rank * share < len(tensor):
                kept[name], starts[name] = tensor[rank * share : (rank + 1) * share], rank * share
        write_shard(folder, "model", kept, starts, ShardFile(rank, ranks))


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [range(0, 7), range(2, 5), range(4, 4), range(6, 7)])
def test_rows_are_read_whoever_wrote_them(tmp_path: Path, writers: int, rows: range) -> None:
    cut(WEIGHTS, writers, tmp_path)
    shards = ShardReader(tmp_path, "model")
    assert sorted(shards.names()) == sorted(WEIGHTS)
    assert shards.shape("a") == (7, 5) and shards.shape("b") == (3,) and shards.shape("a.step") == ()
    assert torch.equal(shards.read("a", rows), WEIGHTS["a"][rows.start : rows.stop])
    assert shards.read("a.step", rows).item() == 4


def test_one_device_writes_one_plain_file(tmp_path: Path) -> None:
    save_shards(tmp_path, "model", WEIGHTS)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(ShardReader(tmp_path, "model").read("b", range(1, 3)), WEIGHTS["b"][1:])


def test_a_rank_whose_rows_another_writes_writes_nothing(tmp_path: Path) -> None:
    save_shards(tmp_path, "model", WEIGHTS, ShardFile(0, 2, writes=False))
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    cut(WEIGHTS, 3, tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(RunError, match="does not hold all of model: model-00001-of-00003"):
        ShardReader(tmp_path, "model")
    with pytest.raises(RunError, match="no file"):
        ShardReader(tmp_path, "optimizer")


def test_rows_that_nobody_has_are_refused(tmp_path: Path) -> None:
    cut(WEIGHTS, 2, tmp_path)
    with pytest.raises(RunError, match="1 of rows 6 to 9 of a"):
        ShardReader(tmp_path, "model").read("a", range(6, 9))
