"""FSDP2 sharding of a network: `fully_shard` on every layer, then on everything else.

Owns meshes, dtypes, offloading, and when gradients and weights are communicated. Knows no loss and no optimizer.
Each layer is gathered before it computes and freed after it. What is outside the layers (embeddings, last norm, output
layer, tied or not) is one more group, gathered for the whole forward: FSDP sees a forward that ends with logprobs, not
with hidden states, so that the output layer's weight is there when they are computed.
Invariant: between calls every parameter is sharded; a rank holds its own rows, and they are current.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from treadle.algorithm.logprobs import TokenLogprobs
from treadle.config.training import FSDPConfig
from treadle.errors import ConfigError, Mistake
from treadle.policy.critic import ValueNetwork
from treadle.policy.network import DecoderNetwork
from treadle.policy.packed_inputs import PackedRows
from treadle.policy.shard_files import ShardFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")


def make_mesh(device: torch.device, fsdp_config: FSDPConfig, key: str) -> DeviceMesh:
    """All ranks in one row; or in rows of `fsdp_size` that each hold a whole copy. `key` is the network's section."""
    ranks, size = get_world_size(), fsdp_config.fsdp_size
    if size == -1 or size == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    if size < 1 or ranks % size:
        problem = f"{size} does not divide {ranks} ranks"
        raise ConfigError([Mistake(f"{key}.fsdp_config.fsdp_size", problem, size, fix="-1 uses all")])
    return init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("replica", "shard"))


class _WholeForward(nn.Module):
    """A whole forward as a module, for FSDP to see. Its parts are registered; `compute` uses them."""

    def __init__(self, parts: Sequence[nn.Module], compute: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._compute = compute

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        return self._compute(*inputs)


class Sharding:
    """FSDP2 sharding of one network. `parts` are its modules, still without weights; the first holds the layers."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        compute: Callable[..., tuple[Tensor, ...]],
        *,
        mesh: DeviceMesh,
        device: torch.device,
        fsdp_config: FSDPConfig,
        dtype: torch.dtype,
    ) -> None:
        self.mesh = mesh
        self._device = device
        self._fsdp_config = fsdp_config
        self._last: bool | None = None
        self._whole = _WholeForward(parts, compute)
        layers = _find_layers(parts[0])
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        reshard = fsdp_config.reshard_after_forward
        for layer in reversed(layers):
            self._fully_shard(layer, policy, reshard)
        for part in parts[1:]:  # heads, which compute in their own dtype
            self._fully_shard(part, MixedPrecisionPolicy(), False)
        self._fully_shard(self._whole, policy, False)
        if fsdp_config.forward_prefetch:
            for module, following in pairwise([self._whole, *layers]):
                cast(FSDPModule, module).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
        self._materialise()

    def _fully_shard(self, module: nn.Module, policy: MixedPrecisionPolicy, reshard: bool) -> None:
        offload = CPUOffloadPolicy() if self._stays_on_cpu else OffloadPolicy()
        fully_shard(module, mesh=self.mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    def _materialise(self) -> None:
        """Give every parameter memory, and every buffer its place, still without content."""
        self._whole.to_empty(device=CPU if self._stays_on_cpu else self._device)
        for module in self._whole.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name, torch.empty_like(buffer, device=self._device), name not in module._non_persistent_buffers_set
                )

    @property
    def _stays_on_cpu(self) -> bool:
        return self._fsdp_config.offload_policy and self._device.type != "cpu"

    @property
    def _leaves_between_calls(self) -> bool:
        return self._fsdp_config.param_offload and self._device.type != "cpu" and not self._stays_on_cpu

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        return cast("tuple[Tensor, ...]", self._whole(*inputs))

    def begin(self, last: bool) -> None:
        """Say whether a mini batch has more micro batches to come.

        With `reshard_after_forward`, gradients are reduced to this rank's rows after every backward, so memory does
        not grow; only the sum over replicas waits for the last. Without, weights stay gathered and gradients whole
        until the last, which saves most of the traffic.
        """
        if last == self._last:
            return
        self._last, root = last, cast(FSDPModule, self._whole)
        if self._fsdp_config.reshard_after_forward:
            root.set_requires_all_reduce(last)
        else:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)

    def settle(self) -> None:
        """Free what forwards have left gathered."""
        for module in self._whole.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside, parameters are on the device; outside they are in CPU memory, with `param_offload`."""
        if self._leaves_between_calls:
            self._whole.to(self._device)
        try:
            yield
        finally:
            if self._leaves_between_calls:
                self._whole.to(CPU)

    def part(self) -> ShardFile:
        """Which rows this rank writes to a checkpoint."""
        shard, is_first = self.mesh["shard"], self.mesh.ndim == 1 or self.mesh["replica"].get_local_rank() == 0
        return ShardFile(shard.get_local_rank(), shard.size(), is_first)


class ShardedNetwork(DecoderNetwork):
    """Decoder sharded over ranks. `module` has no weights when it comes, and this rank's rows after."""

    def __init__(
        self,
        module: "PreTrainedModel",
        *,
        mesh: DeviceMesh,
        device: torch.device,
        fsdp_config: FSDPConfig,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(module)
        self.device = device
        self.sharding = Sharding(
            [module], self._compute, mesh=mesh, device=device, fsdp_config=fsdp_config, dtype=dtype
        )

    @contextmanager
    def present(self) -> Iterator[None]:
        with self.sharding.present():
            yield

    def logprobs(self, packed: PackedRows, temperature: float) -> TokenLogprobs:
        return TokenLogprobs(*self.sharding(packed, temperature))

    def gradient_norms(self, packed: PackedRows, temperature: float) -> Tensor:
        (norms_M,) = self.sharding(packed, temperature, True)
        return norms_M

    def _compute(self, packed: PackedRows, temperature: float, norms: bool = False) -> tuple[Tensor, ...]:
        if norms:
            return (super().gradient_norms(packed, temperature),)
        found = super().logprobs(packed, temperature)
        return found.logprobs_T, found.entropy_T

    def begin(self, *, last: bool) -> None:
        self.sharding.begin(last)

    def settle(self) -> None:
        self.sharding.settle()


class ShardedValueNetwork(ValueNetwork):
    """Decoder with a head, sharded over ranks. The decoder's output layer is never there."""

    def __init__(
        self,
        module: "PreTrainedModel",
        *,
        mesh: DeviceMesh,
        device: torch.device,
        fsdp_config: FSDPConfig,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(module, torch.device("meta"))
        self.device = device
        self.sharding = Sharding(
            [self.decoder, self.head],
            self._compute,
            mesh=mesh,
            device=device,
            fsdp_config=fsdp_config,
            dtype=dtype,
        )

    def values(self, packed: PackedRows) -> Tensor:
        (values_M1,) = self.sharding(packed)
        return values_M1.squeeze(1)

    def _compute(self, packed: PackedRows) -> tuple[Tensor, ...]:
        return (self.head(self.hidden(packed).float()),)

    def begin(self, *, last: bool) -> None:
        self.sharding.begin(last)

    def settle(self) -> None:
        self.sharding.settle()


def _find_layers(decoder: nn.Module) -> list[nn.Module]:
    """The layers of a decoder, in their order: the parts that transformers can recompute one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in decoder.modules() if isinstance(part, GradientCheckpointingLayer)]
