"""Bytes per second of each way that weights travel, beside a plain copy in the same run.

    python bench/weight_push.py --device cpu                     # 128 MB in tensors of 2 MB
    python bench/weight_push.py --ray                            # Ray's object store as well

A receiver in a process of its own reads every tensor into memory of its own, as an engine does; nothing is summed up,
so that the transport alone is timed. The checksum that a real push adds on both sides is timed apart.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from treadle.model.checksum import checksum
from treadle.weights.collective import CollectiveTransport
from treadle.weights.disk import DiskTransport
from treadle.weights.shared_memory import SharedMemoryTransport
from treadle.weights.sync import Transport
from treadle.weights.transfer import CastTensors, tensor_specs


def make_tensors(megabytes: int, each: int, device: str) -> dict[str, Tensor]:
    """Tensors of `each` megabytes, in bfloat16."""
    count = max(1, megabytes // each)
    return {f"layer.{at}": torch.randn(each << 8, 2048, device=device).bfloat16() for at in range(count)}


def receive(connection: Connection, device: str) -> None:
    """The receiver: tensors of its own, and copies into them."""
    torch.set_num_threads(1)
    held: dict[str, Tensor] = {}
    while (transfer := connection.recv()) is not None:
        read(transfer, held, device)
        connection.send("done")


def read(transfer: Mapping[str, Tensor], held: dict[str, Tensor], device: str) -> None:
    for name, tensor in transfer.items():
        if name not in held:
            held[name] = torch.empty_like(tensor, device=device)
        held[name].copy_(tensor)
    if device != "cpu":
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of pushes, and of plain copies between them: whatever else the machine does, both feel it."""

    pushes: Sequence[float]
    copies: Sequence[float]

    def report(self, name: str, size: int) -> None:
        best, ratio = min(self.pushes), min(self.pushes) / min(self.copies)
        usual = median(self.pushes) / median(self.copies)
        speed = f"{best * 1e3:8.1f} ms {size / best / 1e9:6.2f} GB/s"
        print(f"{name:32} {speed}   {ratio:5.2f} x the copy at best, {usual:5.2f} x by the median", flush=True)


def measure(push: Callable[[int], None], tensors: Mapping[str, Tensor], repeats: int) -> Times:
    """Pushes and plain copies in turn, after one of each that warms up."""
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    pushes, copies = [], []
    for version in range(repeats + 1):
        began = time.perf_counter()
        push(version)
        pushed = time.perf_counter()
        read(tensors, targets, next(iter(tensors.values())).device.type)
        pushes.append(pushed - began)
        copies.append(time.perf_counter() - pushed)
    return Times(pushes[1:], copies[1:])


def push_by(transport: Transport, tensors: Mapping[str, Tensor], connection: Connection) -> Callable[[int], None]:
    """One push through a transport, to the receiver at the other end of `connection`."""

    def push(version: int) -> None:
        connection.send(transport.publish(version, CastTensors(tensors, None)))
        assert connection.recv() == "done"
        transport.retire(version)

    return push


class StoreReader:
    """The receiver as an actor of Ray."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self._held: dict[str, Tensor] = {}
        self._device = device

    def read(self, transfer: Mapping[str, Tensor]) -> None:
        read(transfer, self._held, self._device)


def measure_store(tensors: Mapping[str, Tensor], device: str, repeats: int) -> Times:
    """The same through Ray's object store, with a cluster of this machine."""
    import ray

    from treadle.cluster.ray.object_store import pack
    from treadle.cluster.ray.weight_sender import StoredWeights

    size = sum(tensor.nbytes for tensor in tensors.values())
    room = 3 * size + (80 << 20)
    ray.init("local", num_cpus=2, object_store_memory=room, include_dashboard=False, log_to_driver=False)
    reader = ray.remote(StoreReader).options(num_gpus=0).remote(device)

    def push(version: int) -> None:
        ray.get(reader.read.remote(StoredWeights(tensor_specs(tensors), ray.put(pack(tensors)))))

    try:
        return measure(push, tensors, repeats)
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--each", type=int, default=2, help="megabytes of one tensor")
    parser.add_argument("--bucket", type=int, help="megabytes that travel at a time; each way has its own default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ray", action="store_true", help="measure Ray's object store, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors = make_tensors(options.megabytes, options.each, options.device)
    bucket = options.bucket << 20 if options.bucket else None
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{size / 1e9:.2f} GB in {len(tensors)} tensors on {options.device}")
    checksum(tensors)
    began = time.perf_counter()
    checksum(tensors)
    print(f"{'checksum of one side':32} {(time.perf_counter() - began) * 1e3:8.1f} ms")
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    receiver = spawned.Process(target=receive, args=(theirs, options.device), daemon=True)
    receiver.start()
    with tempfile.TemporaryDirectory() as folder:
        transports: dict[str, Transport] = {
            "shared (host memory)": SharedMemoryTransport(bucket_bytes=bucket),
            "collective (gloo, one machine)": CollectiveTransport(host="127.0.0.1", receivers=1, bucket_bytes=bucket),
            "disk (safetensors)": DiskTransport(Path(folder), bucket_bytes=bucket),
        }
        if options.device != "cpu":
            transports = {
                "shared (CUDA IPC)": SharedMemoryTransport(device=options.device, bucket_bytes=bucket)
            } | transports
        for name, transport in transports.items():
            measure(push_by(transport, tensors, ours), tensors, options.repeats).report(name, size)
    ours.send(None)
    receiver.join()
    if options.ray:
        measure_store(tensors, options.device, options.repeats).report("store (Ray, one machine)", size)


if __name__ == "__main__":
    main()
