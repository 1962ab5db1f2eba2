"""One rank of a sharded run: it joins the process group and holds its shards of the networks.

Built inside the rank's process. Runs the functions it is given, one at a time. Knows no pipe and no cluster.
Waits: `create` waits for all other ranks, and collectives wait for each other; both end after `timeout_s`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any

import torch
from torch import distributed

from treadle.config.rollout import ModelConfig
from treadle.config.training import FSDPActorConfig, FSDPCriticConfig, FSDPRefConfig, RolloutCorrectionConfig
from treadle.policy.fsdp import FSDPCritic, FSDPPolicy, FSDPReference
from treadle.policy.policy import Sampling
from treadle.policy.reference import FrozenReference
from treadle.policy.rendezvous import RendezvousServer, join_store

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Numbers on the CPU (logprobs, figures) travel over gloo wherever weights are."""


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
class RankSpec:
    """A rank's place among the others."""

    rank: int
    size: int
    host: str
    """Where the `RendezvousStore` is that ranks find each other through."""
    port: int
    key: str
    """What all entries of that store lie under."""
    device: str
    """`cpu`, or `cuda:0` and so on."""
    timeout_s: float
    """How long ranks wait for each other, when they meet and in every collective."""
    num_threads: int | None = None
    """CPU threads of this rank; None for torch's own choice."""


class RendezvousStore:
    """The place where ranks find each other, at a free port of this process. `host` is its address for all of them.

    Listens on that address alone, and every entry lies under a key that only the ranks are told. Lives as long as this
    object.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.key = token_hex(16)
        self._server = RendezvousServer(host, self.key)
        self.port = self._server.port


class FSDPRank:
    """A rank at work."""

    policy: FSDPPolicy
    reference: FSDPReference | FrozenReference | None
    critic: FSDPCritic | None

    def __init__(self, rank_spec: RankSpec, spec: NetworksSpec) -> None:
        self.rank_spec = rank_spec
        self._device = torch.device(rank_spec.device)
        self.load(spec)

    @classmethod
    def create(cls, rank_spec: RankSpec, spec: NetworksSpec) -> "FSDPRank":
        """Meet the other ranks and load the networks with them."""
        _join(rank_spec)
        return cls(rank_spec, spec)

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
            self.reference = self.policy.frozen_reference(spec.ref) or FSDPReference.create(
                model=spec.ref.model_of(spec.model),
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


def _join(rank_spec: RankSpec) -> None:
    """Meet the other ranks."""
    device = torch.device(rank_spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank_spec.num_threads is not None:
        torch.set_num_threads(rank_spec.num_threads)
    timeout = timedelta(seconds=rank_spec.timeout_s)
    store = join_store(rank_spec.host, rank_spec.port, rank_spec.key, timeout)
    distributed.init_process_group(
        BACKENDS[device.type], store=store, rank=rank_spec.rank, world_size=rank_spec.size, timeout=timeout
    )
