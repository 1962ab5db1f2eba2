"""Shards: the rows of a DTensor that a rank holds, and safetensors files of such rows.

    optimizer.safetensors                    every row
    optimizer-00001-of-00002.safetensors     the rows of the first of two ranks; where they start is in its metadata

FSDP2 shards a parameter along its first dimension into equal runs of rows; the last ranks may have fewer, or none.
Plain tensors are treated alike. A reader asks for rows, so files of any number of ranks serve any other number, and a
rank reads only its own. Knows nothing of what the tensors mean.
Invariant: the rows of all shards, in the order of the ranks, are the tensor; a set of files is read only if complete.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from treadle.errors import RunError


def local_rows(tensor: Tensor) -> Tensor:
    """The rows of a tensor on this rank: a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor. Collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_row_range(tensor: Tensor) -> range:
    """The range of a tensor's rows on this rank."""
    if not tensor.dim():
        return range(0)
    if not isinstance(tensor, DTensor):
        return range(len(tensor))
    dimension = _shard_dimension(tensor)
    if dimension is None:
        return range(len(tensor))
    share = -(-tensor.shape[0] // tensor.device_mesh.size(dimension))
    start = min(share * tensor.device_mesh.get_local_rank(dimension), tensor.shape[0])
    here = range(start, min(start + share, tensor.shape[0]))
    assert len(here) == len(tensor.to_local()), "FSDP shards parameters into equal runs of rows"
    return here


@torch.no_grad()
def shard_like(part: Tensor, tensor: Tensor) -> Tensor:
    """A copy of rows that belong here, as a tensor sharded like another, on the same device."""
    copy = torch.empty_like(tensor, dtype=part.dtype)
    local_rows(copy).copy_(part)
    return copy


@torch.no_grad()
def gather_full(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The whole tensor on `device`, cast to `dtype` before it is sent. Collective: every rank must call it."""
    part = local_rows(tensor.detach()).to(device, dtype if tensor.is_floating_point() else None)
    if not isinstance(tensor, DTensor):
        return part
    # The rows may be in CPU memory (offload), where the ranks' collectives cannot read them.
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride).full_tensor()


def _shard_dimension(tensor: DTensor) -> int | None:
    """The dimension of its mesh along which it is sharded; None where it is not."""
    found = [at for at, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    assert len(found) <= 1 and all(cast(Shard, tensor.placements[at]).dim == 0 for at in found), "FSDP shards rows once"
    return found[0] if found else None


STARTS = "treadle_starts"
_FILE = re.compile(r"(?P<name>.+?)(-(?P<part>\d{5})-of-(?P<count>\d{5}))?\.safetensors")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """Which file of how many a rank writes. `writes` is false where another rank holds the same rows."""

    index: int = 0
    count: int = 1
    writes: bool = True

    def file(self, name: str) -> str:
        middle = f"-{self.index + 1:05d}-of-{self.count:05d}" if self.count > 1 else ""
        return f"{name}{middle}.safetensors"


WHOLE_FILE = ShardFile()


def save_shards(folder: Path, name: str, tensors: Mapping[str, Tensor], part: ShardFile = WHOLE_FILE) -> None:
    """Write the rows that are here. What has no rows, such as a step count, is in the first file."""
    if part.writes:
        here = {key: (local_row_range(tensor), tensor) for key, tensor in tensors.items()}
        kept = {key: item for key, item in here.items() if item[0] or (part.index == 0 and not item[1].dim())}
        starts = {key: rows.start for key, (rows, _) in kept.items()}
        write_shard(folder, name, {key: local_rows(tensor.detach()) for key, (_, tensor) in kept.items()}, starts, part)


def write_shard(
    folder: Path, name: str, tensors: Mapping[str, Tensor], starts: Mapping[str, int], part: ShardFile
) -> None:
    """Write one file: `tensors` are rows of larger ones, from `starts` on."""
    metadata = {STARTS: json.dumps(dict(starts))} if part.count > 1 else None
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / part.file(name), metadata)


@dataclass(frozen=True, slots=True)
class _StoredShard:
    file: Any
    start: int
    shape: tuple[int, ...]

    def overlaps(self, rows: range) -> bool:
        return max(rows.start, self.start) < min(rows.stop, self.start + self.shape[0])


class ShardReader:
    """Reader of a set of shard files. Rows are read on request."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._shards: dict[str, list[_StoredShard]] = defaultdict(list)
        for path in _shard_files(folder, name):
            self._add(safe_open(str(path), framework="pt"))

    def _add(self, file: Any) -> None:
        starts: dict[str, int] = json.loads((file.metadata() or {}).get(STARTS, "{}"))
        for key in file.keys():  # noqa: SIM118  (a file is no mapping)
            self._shards[key].append(_StoredShard(file, starts.get(key, 0), tuple(file.get_slice(key).get_shape())))

    def names(self) -> list[str]:
        return list(self._shards)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        shards = self._shards[key]
        first = shards[0].shape
        return (sum(shard.shape[0] for shard in shards), *first[1:]) if first else ()

    def read(self, key: str, rows: range) -> Tensor:
        """Some rows of a tensor; all of one that has none."""
        shards = sorted(self._shards[key], key=lambda shard: shard.start)
        if not shards[0].shape:
            return cast(Tensor, shards[0].file.get_tensor(key))
        parts = [_rows(shard, key, rows) for shard in shards if shard.overlaps(rows)]
        found = torch.cat(parts) if parts else torch.empty(0, *shards[0].shape[1:])
        if len(found) != len(rows):
            raise RunError(f"{self._folder} has {len(found)} of rows {rows.start} to {rows.stop} of {key}")
        return found


def _rows(shard: _StoredShard, key: str, rows: range) -> Tensor:
    start, stop = max(rows.start - shard.start, 0), min(rows.stop - shard.start, shard.shape[0])
    return cast(Tensor, shard.file.get_slice(key)[start:stop])


def _shard_files(folder: Path, name: str) -> list[Path]:
    """The files of a set, in order; a RunError where one is missing."""
    matches = [(path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob(f"{name}*.safetensors"))]
    found = [(path, match) for path, match in matches if match and match["name"] == name]
    wanted = {int(match["count"] or 1) for _, match in found}
    if len(wanted) != 1 or wanted != {len(found)}:
        have = ", ".join(path.name for path, _ in found) or "no file"
        raise RunError(f"{folder} does not hold all of {name}: {have}")
    return [path for path, _ in found]
