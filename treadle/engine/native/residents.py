"""What pages hold that somebody may ask for again: sessions between two turns, and prompts that siblings share.

Owns whose tokens stay in which pages, without a row, and that nothing is copied before it must be: what is kept moves
to the parking only when pages run out, the least recently used first. Knows nothing of tickets and steps.

A page is written by one sequence at most, behind everything that others read of it: those who take over a page that is
not full get a copy of it. So the pages of a prompt serve its siblings while the first of them runs on in the last one.
Invariant: what is found here was computed by the weights in use, and is still in its pages or parked.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from treadle.engine.native.cache import PageCache
from treadle.engine.native.pages import Pages
from treadle.engine.native.parking import Parked, Parking, shared_prefix

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens, and the pages they are in."""

    ids: Ids
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens that need not be computed: in pages, or parked."""

    tokens: int
    held: Held | None = None
    parked: Parked | None = None
    own: bool = False
    """Whether this is what the session itself left: it can go on right there, if that is still in pages."""


class Residents:
    """See the module. With `enabled` false nothing is ever found. Keys are sessions (text) and prompts (ids)."""

    def __init__(self, cache: PageCache, pages: Pages, parking: Parking, *, enabled: bool) -> None:
        self._cache = cache
        self._pages = pages
        self._parking = parking
        self._enabled = enabled
        self._held: OrderedDict[Hashable, Held] = OrderedDict()
        self._uses: Counter[int] = Counter()
        """How often each page is held here; it has more users when a row has it too."""

    def find(self, session: str, prefix: Ids) -> Found | None:
        """What the session left, if the request goes on from there or repeats it; else what siblings have."""
        if not self._enabled or not prefix:
            return None
        return self._find(session, prefix, own=True) or self._find(prefix, prefix, own=False)

    def _find(self, key: Hashable, prefix: Ids, *, own: bool) -> Found | None:
        held = self._held.get(key)
        parked = self._parking.find(key) if held is None else None
        kept = held or parked
        tokens = 0 if kept is None else _usable(kept.ids, prefix)
        if not tokens:
            return None
        if held is not None:
            self._held.move_to_end(key)
        return Found(tokens, held, parked, own)

    def offer(self, prompt: Ids, pages: Sequence[int]) -> None:
        """Pages begin with a prompt that was computed in one go and that others may want."""
        if self._enabled and prompt and prompt not in self._held:
            shared = list(pages[: self._cache.count_pages(len(prompt))])
            self._pages.share(shared)
            self._keep(prompt, Held(prompt, shared))

    def stay(self, session: str, ids: Ids, pages: list[int]) -> None:
        """A session has ended its turn, and its tokens stay in its pages; those behind them are free."""
        self.forget(session)
        needed = self._cache.count_pages(len(ids)) if self._enabled else 0
        self._pages.release(pages[needed:])
        if needed:
            self._keep(session, Held(ids, pages[:needed]))

    def _keep(self, key: Hashable, held: Held) -> None:
        self._held[key] = held
        self._uses.update(held.pages)

    def wake(self, session: str) -> list[int]:
        """A session goes on in its own pages, which are the caller's now."""
        return self._drop(session).pages

    def _drop(self, key: Hashable) -> Held:
        held = self._held.pop(key)
        for page in held.pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                del self._uses[page]
        return held

    def evict(self) -> bool:
        """Park the least recently used of those that give a page free; False if there is none."""
        for key, held in self._held.items():
            if any(self._pages.users(page) == self._uses[page] for page in reversed(held.pages)):
                self._park(key)
                return True
        return False

    def vacate(self, page: int) -> None:
        """Park whatever a page has a part of."""
        if page in self._uses:
            for key in [key for key, held in self._held.items() if page in held.pages]:
                self._park(key)

    def _park(self, key: Hashable) -> None:
        """A prompt gets the same bits when it is computed again; on a GPU that is faster than to the host and back."""
        held = self._drop(key)
        if key != held.ids or self._cache.kv.device.type == "cpu":
            self._parking.park(key, Parked(held.ids, self._cache.save(held.pages, len(held.ids))))
        self._pages.release(held.pages)

    def leave(self, session: str, parked: Parked) -> None:
        """A session has ended its turn while it was parked."""
        self.forget(session)
        if self._enabled:
            self._parking.park(session, parked)

    def forget(self, key: Hashable) -> None:
        """A session will not come back, or comes back with other tokens; or a prompt is no longer good."""
        self._let_go([key] if key in self._held else [])
        self._parking.forget(key)

    def clear(self) -> None:
        """Forget everything: the weights are about to change."""
        self._let_go(list(self._held))
        self._parking.clear()

    def _let_go(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._pages.release(self._drop(key).pages)


def _usable(held: Sequence[int], prefix: Ids) -> int:
    """How many of the held tokens a request can use: all, or as many as it has; none if they part before."""
    shorter = min(len(held), len(prefix))
    return shorter if shared_prefix(held, prefix) == shorter else 0
