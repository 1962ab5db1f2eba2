"""Trained model of the Tinker API: an adapter, its optimizer and the gradients that have come together.

Owns one client's adapter on the shared base: forward and backward over datums, AdamW with the hyperparameters of each
step, its state as tensors. Knows no HTTP, no order of requests and no directory.
Invariant: `weights` are the factors as they are now, as one object until a step or a load changes them; gradients add
up over any number of requests until `step`, all of each request or none; one that is not finite moves nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan

import torch
from torch import Tensor, nn

from treadle.aio import describe_error
from treadle.model.lora import LoraLinear
from treadle.policy.network import DecoderNetwork
from treadle.policy.packed_inputs import PackedRows, pack_micro_batches
from treadle.tinker.adapters import AdapterBase, AdapterShape, AdapterWeights
from treadle.tinker.losses import LossConfig, check_datum, find_loss
from treadle.tinker.protobuf import Datum
from treadle.tinker.refusals import RequestFailed

log = logging.getLogger(__name__)

TOKENS_PER_FORWARD = 16384
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Hyperparameters of one optimizer step; the client's defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0 for none."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """What a forward found: tensors of each datum, and sums over all."""

    outputs: tuple[Mapping[str, Tensor], ...]
    metrics: Mapping[str, float]


class TrainedModel:
    """An adapter that trains. Every method but `weights` wants the base to itself."""

    def __init__(self, base: AdapterBase, network: DecoderNetwork, shape: AdapterShape, seed: int) -> None:
        self.base = base
        self.shape = shape
        self._network = network
        self._adapters: dict[str, LoraLinear] = base.create(shape, seed)
        self._parameters = _parameters(self._adapters)
        self._adamw = torch.optim.AdamW(self._parameters.values(), fused=True)
        self._weights: AdapterWeights | None = None
        self.num_steps = 0
        self.has_gradients = False

    @property
    def weights(self) -> AdapterWeights:
        """The factors as they are, for a sampler or a file."""
        if self._weights is None:
            factors = {
                name: (adapter.down.detach().clone(), adapter.up.detach().clone())
                for name, adapter in self._adapters.items()
            }
            self._weights = AdapterWeights(self.shape, factors)
        return self._weights

    def forward(
        self, data: Sequence[Datum], loss_fn: str, config: LossConfig, *, longest: int, backward: bool, recompute: bool
    ) -> LossResult:
        """Logprobs and loss of datums; with `backward`, gradients are added to those since the last step.

        Where that breaks midway, no gradients are left: neither a part of these nor those before.
        """
        loss = find_loss(loss_fn, config)
        vocab_size = self.base.head.out_features
        for at, datum in enumerate(data):
            check_datum(datum, at, loss, longest=longest, vocab_size=vocab_size)
        if not data:
            raise RequestFailed("data: there is nothing to compute on")
        budget = max(TOKENS_PER_FORWARD, longest)
        bins = pack_micro_batches([len(datum.ids) for datum in data], budget, "data")
        try:
            found = self._forward(data, bins, loss_fn, config, backward=backward, recompute=recompute)
        except Exception as error:
            if not backward:
                raise
            self._adamw.zero_grad()
            self.has_gradients = False
            log.exception("forward_backward broke")
            raise RequestFailed(
                f"forward_backward broke: {describe_error(error)}; all gradients since the last optim_step are gone: "
                "send all data of that step again",
                by_user=False,
            ) from error
        self.has_gradients |= backward
        return found

    def _forward(
        self,
        data: Sequence[Datum],
        bins: Sequence[Sequence[int]],
        loss_fn: str,
        config: LossConfig,
        *,
        backward: bool,
        recompute: bool,
    ) -> LossResult:
        loss = find_loss(loss_fn, config)
        outputs: list[Mapping[str, Tensor]] = [{} for _ in data]
        total = 0.0
        adapters = self._adapters if backward else {}
        with self.base.training(adapters), torch.set_grad_enabled(backward), self._network.recomputing(recompute):
            for members in bins:
                packed = _pack([data[at] for at in members], self._network.device)
                logprobs_M = self._network.logprobs(packed, 1.0).logprobs_T.float().cpu()
                sizes = [data[at].inputs["target_tokens"].numel() for at in members]
                parts = []
                for at, values_M in zip(members, torch.split(logprobs_M, sizes), strict=True):
                    inputs = data[at].inputs
                    logprobs = values_M.view(inputs["target_tokens"].shape)
                    losses = loss.values(logprobs, inputs, config)
                    parts.append(losses.sum())
                    outputs[at] = {"logprobs": logprobs.detach()}
                    if loss_fn == "cross_entropy":
                        outputs[at] = {**outputs[at], "elementwise_loss": losses.detach()}
                summed = torch.stack(parts).sum()
                total += float(summed.detach())
                if backward:
                    summed.backward()  # type: ignore[no-untyped-call]
        return LossResult(tuple(outputs), {"loss:sum": total})

    def step(self, params: AdamParams) -> Mapping[str, float]:
        """Move the factors by the gradients; metrics of the step."""
        if not self.has_gradients:
            raise RequestFailed("optim_step has no gradients to follow: call forward_backward before it")
        self.has_gradients = False
        grads = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = float(nn.utils.get_total_norm(grads))
        if not isfinite(norm):
            self._adamw.zero_grad()
            raise RequestFailed(
                f"the gradient's norm is {'nan' if isnan(norm) else 'inf'}: nothing was moved, and the gradients are "
                "gone. Look for extreme weights, advantages or logprobs in the data since the last step"
            )
        if params.grad_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(self._parameters.values(), params.grad_clip_norm, torch.tensor(norm))
        for group in self._adamw.param_groups:
            group["lr"], group["eps"] = params.learning_rate, params.eps
            group["betas"], group["weight_decay"] = (params.beta1, params.beta2), params.weight_decay
        self._adamw.step()
        self._adamw.zero_grad()
        self._weights = None
        self.num_steps += 1
        return {"grad_norm": norm, "learning_rate": params.learning_rate}

    def optimizer_state(self) -> dict[str, Tensor]:
        """The moments and step counts, by factor and kind."""
        return {
            f"{name}.{kind}": value
            for name, parameter in self._parameters.items()
            for kind, value in self._adamw.state[parameter].items()
        }

    @torch.no_grad()
    def load(self, weights: AdapterWeights, optimizer: Mapping[str, Tensor] | None, num_steps: int) -> None:
        """Take factors, and moments where given, from what was saved; a RequestFailed where they do not fit."""
        mine = {name: (adapter.down.shape, adapter.up.shape) for name, adapter in self._adapters.items()}
        theirs = {name: (down.shape, up.shape) for name, (down, up) in weights.factors.items()}
        if mine != theirs:
            raise RequestFailed(
                f"the checkpoint is of another adapter: {weights.shape} there, {self.shape} here, or another base model"
            )
        for name, adapter in self._adapters.items():
            adapter.down.copy_(weights.factors[name][0])
            adapter.up.copy_(weights.factors[name][1])
        self._adamw.zero_grad()
        self._adamw.state.clear()
        self.has_gradients, self._weights, self.num_steps = False, None, 0
        if optimizer is not None:
            self.num_steps = num_steps
            for joined, value in optimizer.items():
                name, _, kind = joined.rpartition(".")
                parameter = self._parameters[name]
                self._adamw.state[parameter][kind] = value.to(parameter.device, copy=True)


def _parameters(adapters: Mapping[str, LoraLinear]) -> dict[str, nn.Parameter]:
    down = {f"{name}{_DOWN}": adapter.down for name, adapter in adapters.items()}
    return down | {f"{name}{_UP}": adapter.up for name, adapter in adapters.items()}


def _pack(data: Sequence[Datum], device: torch.device) -> PackedRows:
    """Datums as one forward. A position with several targets predicts each of them."""
    ids, predicts, targets, owners = [], [], [], []
    start = 0
    for at, datum in enumerate(data):
        tokens = datum.inputs["target_tokens"]
        per_position = tokens.numel() // len(datum.ids)
        ids.append(datum.ids)
        predicts.append(torch.arange(start, start + len(datum.ids)).repeat_interleave(per_position))
        targets.append(tokens.flatten())
        owners.append(torch.full((tokens.numel(),), at))
        start += len(datum.ids)
    tensors = (torch.cat(part).to(device) for part in (ids, predicts, targets, owners))
    ids_L, predicts_M, targets_M, sequence_M = tensors
    lengths = tuple(len(datum.ids) for datum in data)
    return PackedRows(ids_L, lengths, predicts_M, targets_M, sequence_M, torch.arange(len(targets_M)))
