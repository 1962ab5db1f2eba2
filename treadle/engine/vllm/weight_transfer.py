"""Weight transfer into vLLM's workers, through vLLM's own weight-transfer interface and a worker extension.

Owns what happens in each worker process: it opens the transfer it is handed (any map of named tensors that can be
pickled), gives every tensor to vLLM's loader, and computes the checksum of what it gave. With one worker it also reads
the loaded parameters back. Knows no transport. vLLM has transports of its own for CUDA IPC and NCCL; they prove nothing
of what arrived, and one of them needs Ray to import, so all transfers come this way.

What is proven is the checksum of the parameters themselves, put back together from vLLM's fused ones, where that can be
done: one worker, known fusions, no repacking. Where it cannot, it is that of the tensors on their way to the loader.

The loader takes its time: it rebuilds every layer. Once it has shown where each tensor ends up, and that nothing else
is made of it there, later updates are written straight to these places, and proven by reading them back.
"""

import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from treadle.engine.protocol import batches_of
from treadle.model.checksum import RunningChecksum, checksum

BACKEND = "treadle"
"""The name under which vLLM finds this receiver."""

_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""Modules that vLLM lays one below the other in a single parameter, and their order."""

_AS_WRITTEN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Kinds of layers that, on CUDA, compute with their parameters and keep no other form of them."""


class TensorLayout(NamedTuple):
    """What a tensor looked like when it came."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def begins(self, held: Tensor) -> bool:
        """Whether `held` could begin with such a tensor: a vocabulary may have rows added at its end."""
        sizes = len(held.shape) == len(self.shape) and held.shape[1:] == self.shape[1:]
        return sizes and held.dtype == self.dtype and (not self.shape or len(held) >= self.rows)


@dataclass
class TransferInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing is agreed on before the first update."""


@dataclass(kw_only=True)
class TransferUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One update: a pickled map of tensors by their Hugging Face names."""

    transfer: bytes = b""


class ProvenWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Made by vLLM's worker. 0.24 hands in the loader and prepares the layers itself; later versions leave it to us."""

    init_info_cls = TransferInitInfo
    update_info_cls = TransferUpdateInfo

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.kinds: dict[str, TensorLayout] = {}
        self.arrived = ""
        self.torn = False
        """Whether vLLM's loader has got a part of the weights, and not the rest: it cannot begin again."""
        self.places: dict[str, Tensor] = {}
        """Where each tensor lies, if updates may be written there."""
        self._device = next(self.model.parameters()).device  # during an update they have none

    def init_transfer_engine(self, init_info: TransferInitInfo) -> None:
        return None

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(
        self, update_info: TransferUpdateInfo, load_weights: Callable[[Iterator[tuple[str, Tensor]]], Any] | None = None
    ) -> None:
        running = RunningChecksum()
        self.kinds, self.places, self.arrived = {}, {}, ""
        with torch.no_grad():
            (load_weights or self.model.load_weights)(self._counted(pickle.loads(update_info.transfer), running))
        self.arrived, self.torn = running.word(), False

    def write(self, tensors: Mapping[str, Tensor]) -> str:
        """Straight to where they belong; the checksum of what is there then. If it fails, the loader has to mend it."""
        places, self.places = self.places, {}
        if list(tensors) != list(places):
            raise ValueError("the tensors have other names than those that came before")
        with torch.no_grad():
            for batch in batches_of(tensors):
                torch._foreach_copy_([places[name] for name, _ in batch], [tensor for _, tensor in batch])
        self.places = places
        return checksum(places)

    def _counted(self, tensors: Mapping[str, Tensor], running: RunningChecksum) -> Iterator[tuple[str, Tensor]]:
        """Each tensor as it arrives. A copy: the loader keeps it until its layer is whole, the transport does not."""
        for name, tensor in tensors.items():
            mine = tensor.to(self._device, copy=True)
            self.torn = True
            running.add(name, mine)
            self.kinds[name] = TensorLayout(tuple(mine.shape), mine.dtype)
            yield name, mine

    def shutdown(self) -> None:
        self.kinds = {}

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """The sending half of 0.24's interface; ours is `treadle.weights`."""
        raise NotImplementedError("treadle.weights sends")


