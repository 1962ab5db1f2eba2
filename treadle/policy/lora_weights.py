"""LoRA weights of a policy: adapters that an optimizer moves, and frozen weights that they are merged with.

Adapters are fp32 and whole on every rank: they are small, and their gradients are averaged over ranks in one message.
The frozen weights of modules with an adapter are kept beside the merged ones, sharded alike, in the dtype of the
computation: merged weights cannot be unmerged, as they are rounded. On a rank with offloaded parameters they are in CPU
memory. The rest of the model exists once, and never changes.
Invariant: between calls every module with an adapter holds its merged weight; `at_start` puts it back, bit for bit.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.config.rollout import ModelConfig
from treadle.config.training import LoraConfig
from treadle.errors import ConfigError, Mistake, RunError
from treadle.model.lora import LoraLinear, LoraSettings, attach, find_targets, linear_modules, merge_factors
from treadle.model.peft_files import StoredAdapter, check_adapter, read_adapter, write_adapter
from treadle.policy.checkpoint_files import TRAINING, check_same_model, save_json, shapes_of
from treadle.policy.optimizer import MasterWeights
from treadle.policy.shard_files import local_row_range, local_rows
from treadle.policy.update import SINGLE_RANK, DataParallelGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECORD = "adapter.json"


class LoraWeights(MasterWeights):
    """The adapters of a module. `full` has their factors by PEFT's names."""

    def __init__(
        self,
        module: "PreTrainedModel",
        adapters: Mapping[str, LoraLinear],
        settings: LoraSettings,
        *,
        frozen_checksum: str,
        start: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        keep_on_cpu: bool = False,
        dp_group: DataParallelGroup = SINGLE_RANK,
    ) -> None:
        """The module holds its frozen weights still. `start`: the factors that training starts from; None for none."""
        down = {f"{name}.lora_A.weight": adapter.down for name, adapter in adapters.items()}
        up = {f"{name}.lora_B.weight": adapter.up for name, adapter in adapters.items()}
        super().__init__(down | up, torch.float32)
        self.settings = settings
        self._module = module
        self._adapters = adapters
        self._frozen_checksum = frozen_checksum
        self._start = start
        self._dp_group = dp_group
        place = torch.device("cpu") if keep_on_cpu else None
        self._frozen = {
            name: local_rows(adapter.module.weight.detach()).to(place, copy=True) for name, adapter in adapters.items()
        }
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Merge the adapters into the module, in place."""
        for name, adapter in self._adapters.items():
            self._merge(name, (adapter.down, adapter.up))

    def _merge(self, name: str, factors: tuple[Tensor, Tensor] | None) -> None:
        """Put the frozen weight plus these factors' product into the module: this rank's rows."""
        weight = self._adapters[name].module.weight.detach()
        here, rows = local_rows(weight), local_row_range(weight)
        frozen = self._frozen[name].to(here.device)
        if factors is not None:
            frozen = merge_factors(frozen, factors[0], factors[1][rows.start : rows.stop], self.settings.scale)
        here.copy_(frozen)

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Inside, the module is the model as it was before training: the reference policy."""
        with self._holding(self._start):
            yield

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the module is the frozen model alone, without the adapter that training started from too."""
        with self._holding(None):
            yield

    @contextmanager
    def _holding(self, factors: Mapping[str, tuple[Tensor, Tensor]] | None) -> Iterator[None]:
        with torch.no_grad():
            for name in self._adapters:
                self._merge(name, None if factors is None else factors[name])
        try:
            yield
        finally:
            self.publish()

    def reduce_gradients(self) -> None:
        self._dp_group.average([parameter.grad for parameter in self.full.values() if parameter.grad is not None])

    def save(self, directory: Path, base: str) -> None:
        """Write the adapters as PEFT does, and what they were trained beside. `base` is the model's path."""
        factors = {name: (adapter.down, adapter.up) for name, adapter in self._adapters.items()}
        write_adapter(directory, self._module, StoredAdapter(self.settings, factors, base))
        (directory / TRAINING).mkdir(parents=True, exist_ok=True)
        save_json(directory / TRAINING / _RECORD, {"frozen_checksum": self._frozen_checksum})

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        """Take the adapters from what `save` wrote, in place; a RunError where they are of other frozen weights."""
        record = directory / TRAINING / _RECORD
        if not record.is_file():
            raise RunError(f"{directory} holds no LoRA adapter: the run that saved it trained all parameters")
        stored = read_adapter(str(directory), "checkpoint")
        mine, theirs = self._frozen_checksum, json.loads(record.read_text(encoding="utf-8"))["frozen_checksum"]
        if mine != theirs:
            raise RunError(
                f"{directory} has an adapter that was trained beside other frozen weights: their checksum is {theirs} "
                f"there, {mine} here. Give the same model.path and actor.dtype"
            )
        if stored.settings != self.settings:
            raise RunError(f"{directory} has an adapter with {stored.settings}; here it is {self.settings}")
        factors = {f"{name}.lora_A.weight": down for name, (down, _) in stored.factors.items()}
        factors |= {f"{name}.lora_B.weight": up for name, (_, up) in stored.factors.items()}
        check_same_model(shapes_of(factors.items()), self.full, directory)
        for name, parameter in self.full.items():
            parameter.copy_(factors[name])
        self.publish()


