"""One process of a sharded run: its seat among the others, and the networks it holds a part of.

Built inside the process, whoever started it. Runs what it is given, one thing at a time. Knows no pipe and no cluster.
Waits: `create` waits for all other ranks, and collectives wait for each other; both end after `timeout_s`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from treadle.config.actor import FSDPActorConfig, FSDPCriticConfig, FSDPRefConfig
from treadle.config.algorithm import RolloutCorrectionConfig
from treadle.config.model import ModelConfig
from treadle.policy.fsdp import FSDPCritic, FSDPPolicy, FSDPReference
from treadle.policy.learner import Sampling

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Numbers on the CPU (logprobs, figures) travel over gloo wherever weights are."""


_TCPStore: Any = distributed.TCPStore  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class NetworksSpec:
    """The networks of a run, as sections."""

    model: ModelConfig
    actor: FSDPActorConfig
    rollout_correction: RolloutCorrectionConfig
    sampling: Sampling
    total_steps: int
    ref: FSDPRefConfig | None = None
    """None: no reference policy."""
    critic: FSDPCriticConfig | None = None
    """None: no critic."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place among the others."""

    rank: int
    size: int
    host: str
    """Where the `Store` is that ranks find each other through."""
    port: int
    device: str
    """`cpu`, or `cuda:0` and so on."""
    timeout_s: float
    """How long ranks wait for each other, when they meet and in every collective."""
    num_threads: int | None = None
    """CPU threads of this rank; None for torch's own choice."""


class Store:
    """The place where ranks find each other, at a free port of this process. `host` is its address for all of them.

    Lives as long as this object.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._store = _TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.host = host
        self.port: int = self._store.port


class FSDPRank:
    """A rank at work."""

    policy: FSDPPolicy
    reference: FSDPReference | None
    critic: FSDPCritic | None

    def __init__(self, seat: Seat, spec: NetworksSpec) -> None:
        self.seat = seat
        self._device = torch.device(seat.device)
        self.load(spec)

    @classmethod
    def create(cls, seat: Seat, spec: NetworksSpec) -> "FSDPRank":
        """Meet the other ranks and load the networks with them."""
        _join(seat)
        return cls(seat, spec)

    def load(self, spec: NetworksSpec) -> None:
        """Load networks, in the place of those there are. All ranks at once."""
        sampling, device = spec.sampling, self._device
        self.policy = FSDPPolicy.create(
            model=spec.model,
            actor=spec.actor,
            rollout_correction=spec.rollout_correction,
            sampling=sampling,
            total_steps=spec.total_steps,
            device=device,
        )
        self.reference = self.critic = None
        if spec.ref is not None:
            self.reference = FSDPReference.create(
                model=spec.model,
                ref=spec.ref,
                temperature=sampling.temperature,
                device=device,
                longest=sampling.longest,
            )
        if spec.critic is not None:
            self.critic = FSDPCritic.create(
                model=spec.model,
                critic=spec.critic,
                actor=spec.actor,
                response_length=sampling.response_length,
                total_steps=spec.total_steps,
                device=device,
                longest=sampling.longest,
            )

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(self, *args)` returns. All ranks run the same one; it may be collective."""
        return function(self, *args)

    def close(self) -> None:
        """Leave the others."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _join(seat: Seat) -> None:
    """Meet the other ranks."""
    device = torch.device(seat.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if seat.num_threads is not None:
        torch.set_num_threads(seat.num_threads)
    patience = timedelta(seconds=seat.timeout_s)
    store = _TCPStore(seat.host, seat.port, is_master=False, timeout=patience)
    distributed.init_process_group(
        BACKENDS[device.type], store=store, rank=seat.rank, world_size=seat.size, timeout=patience
    )