class WorkerExtension:
    """Methods that vLLM adds to its worker; the server calls them by name."""

    weight_transfer_engine: ProvenWeightTransfer
    model_runner: Any

    def treadle_settle(self) -> tuple[str, bool]:
        """Finish a load: the checksum of this worker's weights, and whether the next update may be written in place."""
        receiver, model = self.weight_transfer_engine, self.model_runner.get_model()
        _repack_tied(model)
        found = _locate(model, receiver.kinds)
        held = checksum(found) if found else receiver.arrived
        if found and held == receiver.arrived and _stays_as_written(model):
            receiver.places = found
        return held, bool(receiver.places)

    def treadle_write(self, transfer: bytes) -> tuple[str, bool]:
        """Take an update in place; the same as `treadle_settle` tells."""
        return self.weight_transfer_engine.write(pickle.loads(transfer)), True

    def treadle_is_torn(self) -> bool:
        """Whether an update broke off in a way that only a new process mends."""
        return self.weight_transfer_engine.torn

    def treadle_processed(self, stream: int, position: int, count: int) -> list[float]:
        """Logprobs of tokens in the distribution they were sampled from; see `keyed`."""
        from treadle.engine.vllm.keyed_sampler import CURRENT

        return CURRENT[0].take_processed(stream, position, count)

    def treadle_watch(self, server: int) -> None:
        """End this replica's processes when the server has gone, however it went."""
        threading.Thread(target=_exit_with_server, args=(os.pidfd_open(server),), name="watch", daemon=True).start()


def _exit_with_server(server: int) -> None:
    select.select([server], [], [])
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _repack_tied(model: nn.Module) -> None:
    """Let layers that share a parameter look at it again.

    vLLM reloads a parameter with the layer it is first named in. Where another layer keeps a packed copy of it, as an
    output layer tied to the embedding does on CPUs, that copy would stay the old one.
    """
    sharing: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.numel() and hasattr(layer, "quant_method"):
            sharing.setdefault(weight.data_ptr(), []).append(layer)
    for layers in sharing.values():
        for layer in layers if len(layers) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]


def _stays_as_written(model: nn.Module) -> bool:
    """Whether nothing is made of the parameters when they are loaded: no packed, quantized or absorbed form of them."""
    if torch.version.cuda is None or not all(parameter.is_cuda for parameter in model.parameters()):
        return False
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    latent = any("MLA" in type(layer).__name__ for layer in model.modules())
    return not latent and all(method is None or type(method).__name__ in _AS_WRITTEN for method in methods)


def _locate(model: nn.Module, kinds: Mapping[str, TensorLayout]) -> dict[str, Tensor]:
    """Where each tensor lies, by its Hugging Face name; empty where they cannot be told apart."""
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    places = {}
    for name, kind in kinds.items():
        found = held[name] if name in held else _unfuse(name, kinds, held)
        if found is None or not kind.begins(found):
            return {}
        places[name] = found[: kind.rows] if kind.shape else found
    return places


def _unfuse(name: str, kinds: Mapping[str, TensorLayout], held: Mapping[str, Tensor]) -> Tensor | None:
    """The rows of a fused parameter that came under `name`."""
    parts = name.split(".")
    fused, order = _FUSED.get(parts[-2] if len(parts) > 1 else "", ("", ()))

    def beside(module: str) -> str:
        return ".".join((*parts[:-2], module, parts[-1]))

    whole = held.get(beside(fused))
    sizes = [kinds[beside(module)].rows if beside(module) in kinds else 0 for module in order]
    if whole is None or sum(sizes) != len(whole):
        return None
    at = order.index(parts[-2])
    return whole[sum(sizes[:at]) : sum(sizes[: at + 1])]


WeightTransferEngineFactory.register_engine(BACKEND, ProvenWeightTransfer)
