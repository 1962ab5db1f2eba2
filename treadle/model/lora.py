"""LoRA: low-rank adapters of linear modules, merged into the weight that the module computes with.

    merged = frozen + scale * up @ down        down: [r, in], up: [out, r], both fp32; scale: alpha / r

A module computes with its merged weight, in training too: one product in forward and one for the input's gradient, as
without an adapter, and the factors' gradients are products with r columns. So training, a push and an engine that
shares the module see the same bits. The factors are not part of the module's tree: its parameters, their names and its
files stay those of the model. Owns the choice of modules, their forward and the merge. Knows no optimizer and no files.
Invariant: outside a backward, a module with an adapter computes what a plain one with the same weight computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import sqrt
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from treadle.config.training import ALL_LINEAR, LoraConfig
from treadle.errors import ConfigError, Mistake, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TARGETS_KEY = "actor.lora.target_modules"
EXCLUDE_KEY = "actor.lora.exclude_modules"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What adapters of one model have in common."""

    r: int
    alpha: float
    use_rslora: bool = False

    @classmethod
    def of(cls, lora: LoraConfig) -> "LoraSettings":
        assert lora.r is not None, "asked for adapters"
        return cls(lora.r, 2.0 * lora.r if lora.alpha is None else lora.alpha, lora.use_rslora)

    @property
    def scale(self) -> float:
        return self.alpha / (sqrt(self.r) if self.use_rslora else self.r)


class LoraLinear:
    """Takes the place of a linear module's forward. `down` and `up` are trained; the module's weight is the merged one.

    Starts without effect: `up` is 0.
    """

    def __init__(self, module: nn.Linear, settings: LoraSettings, device: torch.device) -> None:
        self.module = module
        self.settings = settings
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.down = nn.Parameter(torch.zeros(settings.r, module.in_features, **options))
        self.up = nn.Parameter(torch.zeros(module.out_features, settings.r, **options))

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        if not torch.is_grad_enabled():
            return linear(x, module.weight, module.bias)
        factors = (self.down, self.up, self.settings.scale)
        return cast(Tensor, _MergedProduct.apply(x, module.weight, module.bias, *factors))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def initialize(self, seed: int, name: str) -> None:
        """Random values in `down`, uniform as a linear layer's; the same for a seed and a name, wherever they are."""
        number = int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=7).digest())
        generator = torch.Generator().manual_seed(number)
        bound = 1 / sqrt(self.module.in_features)
        self.down.copy_(torch.empty(self.down.shape).uniform_(-bound, bound, generator=generator))


class _MergedProduct(torch.autograd.Function):
    """x @ merged.T + bias. Gradients reach x and the factors; the merged weight is a constant to autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, down, up)
        ctx.scale = scale
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        rows, given = grad.flatten(0, -2), x.flatten(0, -2)
        grad_up = _wide_product(rows.T, given @ down.to(x.dtype).T).mul_(ctx.scale)
        grad_down = _wide_product((rows @ up.to(grad.dtype)).T, given).mul_(ctx.scale)
        return grad_x, None, None, grad_down, grad_up, None


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in fp32. CPUs have no narrow product with a wide result."""
    if left.dtype == torch.float32:
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


