"""Annotations: what a step computed for each token of some of its rows, chosen and packed for the journal.

Owns which groups are kept: a share by the digest of their uid, so that the choice needs no random number and changes
nothing; every group with a failure; and of each step those with the largest advantage, the largest gap between sampler
and trainer, and the longest row. Reads numbers that the step has anyway: no forward is made for it.
Invariant: the weights of a step do not depend on what is kept of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from treadle.algorithm.advantage_inputs import row_positions
from treadle.journal import RowAnnotation
from treadle.policy.protocol import TrainBatch
from treadle.types import Group, Row, Trajectory


@dataclass(frozen=True, slots=True)
class _TrainedRow:
    """A row that trained: its place in the batch's flat tensors, over all response tokens and over sampled ones."""

    group: int
    trajectory: Trajectory
    row: Row
    position: int
    """Among the rows of its trajectory, as it was recorded."""
    tokens: slice
    sampled: slice
    mask_T: Tensor


def annotate_rows(
    groups: Sequence[Group], batch: TrainBatch, notes: Tensor, *, step: int, share: float
) -> tuple[RowAnnotation, ...]:
    """Annotations of the chosen groups. `notes` is what `Policy.annotations` gave for this batch."""
    rows = [row for row in _trained_rows(groups, batch) if row.sampled.stop > row.sampled.start]
    chosen = _choose(groups, rows, batch, notes, share)
    return tuple(_annotate(row, batch, notes, step) for row in rows if row.group in chosen)


def _trained_rows(groups: Sequence[Group], batch: TrainBatch) -> Iterator[_TrainedRow]:
    """In the order of the batch, whose rows may be masked where answers were cut off."""
    assert isinstance(batch.rows, tuple), "flat rows are for ranks"
    given = iter(batch.rows)
    at = sampled = 0
    for number, group in enumerate(groups):
        for trajectory in group.survivors:
            for sampled_row, position in zip(trajectory.rows, row_positions(trajectory), strict=True):
                row: Row = next(given)
                mask_T = torch.tensor(row.mask, dtype=torch.bool)
                count = int(mask_T.sum())
                tokens, own = slice(at, at + len(row.mask)), slice(sampled, sampled + count)
                yield _TrainedRow(number, trajectory, sampled_row, position, tokens, own, mask_T)
                at, sampled = tokens.stop, own.stop


def _choose(
    groups: Sequence[Group], rows: Sequence[_TrainedRow], batch: TrainBatch, notes: Tensor, share: float
) -> set[int]:
    chosen = {at for at, group in enumerate(groups) if _is_in_share(group.task.uid, share)}
    chosen |= {at for at, group in enumerate(groups) if len(group.survivors) < len(group.trajectories)}
    extremes: tuple[Callable[[_TrainedRow], float], ...] = (
        lambda row: float(batch.advantages_T[row.tokens].abs().max()),
        lambda row: _largest_gap(row, notes),
        lambda row: float(len(row.mask_T)),
    )
    return chosen | {max(rows, key=measure).group for measure in extremes if rows}


def _is_in_share(uid: str, share: float) -> bool:
    number = int.from_bytes(blake2b(uid.encode("utf-8", "backslashreplace"), digest_size=4).digest())
    return number < share * 2**32


def _largest_gap(row: _TrainedRow, notes: Tensor) -> float:
    sampler_T = torch.tensor(row.row.logprobs)
    gaps = (notes[0, row.sampled] - sampler_T[row.mask_T]).abs()
    return float(gaps.nan_to_num(0.0).max())


def _annotate(row: _TrainedRow, batch: TrainBatch, notes: Tensor, step: int) -> RowAnnotation:
    trainer, old, entropy, weight, flags = notes[:, row.sampled]
    reference = None if batch.ref_logprobs_T is None else batch.ref_logprobs_T[row.tokens][row.mask_T]
    return RowAnnotation(
        uid=row.trajectory.uid,
        sample=row.trajectory.sample,
        attempt=row.trajectory.attempt,
        position=row.position,
        step=step,
        trainer=_pack(trainer),
        old=_pack(old),
        reference=None if reference is None else _pack(reference),
        advantage=_pack(batch.advantages_T[row.tokens][row.mask_T]),
        entropy=_pack(entropy),
        weight=_pack(weight),
        flags=_shorten(bytes(flags.to(torch.uint8).tolist()), 1),
    )


def _pack(values_M: Tensor) -> bytes | None:
    """Little-endian float32; one value where all are the same; None where there is none."""
    if bool(values_M.isnan().all()):
        return None
    return _shorten(values_M.float().contiguous().numpy().astype("<f4").tobytes(), 4)


def _shorten(packed: bytes, width: int) -> bytes:
    return packed[:width] if packed == packed[:width] * (len(packed) // width) else packed
