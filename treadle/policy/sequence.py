"""Rows as a network reads them: only what teaches.

    T  response tokens of all rows, as in `batch`    M  sampled tokens among them: those that have a loss
    L  tokens that a network reads in one forward

A row is read up to its last sampled token, and not that token itself: nothing after it is predicted. Rows with no
sampled token are not read at all. Knows no network.
Invariant: the M of a micro batch are its rows' sampled tokens, in the order of the rows.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from treadle.errors import MisuseError
from treadle.types import Row

_KINDS = {"b": torch.int8, "i": torch.int32, "f": torch.float32}


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows as a few tensors: what a network needs of them, ready to travel."""

    ids: Tensor
    """Prompt and response of each row, row after row."""
    mask_T: Tensor
    logprobs_T: Tensor
    """As the engine reported them."""
    prompts: tuple[int, ...]
    """Tokens of each row's prompt."""
    responses: tuple[int, ...]
    processed_T: Tensor | None = None
    """Logprobs of the distribution sampled from; None where it is the whole softmax in every row."""

    @classmethod
    def of(cls, rows: "Rows") -> "FlatRows":
        """Of rows in any form."""
        if isinstance(rows, FlatRows):
            return rows
        return cls(
            flatten("i", (part for row in rows for part in (row.prompt_ids, row.ids))),
            flatten("b", (row.mask for row in rows)).bool(),
            flatten("f", (row.logprobs for row in rows)),
            tuple(len(row.prompt_ids) for row in rows),
            tuple(len(row.mask) for row in rows),
            flatten("f", (row.processed_logprobs or row.logprobs for row in rows))
            if any(row.processed_logprobs for row in rows)
            else None,
        )


Rows = Sequence[Row] | FlatRows


@dataclass(frozen=True, slots=True)
class Packed:
    """Some rows, packed into one forward."""

    ids_L: Tensor
    lengths: tuple[int, ...]
    """Of each row, in tokens read."""
    predicts_M: Tensor
    """The token of the forward whose hidden state predicts each sampled token."""
    targets_M: Tensor
    sequence_M: Tensor
    places_M: Tensor
    """Where each one is among the sampled tokens of all rows."""
    silent: bool = False
    """Nothing of it counts: it keeps a rank with too few rows in step with the others."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def mask(self) -> Tensor:
        """Which of the sampled tokens count: all or none."""
        return torch.full_like(self.targets_M, not self.silent, dtype=torch.bool)


class Sequences:
    """All rows of a call, ready to be packed."""

    def __init__(self, rows: Rows) -> None:
        flat = FlatRows.of(rows)
        self.mask_T = flat.mask_T
        self.logprobs_T = flat.logprobs_T
        self.processed_T = flat.processed_T
        masks = torch.split(self.mask_T, list(flat.responses))
        ids_S = torch.split(
            flat.ids.long(), [sum(lengths) for lengths in zip(flat.prompts, flat.responses, strict=True)]
        )
        self._sequences = [_read(*parts) for parts in zip(ids_S, masks, flat.prompts, strict=True)]
        self.lengths = tuple(len(ids) for ids, _, _ in self._sequences)
        """Tokens to read, for each row."""
        self.num_sampled = tuple(len(targets) for _, _, targets in self._sequences)
        counts = torch.tensor([0, *self.num_sampled])
        self._starts: list[int] = counts.cumsum(0).tolist()

    def sampled(self, values_T: Tensor) -> Tensor:
        """Per-token values of the sampled tokens only: [T] to [M]."""
        return values_T[self.mask_T]

    def spread(self, values_M: Tensor) -> Tensor:
        """Back to all response tokens, 0 where none was sampled: [M] to [T]."""
        return torch.zeros(len(self.mask_T), dtype=values_M.dtype).masked_scatter(self.mask_T, values_M)

    def sampled_by(self, members: Sequence[int]) -> Tensor:
        """Which sampled tokens the given rows have, as a mask: [M]."""
        mask_M = torch.zeros(self._starts[-1], dtype=torch.bool)
        for at in members:
            mask_M[self._starts[at] : self._starts[at + 1]] = True
        return mask_M

    def pack(self, members: Sequence[int], device: torch.device) -> Packed:
        """The given rows as one forward, on `device`."""
        rows = [self._sequences[at] for at in members]
        lengths = tuple(len(ids) for ids, _, _ in rows)
        offsets = torch.tensor((0, *lengths)).cumsum(0).tolist()
        counts = torch.tensor([len(targets) for _, _, targets in rows])
        places = [torch.arange(self._starts[at], self._starts[at + 1]) for at in members]
        tensors = (
            torch.cat([ids for ids, _, _ in rows]),
            torch.cat([predicts + offset for (_, predicts, _), offset in zip(rows, offsets, strict=False)]),
            torch.cat([targets for _, _, targets in rows]),
            torch.arange(len(rows)).repeat_interleave(counts),
        )
        ids_L, predicts_M, targets_M, sequence_M = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return Packed(ids_L, lengths, predicts_M, targets_M, sequence_M, torch.cat(places))

    def pack_silence(self, device: torch.device) -> Packed:
        """The least that a network can read: one token, of which nothing counts."""
        zero = torch.zeros(1, dtype=torch.long, device=device)
        return Packed(zero, (1,), zero, zero, zero, torch.zeros(1, dtype=torch.long), silent=True)


def flatten(kind: str, parts: Iterable[Iterable[float]]) -> Tensor:
    """Numbers of all parts in one tensor; `kind` is the array module's letter for their type."""
    numbers = array(kind, chain.from_iterable(parts))  # several times as fast as building a tensor from a list
    return torch.frombuffer(numbers, dtype=_KINDS[kind]) if numbers else torch.zeros(0, dtype=_KINDS[kind])


def _read(ids: Tensor, mask: Tensor, prompt: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ids to read, the places in them that predict, and what they predict."""
    sampled = mask.nonzero().squeeze(1)
    if not len(sampled):
        return ids[:0], sampled, ids[:0]
    if not prompt:
        raise MisuseError("a row without a prompt cannot train: nothing predicts its first token")
    predicts = sampled + (prompt - 1)
    return ids[: int(predicts[-1]) + 1], predicts, ids[predicts + 1]
