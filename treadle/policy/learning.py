"""From a step's rows to new weights: mini batches, micro batches, backward, optimizer.

The same for policy and critic, on one device or on many. Knows no loss: it is given one that returns a micro batch's
share. Shares add up (see `algorithm.aggregation`), so a mini batch's gradient does not depend on how it was cut over
micro batches and ranks, beyond rounding.
Invariant: every rank of a team does as many forwards and backwards as any other, in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import torch
from torch import Tensor

from treadle.algorithm.aggregation import Denominator
from treadle.algorithm.measures import Measures, Sum, merge, read
from treadle.algorithm.packed import LossOutput
from treadle.policy.network import Network
from treadle.policy.optimizer import Optimizer
from treadle.policy.packing import Members
from treadle.policy.sequence import Packed, Sequences
from treadle.policy.team import Team

Share = Callable[[Packed, Denominator], LossOutput]
"""A micro batch's share of the mini batch's loss."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of one forward, and the key that says so."""

    tokens: int
    key: str


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one optimizer step did."""

    measures: Measures
    grad_norm: float
    """Not finite where the update was skipped for it."""
    num_micro_batches: int
    num_tokens: int
    """Read by the network, prompts included."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Where rows are computed: a network, the team that computes it, and how much it reads at once."""

    network: Network
    team: Team
    budget: Budget

    def micro_batches(self, sequences: Sequences, members: Members) -> Iterator[Packed]:
        """This rank's part of the given rows, in forwards of at most the budget."""
        device, budget = self.network.device, self.budget
        bins = self.team.deal([sequences.lengths[at] for at in members], budget.tokens, budget.key)
        for number, bin in enumerate(bins, start=1):
            self.network.begin(last=number == len(bins))
            chosen = [members[at] for at in bin]
            yield sequences.pack(chosen, device) if chosen else sequences.pack_silence(device)


def learn(
    sequences: Sequences,
    members: Members,
    share: Share,
    optimizer: Optimizer,
    *,
    desk: Desk,
    scale: float,
    step: int,
) -> Lesson:
    """One optimizer step on the given rows. `scale` is the divisor of seq-mean-token-sum-norm."""
    denominator = Denominator.of((sequences.num_sampled[at] for at in members), scale)
    parts = []
    for packed in desk.micro_batches(sequences, members):
        output = share(packed, denominator)
        desk.team.enlarge(output.loss).backward()  # type: ignore[no-untyped-call]
        parts.append(output.measures)
    norm = optimizer.step(step) if parts else 0.0
    return Lesson(merge(parts), norm, len(parts), sum(sequences.lengths[at] for at in members))


def summarize(lessons: Sequence[Lesson], name: str, team: Team) -> dict[str, float]:
    """The metrics of a training step: means over tokens and optimizer steps, as each measure has it, over all ranks."""
    taught = [lesson for lesson in lessons if lesson.num_micro_batches]
    merged = team.merge(merge([lesson.measures for lesson in taught]))
    shared = {key: Sum(part.total / len(taught)) if isinstance(part, Sum) else part for key, part in merged.items()}
    norms = [lesson.grad_norm for lesson in taught if isfinite(lesson.grad_norm)]
    return {
        **read(shared),
        f"{name}/grad_norm": sum(norms) / len(norms) if norms else nan if taught else 0.0,
        f"{name}/optimizer_steps": len(norms),
        f"{name}/skipped_steps": len(taught) - len(norms),
        f"{name}/micro_batches": sum(lesson.num_micro_batches for lesson in taught),
        f"{name}/tokens": sum(lesson.num_tokens for lesson in taught),
    }


@torch.no_grad()
def compute(sequences: Sequences, values: Callable[[Packed], Tensor], desk: Desk) -> Tensor:
    """One value for each sampled token of all rows, without gradients: [M], on the CPU."""
    values_M = torch.zeros(sum(sequences.num_sampled))
    for packed in desk.micro_batches(sequences, tuple(range(len(sequences.lengths)))):
        found_M = values(packed).float().cpu()
        if not packed.silent:
            values_M[packed.places_M] = found_M
    desk.network.settle()
    return desk.team.total(values_M)
