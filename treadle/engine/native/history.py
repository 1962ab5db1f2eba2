"""What rows sampled on a GPU, kept on the host step by step: reading a response then asks no device.

Owns a ring of steps for each row. Every step tells the token, the logprob and the end of each row; those of rows that
are not active mean nothing. Knows nothing of devices. Invariant: the steps of a row that runs are still in the ring.

Shapes: S rows, R steps in the ring.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.engine.native.rows import Response

_SLACK = 8
"""Steps that may run before what an earlier one ended is known."""


class History:
    """The last steps of all rows. Steps are counted from 0."""

    def __init__(self, rows: int, longest: int) -> None:
        self._ids_SR = np.zeros((rows, longest + _SLACK), np.int32)
        self._logprobs_SR = np.zeros((rows, longest + _SLACK), np.float32)
        self._processed_SR: NDArray[np.float32] | None = None
        """Taken with the first step that tells of it."""
        self._first = [0] * rows
        self._ends: dict[int, int] = {}
        """The step after the last, of rows that ended."""
        self._noted = 0

    def start(self, rows: Iterable[int], step: int) -> None:
        """Rows take part from `step` on."""
        for row in rows:
            self._first[row] = step
            self._ends.pop(row, None)

    def note(
        self,
        ids_S: NDArray[np.int32],
        logprobs_S: NDArray[np.float32],
        ended_S: NDArray[np.int32],
        processed_S: NDArray[np.float32] | None = None,
    ) -> list[int]:
        """Take in the next step, of the first rows; the rows that ended with it."""
        if processed_S is not None:
            if self._processed_SR is None:
                self._processed_SR = np.zeros_like(self._logprobs_SR)
            self._processed_SR[: len(ids_S), self._noted % self._ids_SR.shape[1]] = processed_S
        at, rows = self._noted % self._ids_SR.shape[1], len(ids_S)
        self._ids_SR[:rows, at] = ids_S
        self._logprobs_SR[:rows, at] = logprobs_S
        self._noted += 1
        ended: list[int] = np.flatnonzero(ended_S).tolist()
        self._ends.update(dict.fromkeys(ended, self._noted))
        return ended

    def read(self, rows: Sequence[int]) -> list[Response]:
        """What rows sampled until they ended, or until now."""
        return [self._read(row, self._first[row], self._ends.get(row, self._noted)) for row in rows]

    def _read(self, row: int, first: int, end: int) -> Response:
        places, processed = self._places(first, end), ()
        if self._processed_SR is not None:
            processed = tuple(self._processed_SR[row, places].tolist())
        ids, logprobs = self._ids_SR[row, places].tolist(), self._logprobs_SR[row, places].tolist()
        return Response(tuple(ids), tuple(logprobs), processed)

    def _places(self, first: int, end: int) -> slice | NDArray[np.int64]:
        size = self._ids_SR.shape[1]
        start, count = first % size, max(0, end - first)
        return slice(start, start + count) if start + count <= size else np.arange(start, start + count) % size

    def tail(self, row: int, since: int) -> list[int]:
        """What a row sampled after its first `since` tokens, as far as noted."""
        places = self._places(self._first[row] + since, self._ends.get(row, self._noted))
        ids: list[int] = self._ids_SR[row, places].tolist()
        return ids

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give rows another place."""
        for source, target in zip(sources, targets, strict=True):
            for kept in (self._ids_SR, self._logprobs_SR, self._processed_SR):
                if kept is not None:
                    kept[target] = kept[source]
            self._first[target] = self._first[source]
            self._ends.pop(target, None)
