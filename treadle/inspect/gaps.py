"""Gap between sampler and trainer: by how much the logprob that a token was sampled with is off from the trainer's.

The one place that computes it from journal arrays: findings and the viewer's search read through here. The trainer's
side is that of the policy at the start of the step, where it is recorded apart: later mini batches have moved away from
the sampler on purpose. Imports neither torch nor numpy.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import sub

from treadle.journal import AnnotatedRow
from treadle.journal.codec import unpack_floats, unpack_ints


@dataclass(frozen=True, slots=True)
class TokenGap:
    """The token of a trajectory on which sampler and trainer differ most."""

    row: int
    position: int
    """In the row, its prompt first."""
    sampler: float
    trainer: float

    @property
    def gap(self) -> float:
        return self.trainer - self.sampler


def largest_gap(rows: Sequence[AnnotatedRow], *, is_current: bool = False) -> TokenGap | None:
    """The largest gap of a trajectory; with `is_current`, over tokens that were sampled by the weights they train."""
    found = [gap for row in rows if (gap := _row_gap(row, is_current)) is not None]
    return max(found, key=lambda gap: abs(gap.gap), default=None)


def _row_gap(row: AnnotatedRow, is_current: bool) -> TokenGap | None:
    sampler = list(compress(unpack_floats(row.logprobs, len(row.mask)), row.mask))
    trainer = array("f", row.trainer)
    if len(trainer) == 1:
        trainer = trainer * len(sampler)
    if len(trainer) != len(sampler):
        return None
    gaps = list(map(abs, map(sub, trainer, sampler)))
    wanted: Iterator[int] = iter(range(len(gaps)))
    if is_current:
        versions = compress(unpack_ints(row.versions), row.mask)
        wanted = (at for at, version in enumerate(versions) if version == row.step - 1)
    at = max((at for at in wanted if gaps[at] == gaps[at]), key=gaps.__getitem__, default=None)
    if at is None:
        return None
    places = list(compress(range(len(row.mask)), row.mask))
    return TokenGap(row.row, row.num_prompt + places[at], sampler[at], trainer[at])
