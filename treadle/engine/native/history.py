"""What rows sampled on a GPU, kept on the host step by step: reading a response then asks no device.

Owns a ring of steps for each slot. Every step tells the token, the logprob and the end of each row; those of rows that
are not active mean nothing. Knows nothing of devices. Invariant: the steps of a row that runs are still in the ring.

Shapes: S slots, R steps in the ring.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.engine.native.cache import Move
from treadle.engine.native.rows import Response

_SLACK = 8
"""Steps that may run before what an earlier one ended is known."""


class History:
    """The last steps of all slots. Steps are counted from 0."""

    def __init__(self, slots: int, longest: int) -> None:
        self._ids_SR = np.zeros((slots, longest + _SLACK), np.int32)
        self._logprobs_SR = np.zeros((slots, longest + _SLACK), np.float32)
        self._first = [0] * slots
        self._ends: dict[int, int] = {}
        """The step after the last, of rows that ended."""
        self._noted = 0

    def start(self, slots: Iterable[int], step: int) -> None:
        """Rows take part from `step` on."""
        for slot in slots:
            self._first[slot] = step
            self._ends.pop(slot, None)

    def note(self, ids_S: NDArray[np.int32], logprobs_S: NDArray[np.float32], ended_S: NDArray[np.int32]) -> list[int]:
        """Take in the next step, of the first rows; the rows that ended with it."""
        at, rows = self._noted % self._ids_SR.shape[1], len(ids_S)
        self._ids_SR[:rows, at] = ids_S
        self._logprobs_SR[:rows, at] = logprobs_S
        self._noted += 1
        ended: list[int] = np.flatnonzero(ended_S).tolist()
        self._ends.update(dict.fromkeys(ended, self._noted))
        return ended

    def read(self, slots: Sequence[int]) -> list[Response]:
        """What rows sampled until they ended, or until now."""
        return [self._read(slot, self._first[slot], self._ends.get(slot, self._noted)) for slot in slots]

    def _read(self, slot: int, first: int, end: int) -> Response:
        size = self._ids_SR.shape[1]
        start, count = first % size, max(0, end - first)
        places = slice(start, start + count) if start + count <= size else np.arange(start, start + count) % size
        return Response(tuple(self._ids_SR[slot, places].tolist()), tuple(self._logprobs_SR[slot, places].tolist()))

    def move(self, moves: Iterable[Move]) -> None:
        """Rows get other slots."""
        for move in moves:
            for kept in (self._ids_SR, self._logprobs_SR):
                kept[move.target] = kept[move.source]
            self._first[move.target] = self._first[move.source]
            self._ends.pop(move.target, None)
