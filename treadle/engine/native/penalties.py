"""Repetition, presence and frequency penalties: logits are lowered for tokens that the row has had already.

Owns which tokens each row has had, as two tables of rows by vocabulary, taken when the first request asks for a
penalty; rows without one pay for a pass over the logits only while such a request runs beside them. The formulas are
vLLM's: repetition looks at prompt and answer, presence and frequency at the answer alone, all before the temperature. A
turn with a temperature of its own is a scale of the logits here, so that logprobs stay those of the run's temperature.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Factors = tuple[float, float, float, float]
"""Repetition, presence, frequency and scale: see `SamplingParams.penalties`."""


class Penalties:
    """The penalties of all rows. Tensors stay where they are, so that a CUDA graph can hold on to them."""

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        self.prompt_BV = torch.zeros((rows, words), dtype=torch.bool, device=device)
        self.counts_BV = torch.zeros((rows, words), dtype=torch.int32, device=device)
        self.repetition_B = torch.ones(rows, device=device)
        self.presence_B = torch.zeros(rows, device=device)
        self.frequency_B = torch.zeros(rows, device=device)
        self.scale_B = torch.ones(rows, device=device)

    def start(self, row: int, prompt: Sequence[int], answer: Sequence[int], factors: Factors) -> None:
        """A row begins with these tokens."""
        device = self.prompt_BV.device
        self.prompt_BV[row] = False
        self.counts_BV[row] = 0
        self.prompt_BV[row, torch.tensor(prompt, dtype=torch.long, device=device)] = True
        if answer:
            ids = torch.tensor(answer, dtype=torch.long, device=device)
            self.counts_BV[row].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.set_factors(row, factors)

    def set_factors(self, row: int, factors: Factors) -> None:
        self.repetition_B[row], self.presence_B[row], self.frequency_B[row], self.scale_B[row] = factors

    def apply(self, logits_BV: Tensor) -> Tensor:
        """The logits of the first rows, penalised, in float32."""
        rows = len(logits_BV)
        factors = (self.repetition_B[:rows], self.presence_B[:rows], self.frequency_B[:rows], self.scale_B[:rows])
        return penalize(logits_BV, self.prompt_BV[:rows], self.counts_BV[:rows], factors)

    def note(self, ids_B: Tensor, active_B: Tensor) -> None:
        """Count what active rows drew."""
        rows = len(ids_B)
        self.counts_BV[:rows].scatter_add_(1, ids_B.long().unsqueeze(1), active_B.to(torch.int32).unsqueeze(1))

    def move(self, source: Tensor, target: Tensor) -> None:
        factors = (self.repetition_B, self.presence_B, self.frequency_B, self.scale_B)
        for tensor in (self.prompt_BV, self.counts_BV, *factors):
            tensor[target] = tensor[source]


def penalize(
    logits_BV: Tensor, prompt_BV: Tensor, counts_BV: Tensor, factors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    """Logits after the penalties; `factors` are [B] each."""
    repetition, presence, frequency, scale = (factor.unsqueeze(1) for factor in factors)
    logits_BV = logits_BV.float()
    spoken_BV = counts_BV > 0
    lowered_BV = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    logits_BV = torch.where(spoken_BV | prompt_BV, lowered_BV, logits_BV)
    return (logits_BV - frequency * counts_BV - presence * spoken_BV) * scale
