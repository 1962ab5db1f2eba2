"""Adapters as models: one base model in memory, and any number of LoRA adapters that take turns in its weights.

    base                 the module, and a copy of the weights that adapters change
    adapter weights      factors of some modules: of a trained model as it is, or as it was when a sampler was saved
    merge                makes the module that model: base + scale * up @ down, in place; it costs one pass over weights

Training and the engine compute with the merged weight, so a sampler and a trained model with the same factors see the
same bits. The output layer may have an adapter too: a model that ties it to the embedding has it untied here.
Owns the module's weights and which adapter is in them. Knows no optimizer, no request and no file.
Invariant: `merged` names the adapter whose weights the module has, bit for bit; None is the base.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treadle.errors import ConfigError, Mistake
from treadle.model.causal_lm import untie_output_layer
from treadle.model.checksum import RunningChecksum
from treadle.model.lora import LoraLinear, LoraSettings, linear_modules, merge_factors
from treadle.tinker.refusals import RequestFailed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALPHA = 32.0
"""LoRA's alpha, as Tinker has it: the client sends a rank alone."""

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MAX_RANK = 512


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What a client chooses of an adapter."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def settings(self) -> LoraSettings:
        return LoraSettings(self.rank, ALPHA)


@dataclass(frozen=True, eq=False, slots=True)
class AdapterWeights:
    """The factors of an adapter, which nothing changes any more."""

    shape: AdapterShape
    factors: Mapping[str, tuple[Tensor, Tensor]] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for pair in self.factors.values() for part in pair)


class AdapterBase:
    """A module that adapters take turns in. `checksum` is of the base's weights, which adapters are trained on."""

    def __init__(self, module: "PreTrainedModel") -> None:
        self.module = module
        head = untie_output_layer(module)
        if head is None:
            problem = f"the output layer of {type(module).__name__} is no linear module, and cannot have an adapter"
            raise ConfigError([Mistake("model.path", problem, module.name_or_path)])
        self.head = head
        module.requires_grad_(False)
        self.head_name = next(name for name, part in module.named_modules() if part is self.head)
        self.linears = {**linear_modules(module), self.head_name: self.head}
        self.checksum = _checksum(module)
        self._frozen = {name: part.weight.detach().clone() for name, part in self.linears.items()}
        self.merged: AdapterWeights | None = None
        self._has_experts = any(parameter.dim() > 2 for parameter in module.parameters())

    @property
    def device(self) -> torch.device:
        return self.module.device

    def targets(self, shape: AdapterShape) -> dict[str, nn.Linear]:
        """The modules that get an adapter; a RequestFailed where there would be none, or experts would be left out."""
        if not 1 <= shape.rank <= MAX_RANK:
            raise RequestFailed(f"lora_config.rank {shape.rank} must be between 1 and {MAX_RANK}")
        if shape.train_mlp and self._has_experts:
            raise RequestFailed(
                "lora_config.train_mlp: this model's experts are not linear modules, and cannot have adapters here: "
                "give train_mlp=False"
            )
        chosen = {
            name: part
            for name, part in self.linears.items()
            if (shape.train_unembed if part is self.head else self._trains(name, shape))
        }
        if not chosen:
            raise RequestFailed("lora_config: train_attn, train_mlp and train_unembed leave nothing to train")
        return chosen

    def _trains(self, name: str, shape: AdapterShape) -> bool:
        is_attention = any(part in _ATTENTION for part in name.split("."))
        return shape.train_attn if is_attention else shape.train_mlp

    def create(self, shape: AdapterShape, seed: int) -> dict[str, LoraLinear]:
        """New adapters without effect; the same for a seed."""
        adapters = {name: LoraLinear(part, shape.settings, self.device) for name, part in self.targets(shape).items()}
        for name, adapter in adapters.items():
            adapter.initialize(seed, name)
        return adapters

    @torch.no_grad()
    def merge(self, adapter: AdapterWeights | None) -> bool:
        """Make the module the model with this adapter; whether anything had to change. Where it fails: the base."""
        if adapter is self.merged:
            return False
        before = self.merged.factors.keys() if self.merged is not None else ()
        factors = adapter.factors if adapter is not None else {}
        try:
            for name in {**dict.fromkeys(before), **dict.fromkeys(factors)}:
                weight = self._frozen[name]
                if name in factors:
                    assert adapter is not None
                    weight = merge_factors(weight, *factors[name], adapter.shape.settings.scale)
                self.linears[name].weight.copy_(weight)
        except BaseException:
            for name, frozen in self._frozen.items():
                self.linears[name].weight.copy_(frozen)
            self.merged = None
            raise
        self.merged = adapter
        return True

    @contextmanager
    def training(self, adapters: Mapping[str, LoraLinear]) -> Iterator[None]:
        """Inside, gradients reach these adapters' factors. The module must be merged with them."""
        head = adapters.get(self.head_name)
        inner = [adapter for adapter in adapters.values() if adapter is not head]
        for adapter in inner:
            adapter.module.forward = adapter  # type: ignore[assignment]
        self.head.weight.requires_grad_(head is not None)
        try:
            yield
            if head is not None and self.head.weight.grad is not None:
                _add_gradients(head, self.head.weight.grad)
        finally:
            for adapter in inner:
                del adapter.module.forward  # the class has its own
            self.head.weight.requires_grad_(False)
            self.head.weight.grad = None


@torch.no_grad()
def _checksum(module: nn.Module) -> str:
    """The weights of a base model as one word: the same on a CPU, which has them in fp32, and on a GPU in bf16."""
    running = RunningChecksum()
    for name, parameter in module.named_parameters():
        running.add(name, parameter.detach().bfloat16())
    return running.word()


@torch.no_grad()
def _add_gradients(adapter: LoraLinear, merged: Tensor) -> None:
    """The factors' share of a gradient of their merged weight."""
    grad, scale = merged.float(), adapter.settings.scale
    pairs = ((adapter.up, grad @ adapter.down.T), (adapter.down, adapter.up.T @ grad))
    for factor, share in [(factor, share * scale) for factor, share in pairs]:
        factor.grad = share if factor.grad is None else factor.grad + share
