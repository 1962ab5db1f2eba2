"""Weight transports: the one that a config asks for, as a record that can be sent to the process with the weights.

Owns the step from the chosen way to a working transport: shared memory, collective or disk. Refuses to know engines and
where they run: how many processes will read, and on which device, is told.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from treadle.config import TrainConfig
from treadle.config.transport import TransportKind, choose_transport, uses_nccl, weights_directory
from treadle.weights.collective import CollectiveTransport
from treadle.weights.disk import DiskTransport, remove_leftovers
from treadle.weights.shared_memory import SharedMemoryTransport
from treadle.weights.sync import Transport


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """A way with everything that it takes; `open` where the weights are."""

    way: TransportKind
    receivers: int
    """Processes that will read: for an engine of several workers, each of them."""
    device: str
    """Where weights are on their way: a GPU only if both ends can use it."""
    timeout_s: float
    bucket_bytes: int | None
    directory: Path

    @classmethod
    def of(cls, config: TrainConfig, *, replicas: int, device: str) -> Self:
        """The route of a config. `device` is the policy's for a collective, and the one that both share otherwise."""
        rollout, weights = config.rollout, config.trainer.weights
        way = choose_transport(config)
        return cls(
            way=way,
            receivers=replicas * rollout.tensor_model_parallel_size,
            device="cpu" if way == "collective" and not uses_nccl(config) else device,
            timeout_s=rollout.limits.request_timeout_s,
            bucket_bytes=weights.bucket_bytes(),
            directory=Path(weights_directory(config)).resolve(),
        )

    def open(self, host: str = "127.0.0.1") -> Transport:
        """The transport, in the process that has the weights. `host` is where receivers reach it."""
        if self.way == "collective":
            return CollectiveTransport(
                host=host,
                receivers=self.receivers,
                device=self.device,
                timeout_s=self.timeout_s,
                bucket_bytes=self.bucket_bytes,
            )
        if self.way == "disk":
            return DiskTransport(self.directory, bucket_bytes=self.bucket_bytes)
        assert self.way == "shared", f"{self.way} needs no transport of ours"
        return SharedMemoryTransport(device=self.device, timeout_s=self.timeout_s, bucket_bytes=self.bucket_bytes)

    def clear(self) -> None:
        """Remove what a sender that was killed has left. Not while one is sending."""
        if self.way == "disk":
            remove_leftovers(self.directory)