def create_lora(
    module: "PreTrainedModel",
    model: ModelConfig,
    lora: LoraConfig,
    device: torch.device,
    *,
    frozen_checksum: str,
    keep_on_cpu: bool = False,
    dp_group: DataParallelGroup = SINGLE_RANK,
) -> LoraWeights:
    """Give a module with frozen weights its adapters: new ones without effect, or those of `model.adapter`."""
    start = None
    if model.adapter is None:
        settings = LoraSettings.of(lora)
        adapters = attach(find_targets(module, lora), settings, device)
        for name, adapter in adapters.items():
            adapter.initialize(lora.seed, name)
    else:
        origin = model.origin("adapter")
        stored = read_adapter(model.adapter, origin=origin)
        check_adapter(module, stored, model.adapter, origin)
        _check_agreement(module, lora, stored)
        settings, linears = stored.settings, linear_modules(module)
        names = [name for name in linears if name in stored.factors]
        adapters = attach({name: linears[name] for name in names}, settings, device)
        start = {name: (stored.factors[name][0].to(device), stored.factors[name][1].to(device)) for name in names}
        with torch.no_grad():
            for name, adapter in adapters.items():
                adapter.down.copy_(start[name][0])
                adapter.up.copy_(start[name][1])
    return LoraWeights(
        module,
        adapters,
        settings,
        frozen_checksum=frozen_checksum,
        start=start,
        keep_on_cpu=keep_on_cpu,
        dp_group=dp_group,
    )


def _check_agreement(module: "PreTrainedModel", lora: LoraConfig, stored: StoredAdapter) -> None:
    """Refuse keys that say something else than the adapter they would be applied to."""
    settings, default = stored.settings, LoraConfig()
    wanted = {"r": settings.r, "alpha": settings.alpha, "use_rslora": settings.use_rslora}
    mistakes = [
        Mistake(f"actor.lora.{name}", f"the adapter of model.adapter has {there}", given, lora.origin(name))
        for name, there in wanted.items()
        if (given := getattr(lora, name)) not in (there, getattr(default, name))
    ]
    named = lora.target_modules != default.target_modules or lora.exclude_modules
    if named and set(find_targets(module, lora)) != set(stored.factors):
        problem = f"the adapter of model.adapter is of other modules: {len(stored.factors)}, such as "
        problem += min(stored.factors)
        fix = "leave it out: the adapter's modules train"
        mistakes.append(Mistake("actor.lora.target_modules", problem, list(lora.target_modules), fix=fix))
    if mistakes:
        raise ConfigError(mistakes)