@torch.no_grad()
def merge_factors(frozen: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """frozen + scale * up @ down, computed in fp32 and rounded once to the dtype of `frozen`."""
    down, up = down.to(frozen.device, torch.float32), up.to(frozen.device, torch.float32)
    return torch.addmm(frozen.float(), up, down, alpha=scale).to(frozen.dtype)


def find_targets(module: "PreTrainedModel", lora: LoraConfig) -> dict[str, nn.Linear]:
    """The linear modules that a config gives adapters, by name, in the model's order; refused where it names others."""
    linears, experts = linear_modules(module), expert_modules(module)
    for key, names in ((TARGETS_KEY, lora.target_modules), (EXCLUDE_KEY, lora.exclude_modules)):
        for name in names:
            known = [*linears, *(experts if key == EXCLUDE_KEY else ())]
            if name != ALL_LINEAR and not any(_ends_with(found, name) for found in known):
                raise _unknown_target(module, key, name, linears)
    _refuse_silent_experts(module, lora, experts)
    chosen = {
        name: found
        for name, found in linears.items()
        if ALL_LINEAR in lora.target_modules or any(_ends_with(name, target) for target in lora.target_modules)
        if ALL_LINEAR not in lora.exclude_modules and not any(_ends_with(name, end) for end in lora.exclude_modules)
    }
    if not chosen:
        raise ConfigError([Mistake(TARGETS_KEY, "no module is left with an adapter", list(lora.target_modules))])
    return chosen


def linear_modules(module: "PreTrainedModel") -> dict[str, nn.Linear]:
    """The modules that may have an adapter: plain linear ones, without the output layer."""
    output = cast(Any, module).get_output_embeddings()
    return {name: part for name, part in module.named_modules() if type(part) is nn.Linear and part is not output}


def expert_modules(module: "PreTrainedModel") -> dict[str, nn.Module]:
    """The modules that hold the matrices of all experts of a layer in one tensor (MoE), which no adapter fits."""
    return {
        name: part
        for name, part in module.named_modules()
        if any(parameter.dim() == 3 for parameter in part.parameters(recurse=False))
    }


def _refuse_silent_experts(module: "PreTrainedModel", lora: LoraConfig, experts: Mapping[str, nn.Module]) -> None:
    """`all-linear` of a mixture of experts would leave most of its numbers without an adapter: that must be asked for.

    Naming modules asks for exactly those; `exclude_modules` may name the experts.
    """
    left = [name for name in experts if not any(_ends_with(name, end) for end in lora.exclude_modules)]
    if ALL_LINEAR not in lora.target_modules or not left:
        return
    size = sum(part.numel() for name in left for part in experts[name].parameters(recurse=False))
    total, end = sum(part.numel() for part in module.parameters()), left[0].rpartition(".")[2]
    problem = (
        f"{type(module).__name__} holds its experts as tensors of three dimensions ({left[0]} and {len(left) - 1} "
        f"more: {size:,} of {total:,} parameters), which cannot have an adapter"
    )
    fix = (
        f"set {EXCLUDE_KEY}=[{end}] to leave them frozen and adapt the rest, or train all parameters: actor.lora.r=null"
    )
    raise ConfigError([Mistake(TARGETS_KEY, problem, list(lora.target_modules), fix=fix)])


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _unknown_target(module: "PreTrainedModel", key: str, name: str, linears: Mapping[str, nn.Linear]) -> ConfigError:
    ends = list(dict.fromkeys(found.rpartition(".")[2] for found in linears))
    others = [part for found, part in module.named_modules() if _ends_with(found, name)]
    problem = f"{type(module).__name__} has no linear module of this name"
    if any(part is cast(Any, module).get_output_embeddings() for part in others):
        problem = "the output layer cannot have an adapter: its logits never exist whole"
    elif _names_experts(module, name):
        problem = "experts are tensors of three dimensions here, which cannot have an adapter"
    elif others:
        problem = f"{name} is no plain linear module but {type(others[0]).__name__}"
    fix = f"{nearest(name, ends) or 'name some'}; there are {', '.join(ends)}, and {ALL_LINEAR} for all"
    return ConfigError([Mistake(key, problem, name, fix=fix)])


def _names_experts(module: "PreTrainedModel", name: str) -> bool:
    return any(
        _ends_with(part, name) or _ends_with(f"{part}.{tensor}", name)
        for part, found in expert_modules(module).items()
        for tensor, _ in found.named_parameters(recurse=False)
    )


def attach(targets: Mapping[str, nn.Linear], settings: LoraSettings, device: torch.device) -> dict[str, LoraLinear]:
    """Give modules adapters that have no effect yet."""
    adapters = {name: LoraLinear(module, settings, device) for name, module in targets.items()}
    for adapter in adapters.values():
        adapter.module.forward = adapter  # type: ignore[assignment]
    return adapters


def shortest_names(chosen: Sequence[str], linears: Sequence[str]) -> list[str]:
    """Ends of names that choose exactly these modules among all; their whole names where no ends do."""
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in chosen))
    found = [name for name in linears if any(_ends_with(name, end) for end in ends)]
    return ends if found == list(chosen) else list(chosen)
