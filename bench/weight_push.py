"""Bytes per second of each way that weights travel, beside a plain copy in the same run.

    python bench/weight_push.py --megabytes 512 --device cpu

A receiver in a process of its own reads every tensor into memory of its own, as an engine does; nothing is summed up,
so that the transport alone is timed. The checksum that a real push adds on both sides is timed apart.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from treadle.model.checksum import checksum
from treadle.weights.collective import CollectiveTransport
from treadle.weights.disk import DiskTransport
from treadle.weights.local import LocalTransport
from treadle.weights.parcel import HOST_BUCKET_BYTES, Cast
from treadle.weights.sender import Transport


def make_tensors(megabytes: int, device: str) -> dict[str, Tensor]:
    """Layers of 16 MB, in bfloat16."""
    return {f"layer.{at}": torch.randn(2048, 4096, device=device).bfloat16() for at in range(max(1, megabytes // 16))}


def receive(connection: Connection, device: str) -> None:
    """The receiver: tensors of its own, and copies into them."""
    torch.set_num_threads(1)
    held: dict[str, Tensor] = {}
    while (parcel := connection.recv()) is not None:
        for name, tensor in parcel.items():
            if name not in held:
                held[name] = torch.empty_like(tensor, device=device)
            held[name].copy_(tensor)
        if device != "cpu":
            torch.cuda.synchronize()
        connection.send("done")


def measure(transport: Transport, tensors: Mapping[str, Tensor], connection: Connection, repeats: int) -> float:
    """The best of some pushes, after one that warms up."""
    best = float("inf")
    for version in range(repeats + 1):
        began = time.perf_counter()
        connection.send(transport.offer(version, Cast(tensors, None)))
        assert connection.recv() == "done"
        transport.retire(version)
        best = min(best, time.perf_counter() - began if version else best)
    return best


def measure_copy(tensors: Mapping[str, Tensor], repeats: int) -> float:
    """One plain copy of everything into memory that is there already."""
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    best = float("inf")
    for turn in range(repeats + 1):
        began = time.perf_counter()
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
        if next(iter(tensors.values())).is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began if turn else best)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--bucket", type=int, default=HOST_BUCKET_BYTES >> 20, help="megabytes that travel at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors, bucket = make_tensors(options.megabytes, options.device), options.bucket << 20
    size = sum(tensor.nbytes for tensor in tensors.values())
    copy_s = measure_copy(tensors, options.repeats)
    print(
        f"{size / 1e9:.2f} GB on {options.device}; a plain copy: {copy_s * 1e3:.1f} ms, {size / copy_s / 1e9:.1f} GB/s"
    )
    began = time.perf_counter()
    checksum(tensors)
    print(f"checksum of one side: {(time.perf_counter() - began) * 1e3:.1f} ms")
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    receiver = spawned.Process(target=receive, args=(theirs, options.device))
    receiver.start()
    with tempfile.TemporaryDirectory() as folder:
        transports: dict[str, Transport] = {
            "local (shared memory)": LocalTransport(bucket_bytes=bucket),
            "collective (gloo, one machine)": CollectiveTransport(host="127.0.0.1", receivers=1, bucket_bytes=bucket),
            "disk (safetensors)": DiskTransport(Path(folder), bucket_bytes=bucket),
        }
        if options.device != "cpu":
            transports = {"local (CUDA IPC)": LocalTransport(device=options.device, bucket_bytes=bucket)} | transports
        for name, transport in transports.items():
            seconds = measure(transport, tensors, ours, options.repeats)
            ratio = f"{seconds / copy_s:6.2f} x the copy"
            print(f"{name:32} {seconds * 1e3:9.1f} ms {size / seconds / 1e9:8.2f} GB/s {ratio}", flush=True)
    ours.send(None)
    receiver.join()


if __name__ == "__main__":
    main()
