"""Chunked prefill: prompts on their way into the KV cache, a chunk at a time.

Owns which tokens are computed next, and that sequences with the same prompt share one computation. Knows nothing of
pages and of when there is time.
Invariant: where a prompt is cut depends on its request alone, and so do its bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from treadle.engine.native.attention_metadata import PrefillChunk
from treadle.engine.native.sequence import SequenceState


@dataclass(slots=True, eq=False)
class SharedPrefill:
    """Tokens on their way, and the tickets that need exactly these: they are computed in the first one's pages."""

    start: int
    ids: tuple[int, ...]
    tickets: list[SequenceState]
    fresh: bool
    """Whether all of `ids` is computed here, so that siblings and later comers can have it."""

    @property
    def done(self) -> bool:
        return self.start == len(self.ids)

    def next_piece(self, limit: int | None) -> PrefillChunk:
        end = len(self.ids) if limit is None else min(len(self.ids), self.start + limit)
        return PrefillChunk(self.tickets[0].row, self.start, self.ids[self.start : end])


class PrefillQueue:
    """All that are not done, oldest first."""

    def __init__(self) -> None:
        self._all: list[SharedPrefill] = []
        self._fresh: dict[tuple[int, ...], SharedPrefill] = {}
        """Those that compute a whole prompt, which siblings may still join."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[SharedPrefill]:
        return iter(list(self._all))

    @property
    def num_tokens(self) -> int:
        """How many are still to be computed."""
        return sum(len(prefill.ids) - prefill.start for prefill in self._all)

    def sibling(self, ticket: SequenceState) -> SequenceState | None:
        """The ticket in whose pages a ticket's prefix is being computed."""
        joined = None if ticket.said.ids else self._fresh.get(ticket.prefix)
        return None if joined is None else joined.tickets[0]

    def join(self, ticket: SequenceState, start: int) -> bool:
        """Compute a ticket's prefix from `start` on, with a sibling if there is one. Whether this is new work."""
        fresh = start == 0 and not ticket.said.ids
        joined = self._fresh.get(ticket.prefix) if fresh else None
        if joined is not None:
            joined.tickets.append(ticket)
            return False
        prefill = SharedPrefill(start, ticket.prefix, [ticket], fresh)
        self._all.append(prefill)
        if fresh:
            self._fresh[prefill.ids] = prefill
        return True

    def choose(self, room: int, limit: int | None) -> list[tuple[SharedPrefill, PrefillChunk]]:
        """The next pieces, as many as fit into `room` tokens, and one at least."""
        chosen: list[tuple[SharedPrefill, PrefillChunk]] = []
        for prefill in self._all:
            piece = prefill.next_piece(limit)
            if chosen and len(piece.ids) > room:
                break
            chosen.append((prefill, piece))
            room -= len(piece.ids)
        return chosen

    def drop(self, prefill: SharedPrefill) -> None:
        self._all.remove(prefill)
        if prefill.fresh:
            del self._fresh[prefill.ids]

    def leave(self, ticket: SequenceState) -> int:
        """A ticket goes; how many of its tokens are worth keeping: none of a prompt, which gets the same bits again."""
        prefill = next(prefill for prefill in self._all if ticket in prefill.tickets)
        first = prefill.tickets[0] is ticket
        prefill.tickets.remove(ticket)
        if not prefill.tickets:
            self.drop(prefill)
        elif first:
            prefill.start = 0  # the last page of what was computed goes with it
        return 0 if prefill.fresh else prefill.start
