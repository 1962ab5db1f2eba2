"""Prefix cache and swap space: keys and values that a later request may reuse.

`PrefixCache` owns which tokens stay in which pages without a row: sessions between two turns, and prompts that several
sequences share. Nothing is copied before it must be: entries move to host memory only when pages run out, least
recently used first. `SwapSpace` owns that host memory, and room for sequences that were preempted, which give way to
nothing. What comes back from there has the same bits; what was dropped is computed again, up to rounding.

A page is written by one sequence at most, behind everything that others read of it; a sequence that continues in a page
that is not full gets a copy of it (copy on write).
Invariants: what is found was computed by the weights in use, except for a preempted sequence that goes on as running
ones do when weights change; swapped tokens never take more than the budget.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from treadle.engine.native.kv_cache import PagedKVCache, PagePool, SavedPages


@dataclass(frozen=True, slots=True)
class SwappedTokens:
    """Tokens and their keys and values, as `PageCache.save` gives them."""

    ids: Sequence[int]
    kv: SavedPages

    @property
    def size(self) -> int:
        return sum(part.numel() * part.itemsize for part in self.kv)


class SwapSpace:
    """What was parked under a key, oldest first."""

    def __init__(self, num_bytes: int) -> None:
        self._parked: OrderedDict[Hashable, SwappedTokens] = OrderedDict()
        self._capacity = self._room = num_bytes
        self._held = 0

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def held_bytes(self) -> int:
        """What rows have here that were preempted."""
        return self._held

    def swap_out(self, key: Hashable, swapped: SwappedTokens) -> None:
        """Keep it, in place of what the key had; others give way. What cannot fit at all is not kept."""
        self.forget(key)
        if swapped.size <= self._capacity - self._held:
            self._make_room(swapped.size)
            self._parked[key] = swapped
            self._room -= swapped.size

    def _make_room(self, size: int) -> None:
        while self._room < size:
            _, gone = self._parked.popitem(last=False)
            self._room += gone.size

    def hold(self, size: int) -> bool:
        """Set room aside for what a preempted row had, until `let_go`. False: there is not enough."""
        if size > self._capacity - self._held:
            return False
        self._make_room(size)
        self._room -= size
        self._held += size
        return True

    def let_go(self, size: int) -> None:
        """A preempted row has its pages again, or needs none."""
        self._room += size
        self._held -= size

    def find(self, key: Hashable) -> SwappedTokens | None:
        """What the key has, if it was not forgotten; it counts as used now."""
        if key in self._parked:
            self._parked.move_to_end(key)
        return self._parked.get(key)

    def forget(self, key: Hashable) -> None:
        if key in self._parked:
            self._room += self._parked.pop(key).size

    def clear(self) -> None:
        """Forget everything that is under a key: the weights are about to change."""
        for key in list(self._parked):
            self.forget(key)


def common_prefix_length(held: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens two sequences have in common at the start."""
    limit = min(len(held), len(ids))
    if list(held[:limit]) == list(ids[:limit]):
        return limit
    return next(at for at in range(limit) if held[at] != ids[at])


Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Tokens, and the pages they are in."""

    ids: Ids
    pages: list[int]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Tokens that need not be computed: in pages, or parked."""

    tokens: int
    held: CachedTokens | None = None
    swapped: SwappedTokens | None = None
    own: bool = False
    """Whether this is what the session itself left: it can go on right there, if that is still in pages."""


class PrefixCache:
    """See the module. With `enabled` false nothing is ever found. Keys are sessions (text) and prompts (ids)."""

    def __init__(self, cache: PagedKVCache, pages: PagePool, parking: SwapSpace, *, enabled: bool) -> None:
        self._cache = cache
        self._pages = pages
        self._swap_space = parking
        self._enabled = enabled
        self._held: OrderedDict[Hashable, CachedTokens] = OrderedDict()
        self._uses: Counter[int] = Counter()
        """How often each page is held here; it has more users when a row has it too."""

    def find(self, session: str, prefix: Ids) -> PrefixHit | None:
        """What the session left, if the request goes on from there or repeats it; else what siblings have."""
        if not self._enabled or not prefix:
            return None
        return self._find(session, prefix, own=True) or self._find(prefix, prefix, own=False)

    def _find(self, key: Hashable, prefix: Ids, *, own: bool) -> PrefixHit | None:
        held = self._held.get(key)
        swapped = self._swap_space.find(key) if held is None else None
        kept = held or swapped
        tokens = 0 if kept is None else _usable(kept.ids, prefix)
        if not tokens:
            return None
        if held is not None:
            self._held.move_to_end(key)
        return PrefixHit(tokens, held, swapped, own)

    def offer(self, prompt: Ids, pages: Sequence[int]) -> None:
        """Pages begin with a prompt that was computed in one go and that others may want."""
        if self._enabled and prompt and prompt not in self._held:
            shared = list(pages[: self._cache.count_pages(len(prompt))])
            self._pages.share(shared)
            self._keep(prompt, CachedTokens(prompt, shared))

    def stay(self, session: str, ids: Ids, pages: list[int]) -> None:
        """A session has ended its turn, and its tokens stay in its pages; those behind them are free."""
        self.forget(session)
        needed = self._cache.count_pages(len(ids)) if self._enabled else 0
        self._pages.release(pages[needed:])
        if needed:
            self._keep(session, CachedTokens(ids, pages[:needed]))

    def _keep(self, key: Hashable, held: CachedTokens) -> None:
        self._held[key] = held
        self._uses.update(held.pages)

    def wake(self, session: str) -> list[int]:
        """A session goes on in its own pages, which are the caller's now."""
        return self._drop(session).pages

    def _drop(self, key: Hashable) -> CachedTokens:
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
                self._swap_out(key)
                return True
        return False

    def evict_page(self, page: int) -> None:
        """Park whatever a page has a part of."""
        if page in self._uses:
            for key in [key for key, held in self._held.items() if page in held.pages]:
                self._swap_out(key)

    def _swap_out(self, key: Hashable) -> None:
        """A prompt gets the same bits when it is computed again; on a GPU that is faster than to the host and back."""
        held = self._drop(key)
        if key != held.ids or self._cache.kv.device.type == "cpu":
            self._swap_space.swap_out(key, SwappedTokens(held.ids, self._cache.save(held.pages, len(held.ids))))
        self._pages.release(held.pages)

    def leave(self, session: str, swapped: SwappedTokens) -> None:
        """A session has ended its turn while it was parked."""
        self.forget(session)
        if self._enabled:
            self._swap_space.swap_out(session, swapped)

    def forget(self, key: Hashable) -> None:
        """A session will not come back, or comes back with other tokens; or a prompt is no longer good."""
        self._let_go([key] if key in self._held else [])
        self._swap_space.forget(key)

    def clear(self) -> None:
        """Forget everything: the weights are about to change."""
        self._let_go(list(self._held))
        self._swap_space.clear()

    def _let_go(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._pages.release(self._drop(key).pages)


def _usable(held: Sequence[int], prefix: Ids) -> int:
    """How many of the held tokens a request can use: all, or as many as it has; none if they part before."""
    shorter = min(len(held), len(prefix))
    return shorter if common_prefix_length(held, prefix) == shorter else 0
