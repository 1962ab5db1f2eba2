"""Optimizer steps over micro batches and data-parallel ranks: forward, backward, gradient, metrics.

The same for policy and critic, on one device or on many. Knows no loss: it is given one that returns a micro batch's
share. Shares add up (see `algorithm.micro_batch`), so a mini batch's gradient does not depend on how it was split over
micro batches and ranks, beyond rounding. `DataParallelGroup` sums values and merges metrics over ranks; every rank
holds the whole batch, so all agree on mini batches and denominators without communication.
Invariant: every rank does as many forwards and backwards as any other, in the same order, and gets the same results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite, nan
from typing import Any, cast

import torch
from torch import Tensor

from treadle.algorithm.metrics import LossMetric, LossMetrics, SumMetric, merge_metrics, read_metrics
from treadle.algorithm.micro_batch import Denominator, LossOutput
from treadle.policy.network import DecoderNetwork
from treadle.policy.optimizer import Optimizer
from treadle.policy.packed_inputs import Members, MicroBatchPlan, PackedRows, Sequences, plan_flat, plan_shared


class DataParallelGroup:
    """Data-parallel group of one rank: this process trains alone."""

    rank = 0
    size = 1

    def scale_loss(self, loss: Tensor) -> Tensor:
        """A share of the loss, such that the mean over ranks of all gradients is the gradient of the whole."""
        return loss if self.size == 1 else loss * self.size

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, of values on the CPU."""
        return values

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype and device, which are whole on every rank, by their means over ranks."""

    def merge(self, metrics: LossMetrics) -> LossMetrics:
        """The metrics of all ranks, merged."""
        return metrics


SINGLE_RANK = DataParallelGroup()


class TorchDataParallelGroup(DataParallelGroup):
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        from torch import distributed

        self._distributed = distributed
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()

    def total(self, values: Tensor) -> Tensor:
        if len(values):
            self._distributed.all_reduce(values)
        return values

    def average(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self._distributed.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def merge(self, metrics: LossMetrics) -> LossMetrics:
        here = {name: _to_cpu(metric) for name, metric in metrics.items()}
        found: list[Any] = [None] * self.size
        self._distributed.all_gather_object(found, here)
        return merge_metrics(found)


def _to_cpu(metric: LossMetric) -> LossMetric:
    """A metric with its tensors on the CPU, so that it can be sent; all built-in metrics are records of tensors."""
    if not is_dataclass(metric):
        return metric
    values = (getattr(metric, field.name) for field in fields(metric))
    moved = (value.cpu() if isinstance(value, torch.Tensor) else value for value in values)
    return cast(LossMetric, type(metric)(*moved))


MicroBatchLoss = Callable[[PackedRows, Denominator], LossOutput]
"""A micro batch's share of the mini batch's loss."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Tokens of one forward, and the key that says so."""

    tokens: int
    key: str


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer step did."""

    metrics: LossMetrics
    grad_norm: float
    """Not finite where the update was skipped for it."""
    num_micro_batches: int
    num_tokens: int
    """Read by the network, prompts included; a prefix that rows of a micro batch share counts once."""
    num_saved_tokens: int = 0
    """That would be read, too, if rows shared nothing."""


@dataclass(frozen=True, slots=True)
class MicroBatcher:
    """Micro batches of a network on this rank: the network, its data-parallel group, and the tokens of one forward."""

    network: DecoderNetwork
    dp_group: DataParallelGroup
    budget: TokenBudget

    def plan(self, sequences: Sequences, members: Members) -> MicroBatchPlan:
        """The given rows in forwards of at most the budget, for all ranks."""
        budget, ranks = self.budget, self.dp_group.size
        if self.network.shares_prefixes:
            return plan_shared(sequences.prefixes, members, budget.tokens, budget.key, ranks)
        return plan_flat(sequences.lengths, members, budget.tokens, budget.key, ranks)

    def pack(self, sequences: Sequences, plan: MicroBatchPlan) -> Iterator[PackedRows]:
        """This rank's forwards; every rank has as many. An empty one is computed all the same, and not counted."""
        device, bins = self.network.device, plan.ranks[self.dp_group.rank]
        for number, rows in enumerate(bins, start=1):
            self.network.begin(last=number == len(bins))
            shared = self.network.shares_prefixes
            yield sequences.pack(rows, device, shared=shared) if rows else sequences.pack_dummy(device)

    def micro_batches(self, sequences: Sequences, members: Members) -> Iterator[PackedRows]:
        """This rank's part of the given rows, in forwards of at most the budget."""
        return self.pack(sequences, self.plan(sequences, members))


def run_optimizer_step(
    sequences: Sequences,
    members: Members,
    loss_of: MicroBatchLoss,
    optimizer: Optimizer,
    *,
    batcher: MicroBatcher,
    scale: float,
    step: int,
) -> UpdateResult:
    """One optimizer step on the given rows. `scale` is the divisor of seq-mean-token-sum-norm."""
    denominator = Denominator.of((sequences.num_sampled[at] for at in members), scale)
    plan, parts = batcher.plan(sequences, members), []
    for packed in batcher.pack(sequences, plan):
        output = loss_of(packed, denominator)
        batcher.dp_group.scale_loss(output.loss).backward()  # type: ignore[no-untyped-call]
        parts.append(output.metrics)
    norm = optimizer.step(step) if parts else 0.0
    saved = plan.num_flat_tokens - plan.num_tokens
    return UpdateResult(merge_metrics(parts), norm, len(parts), plan.num_tokens, saved)


def summarize_updates(updates: Sequence[UpdateResult], name: str, dp_group: DataParallelGroup) -> dict[str, float]:
    """The metrics of a training step: means over tokens and optimizer steps, as each metric says, over all ranks."""
    done = [update for update in updates if update.num_micro_batches]
    merged = dp_group.merge(merge_metrics([update.metrics for update in done]))
    shared = {
        key: SumMetric(part.total / len(done)) if isinstance(part, SumMetric) else part for key, part in merged.items()
    }
    norms = [update.grad_norm for update in done if isfinite(update.grad_norm)]
    return {
        **read_metrics(shared),
        f"{name}/grad_norm": sum(norms) / len(norms) if norms else nan if done else 0.0,
        f"{name}/optimizer_steps": len(norms),
        f"{name}/skipped_steps": len(done) - len(norms),
        f"{name}/micro_batches": sum(update.num_micro_batches for update in done),
        f"{name}/tokens": sum(update.num_tokens for update in done),
        f"{name}/shared_prefix_tokens": sum(update.num_saved_tokens for update in done),
    }


@torch.no_grad()
def compute_per_token(sequences: Sequences, values: Callable[[PackedRows], Tensor], batcher: MicroBatcher) -> Tensor:
    """One value for each sampled token of all rows, without gradients: [M], on the CPU."""
    values_M = torch.zeros(sum(sequences.num_sampled))
    for packed in batcher.micro_batches(sequences, tuple(range(len(sequences.lengths)))):
        found_M = values(packed).float().cpu()
        if not packed.is_dummy:
            values_M[packed.places_M] = found_M
    batcher.network.settle()
    return batcher.dp_group.total(values_M)
