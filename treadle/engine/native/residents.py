"""What slots hold that somebody may ask for again: sessions between two turns, and prompts that siblings share.

Owns which slot has whose tokens, and that nothing is copied before it must be: what ended stays in its slot until
another needs the slot, and only then moves to the parking. A prompt is taken from the slot of a sibling, which may be
running: the places of a prompt are never written again. Knows nothing of tickets and steps.
Invariant: what is found here was computed by the weights in use, and is still in its slot or parked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.engine.native.cache import Move, SlotCache
from treadle.engine.native.parking import Parked, Parking, shared_prefix

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens that need not be computed: in a slot, or parked."""

    tokens: int
    slot: int | None = None
    parked: Parked | None = None
    own: bool = False
    """Whether the slot is the session's own, with nobody in it: it can go on right there."""


class Residents:
    """See the module. With `enabled` false nothing is ever found."""

    def __init__(self, cache: SlotCache, parking: Parking, *, enabled: bool) -> None:
        self._cache = cache
        self._parking = parking
        self._enabled = enabled
        self._idle: dict[int, tuple[str, Ids]] = {}
        """Slots that nobody uses, whose session may come back, and the tokens in them."""
        self._sessions: dict[str, int] = {}
        self._prompts: dict[int, Ids] = {}
        """Slots that begin with a prompt that was computed in one go."""
        self._holders: dict[Ids, int] = {}

    def holds(self, slot: int) -> bool:
        """Whether something would have to be parked before the slot is used."""
        return slot in self._idle or slot in self._prompts

    def find(self, session: str, prefix: Ids) -> Found | None:
        """What the session left, if the request goes on from there or repeats it; else what siblings have."""
        if not self._enabled or not prefix:
            return None
        own = self._sessions.get(session)
        if own is not None and (tokens := _usable(self._idle[own][1], prefix)):
            return Found(tokens, slot=own, own=True)
        parked = None if own is not None else self._parking.find(session)
        if parked is not None and (tokens := _usable(parked.ids, prefix)):
            return Found(tokens, parked=parked)
        if prefix in self._holders:
            return Found(len(prefix), slot=self._holders[prefix])
        parked = self._parking.find(prefix)
        if parked is not None and (tokens := _usable(parked.ids, prefix)):
            return Found(tokens, parked=parked)
        return None

    def offer(self, slot: int, prompt: Ids) -> None:
        """A slot begins with a prompt that others may want."""
        if self._enabled and prompt and prompt not in self._holders:
            self._prompts[slot], self._holders[prompt] = prompt, slot

    def stay(self, slot: int, session: str, ids: Ids) -> None:
        """A session has ended its turn, and its tokens stay in the slot."""
        if self._enabled and ids:
            self.forget(session)
            self._idle[slot], self._sessions[session] = (session, ids), slot

    def wake(self, slot: int, tokens: int) -> None:
        """A session goes on in its own slot, after its first `tokens`."""
        session, _ = self._idle.pop(slot)
        del self._sessions[session]
        if tokens < len(self._prompts.get(slot, ())):
            self.withdraw(slot)

    def vacate(self, slot: int) -> None:
        """A slot is about to be used by another: park what it holds."""
        session, ids = self._idle.pop(slot, (None, ()))
        prompt = self._prompts.get(slot, ())
        self.withdraw(slot)
        held = max(ids, prompt, key=len)
        if not held:
            return
        parked = Parked(held, self._cache.take(slot, len(held)))
        if self._parking.is_tight(2 * parked.size):
            self._cache.flush()  # what moves on to the host must be whole
        if session is not None:
            del self._sessions[session]
            self._parking.park(session, parked)
        if prompt:
            self._parking.park(prompt, parked)

    def withdraw(self, slot: int) -> None:
        """The prompt in a slot is no longer there for others."""
        prompt = self._prompts.pop(slot, None)
        if prompt is not None:
            del self._holders[prompt]

    def move(self, moves: Sequence[Move]) -> None:
        """Rows that run have got other slots; their prompts are there now."""
        for move in moves:
            prompt = self._prompts.pop(move.source, None)
            if prompt is not None:
                self._prompts[move.target], self._holders[prompt] = prompt, move.target

    def forget(self, session: str) -> None:
        """A session will not come back, or comes back with other tokens."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            del self._idle[slot]
        self._parking.forget(session)

    def clear(self) -> None:
        """Forget everything: the weights are about to change."""
        for held in (self._idle, self._sessions, self._prompts, self._holders):
            held.clear()
        self._parking.clear()


def _usable(held: Sequence[int], prefix: Ids) -> int:
    """How many of the held tokens a request can use: all, or as many as it has; none if they part before."""
    shorter = min(len(held), len(prefix))
    return shorter if shared_prefix(held, prefix) == shorter else 0
