"""Chunked prefill: prompts on their way into the KV cache, a chunk at a time.

Owns which tokens are computed next, and that sequences with the same prompt share one computation. Knows nothing of
pages and of when there is time. Prompts take turns, a chunk each, so that a long one does not hold up those behind it.
Invariant: where a prompt is split depends on its request alone, and so do its bits.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from treadle.engine.native.attention_metadata import PrefillChunk
from treadle.engine.native.sequence import SequenceState


@dataclass(slots=True, eq=False)
class SharedPrefill:
    """Prefill shared by the sequences with exactly these tokens; it is computed in the first one's pages."""

    start: int
    ids: tuple[int, ...]
    sequences: list[SequenceState]
    fresh: bool
    """Whether all of `ids` is computed here, so that siblings and later requests can reuse it."""

    @property
    def done(self) -> bool:
        return self.start == len(self.ids)

    def next_chunk(self, limit: int) -> PrefillChunk:
        return PrefillChunk(self.sequences[0].row, self.start, self.ids[self.start : self.start + limit])


class PrefillQueue:
    """Unfinished prefills, the one that has waited longest for a chunk first. Chunks have `limit` tokens at most."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = sys.maxsize if limit is None else limit
        self._all: list[SharedPrefill] = []
        self._fresh: dict[tuple[int, ...], SharedPrefill] = {}
        """Those that compute a whole prompt, which siblings may still join."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[SharedPrefill]:
        return iter(list(self._all))

    @property
    def num_tokens(self) -> int:
        """Tokens of the next chunk of each."""
        return sum(self.count_next(len(prefill.ids) - prefill.start) for prefill in self._all)

    def count_next(self, tokens: int) -> int:
        """How many of so many tokens are in their next chunk."""
        return min(tokens, self._limit)

    def sibling(self, sequence: SequenceState) -> SequenceState | None:
        """The sequence in whose pages this one's prefix is being computed."""
        joined = None if sequence.sampled.ids else self._fresh.get(sequence.prefix)
        return None if joined is None else joined.sequences[0]

    def add(self, sequence: SequenceState, start: int) -> bool:
        """Add a sequence's prefix from `start` on, with a sibling if there is one. Whether this is new work."""
        fresh = start == 0 and not sequence.sampled.ids
        joined = self._fresh.get(sequence.prefix) if fresh else None
        if joined is not None:
            joined.sequences.append(sequence)
            return False
        prefill = SharedPrefill(start, sequence.prefix, [sequence], fresh)
        self._all.append(prefill)
        if fresh:
            self._fresh[prefill.ids] = prefill
        return True

    def next_chunks(self, room: int) -> list[tuple[SharedPrefill, PrefillChunk]]:
        """The next chunks, as many as fit into `room` tokens, and at least that of the first; it is the others' turn
        then."""
        chosen: list[tuple[SharedPrefill, PrefillChunk]] = []
        left: list[SharedPrefill] = []
        for prefill in self._all:
            if chosen and self.count_next(len(prefill.ids) - prefill.start) > room:
                left.append(prefill)
                continue
            chunk = prefill.next_chunk(self._limit)
            chosen.append((prefill, chunk))
            room -= len(chunk.ids)
        self._all = left + [prefill for prefill, _ in chosen]
        return chosen

    def drop(self, prefill: SharedPrefill) -> None:
        self._all.remove(prefill)
        if prefill.fresh:
            del self._fresh[prefill.ids]

    def remove(self, sequence: SequenceState) -> int:
        """Remove a sequence; how many of its tokens to keep: none of a prompt, which gets the same bits again."""
        prefill = next(prefill for prefill in self._all if sequence in prefill.sequences)
        first = prefill.sequences[0] is sequence
        prefill.sequences.remove(sequence)
        if not prefill.sequences:
            self.drop(prefill)
        elif first:
            prefill.start = 0  # the last computed page leaves with it
        return 0 if prefill.fresh else prefill.start
