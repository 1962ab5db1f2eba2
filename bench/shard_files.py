"""Sharded state on disk: `policy/shard_files.py` beside torch's distributed checkpoint, on the same tensors.

    PYTHONPATH=. python bench/shard_files.py [--ranks 2] [--mb 256] [--rounds 5]

Each rank holds rows of the same DTensors (gloo, CPU). Both write them, and both read them back on as many ranks;
medians over rounds that take turns, without the first, with files in the page cache. Sizes are of the folders.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from treadle.policy.shard_files import ShardFile, ShardReader, local_row_range, local_rows, save_shards


def _ours_save(folder: Path, state: dict[str, Any], rank: int, ranks: int) -> None:
    folder.mkdir(exist_ok=True)
    save_shards(folder, "optimizer", state, ShardFile(rank, ranks))
    dist.barrier()


def _ours_load(folder: Path, state: dict[str, Any]) -> None:
    reader = ShardReader(folder, "optimizer")
    for name, tensor in state.items():
        local_rows(tensor).copy_(reader.read(name, local_row_range(tensor)))
    dist.barrier()


def _theirs_save(folder: Path, state: dict[str, Any]) -> None:
    dcp_save(state, storage_writer=FileSystemWriter(folder, sync_files=False))


def _theirs_load(folder: Path, state: dict[str, Any]) -> None:
    dcp_load(state, storage_reader=FileSystemReader(folder))


def _rank(rank: int, ranks: int, mb: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    count, width = 64, 1024
    rows = mb * (1 << 20) // (4 * count * width)
    state = {f"layer.{at}": distribute_tensor(torch.randn(rows, width), mesh, [Shard(0)]) for at in range(count)}
    wanted = {name: local_rows(tensor).clone() for name, tensor in state.items()}
    took: dict[str, list[float]] = {}
    for at in range(rounds):
        ours, theirs = Path(folder) / f"ours{at}", Path(folder) / f"theirs{at}"
        for name, call in {
            "ours save": lambda ours=ours: _ours_save(ours, state, rank, ranks),
            "dcp save": lambda theirs=theirs: _theirs_save(theirs, state),
            "ours load": lambda ours=ours: _ours_load(ours, state),
            "dcp load": lambda theirs=theirs: _theirs_load(theirs, state),
        }.items():
            if name.endswith("load"):
                for tensor in state.values():
                    local_rows(tensor).zero_()
            dist.barrier()
            began = time.perf_counter()
            call()
            took.setdefault(name, []).append(time.perf_counter() - began)
            assert all(torch.equal(local_rows(state[key]), value) for key, value in wanted.items()), name
    if rank == 0:
        sizes = {
            kind: sum(file.stat().st_size for file in (Path(folder) / f"{kind}0").iterdir())
            for kind in ("ours", "theirs")
        }
        medians = {name: statistics.median(seconds[1:]) for name, seconds in took.items()}
        Path(folder, "found.json").write_text(json.dumps({"s": medians, "bytes": sizes}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options.ranks, options.mb, options.rounds, folder), nprocs=options.ranks)
        found = json.loads(Path(folder, "found.json").read_text())
    for name, seconds in found["s"].items():
        print(f"{name:10} {seconds:.3f} s  {options.mb / seconds:,.0f} MB/s")
    print(f"save: ours takes {found['s']['ours save'] / found['s']['dcp save']:.2f} of DCP's time")
    print(f"load: ours takes {found['s']['ours load'] / found['s']['dcp load']:.2f} of DCP's time")
    print(f"bytes: ours {found['bytes']['ours']:,}, DCP {found['bytes']['theirs']:,}")


if __name__ == "__main__":
    main()
