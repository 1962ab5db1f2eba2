"""Prefix cache and swap space: keys and values that a later request may reuse.

`PrefixCache` owns which tokens stay in which pages while no sequence runs in them: rows of sessions between two turns,
and prompts that several sequences share. Nothing is copied before it must be: entries move to host memory only when
pages run out, least recently used first. `SwapSpace` owns that host memory, and room for preempted sequences, which is
never evicted. What comes back from there has the same bits; what was dropped is computed again, up to rounding.

A page is written by one sequence at most, behind everything that others read of it; a sequence that continues in a page
that is not full gets a copy of it (copy on write).
Invariants: what is found was computed by the weights in use, except for a preempted sequence that goes on as running
ones do when weights change; swapped tokens never take more than the budget.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from treadle.engine.native.kv_cache import PagedKVCache, SavedPages
from treadle.engine.native.page_pool import PagePool


@dataclass(frozen=True, slots=True)
class SwappedTokens:
    """Tokens and their keys and values, as `PagedKVCache.save` returns them."""

    ids: Sequence[int]
    kv: SavedPages

    @property
    def size(self) -> int:
        return sum(part.numel() * part.itemsize for part in self.kv)


class SwapSpace:
    """Swapped-out tokens by key, in LRU order."""

    def __init__(self, num_bytes: int) -> None:
        self._swapped: OrderedDict[Hashable, SwappedTokens] = OrderedDict()
        self._capacity = self._room = num_bytes
        self._reserved = 0
        self._evicted: list[Hashable] = []

    def __len__(self) -> int:
        return len(self._swapped)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of preempted sequences."""
        return self._reserved

    def put(self, key: Hashable, swapped: SwappedTokens) -> None:
        """Store it, in place of what the key had; the least recently used are evicted. What cannot fit is dropped."""
        self.forget(key)
        if swapped.size <= self._capacity - self._reserved:
            self._make_room(swapped.size)
            self._swapped[key] = swapped
            self._room -= swapped.size

    def _make_room(self, size: int) -> None:
        while self._room < size:
            key, gone = self._swapped.popitem(last=False)
            self._room += gone.size
            self._evicted.append(key)

    def take_evicted(self) -> list[Hashable]:
        """The keys that lost their tokens for want of room since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def __contains__(self, key: Hashable) -> bool:
        return key in self._swapped

    def reserve(self, size: int) -> bool:
        """Reserve room for a preempted sequence's pages, until `unreserve`. False: there is not enough."""
        if size > self._capacity - self._reserved:
            return False
        self._make_room(size)
        self._room -= size
        self._reserved += size
        return True

    def unreserve(self, size: int) -> None:
        """Free the room of a preempted sequence: it has its pages again, or needs none."""
        self._room += size
        self._reserved -= size

    def find(self, key: Hashable) -> SwappedTokens | None:
        """The key's tokens, if still stored; this marks them as used."""
        if key in self._swapped:
            self._swapped.move_to_end(key)
        return self._swapped.get(key)

    def forget(self, key: Hashable) -> None:
        if key in self._swapped:
            self._room += self._swapped.pop(key).size

    def clear(self) -> None:
        """Drop every entry: the weights are about to change."""
        for key in list(self._swapped):
            self.forget(key)


def common_prefix_length(cached: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens two sequences have in common at the start."""
    limit = min(len(cached), len(ids))
    if list(cached[:limit]) == list(ids[:limit]):
        return limit
    return next(at for at in range(limit) if cached[at] != ids[at])


Ids = tuple[int, ...]

SessionRow = tuple[str, int]
"""A session, and the row of its trajectory: a main agent and its sub-agents, or forks, take turns in one session."""


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Tokens, and the pages they are in."""

    ids: Ids
    pages: list[int]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Prefix-cache hit: tokens that need not be computed, in pages or swapped out."""

    tokens: int
    cached: CachedTokens | None = None
    swapped: SwappedTokens | None = None
    own: bool = False
    """Whether the row itself cached this: it continues in the same pages, if they are still there."""


@dataclass(slots=True)
class CacheCounters:
    """What the prefix cache had to do since the engine started."""

    evicted_rows: int = 0
    """Rows of sessions whose pages were taken for others."""
    evicted_prompts: int = 0
    swapped_out_bytes: int = 0


class PrefixCache:
    """Prefixes by row of a session and by prompt (ids). With `enabled` false nothing is ever found."""

    def __init__(self, cache: PagedKVCache, pages: PagePool, swap_space: SwapSpace, *, enabled: bool) -> None:
        self._cache = cache
        self._pages = pages
        self._swap_space = swap_space
        self._enabled = enabled
        self._cached: OrderedDict[Hashable, CachedTokens] = OrderedDict()
        self._uses: Counter[int] = Counter()
        """References to each page from here; the pool counts more where a row uses it too."""
        self._rows: dict[str, set[int]] = {}
        """Of each session, the rows that have an entry, in pages or swapped out."""
        self.counters = CacheCounters()

    def find(self, owner: SessionRow, prefix: Ids) -> PrefixHit | None:
        """The row's own tokens, if the request extends or repeats them; else another row's of the session, which it
        may have been forked from; else a shared prompt."""
        if not self._enabled or not prefix:
            return None
        return (
            self._find(owner, prefix, own=True)
            or self._find_other_row(owner, prefix)
            or self._find(prefix, prefix, own=False)
        )

    def _find_other_row(self, owner: SessionRow, prefix: Ids) -> PrefixHit | None:
        session, row = owner
        others = self._rows.get(session, set()) - {row}
        hits = [hit for other in others if (hit := self._find((session, other), prefix, own=False)) is not None]
        return max(hits, key=lambda hit: hit.tokens, default=None)

    def _find(self, key: Hashable, prefix: Ids, *, own: bool) -> PrefixHit | None:
        cached = self._cached.get(key)
        swapped = self._swap_space.find(key) if cached is None else None
        kept = cached or swapped
        tokens = 0 if kept is None else _usable(kept.ids, prefix)
        if not tokens:
            return None
        if cached is not None:
            self._cached.move_to_end(key)
        return PrefixHit(tokens, cached, swapped, own)

    def add_prompt(self, prompt: Ids, pages: Sequence[int]) -> None:
        """Share the pages of a prompt that was computed as a whole."""
        if self._enabled and prompt and prompt not in self._cached:
            shared = list(pages[: self._cache.count_pages(len(prompt))])
            self._pages.share(shared)
            self._keep(prompt, CachedTokens(prompt, shared))

    def add_row(self, owner: SessionRow, ids: Ids, pages: list[int]) -> None:
        """Keep a row's tokens in their pages after its turn; pages beyond them are freed."""
        self.forget(owner)
        needed = self._cache.count_pages(len(ids)) if self._enabled else 0
        self._pages.release(pages[needed:])
        if needed:
            self._keep(owner, CachedTokens(ids, pages[:needed]))
            self._rows.setdefault(owner[0], set()).add(owner[1])

    def _keep(self, key: Hashable, cached: CachedTokens) -> None:
        self._cached[key] = cached
        self._uses.update(cached.pages)

    def take_row(self, owner: SessionRow) -> list[int]:
        """Hand a row's pages back to it; the caller owns them now."""
        pages = self._drop(owner).pages
        self._unlist([owner])
        return pages

    def _drop(self, key: Hashable) -> CachedTokens:
        cached = self._cached.pop(key)
        for page in cached.pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                del self._uses[page]
        return cached

    def evict(self) -> bool:
        """Swap out the least recently used entry that frees a page; False if nothing here does.

        Where entries hold the same pages, and none of them alone frees one, all that hold one page go.
        """
        for key, cached in self._cached.items():
            if any(self._pages.users(page) == 1 for page in reversed(cached.pages)):
                self._swap_out(key)
                return True
        for page, uses in self._uses.items():
            if self._pages.users(page) == uses:
                self.evict_page(page)
                return True
        return False

    def evict_page(self, page: int) -> None:
        """Swap out every entry that uses this page."""
        if page in self._uses:
            for key in [key for key, cached in self._cached.items() if page in cached.pages]:
                self._swap_out(key)

    def _swap_out(self, key: Hashable) -> None:
        """Prompts are dropped on a GPU: computing them again gives the same bits, faster than two copies."""
        cached = self._drop(key)
        is_prompt = key == cached.ids
        if is_prompt:
            self.counters.evicted_prompts += 1
        else:
            self.counters.evicted_rows += 1
        if not is_prompt or self._cache.kv.device.type == "cpu":
            swapped = SwappedTokens(cached.ids, self._cache.save(cached.pages, len(cached.ids)))
            self.counters.swapped_out_bytes += swapped.size
            self._swap_space.put(key, swapped)
        self._pages.release(cached.pages)
        self._unlist([key, *self._swap_space.take_evicted()])

    def add_swapped(self, owner: SessionRow, swapped: SwappedTokens) -> None:
        """Keep the tokens of a row whose turn ended while it was swapped out."""
        self.forget(owner)
        if self._enabled:
            self._swap_space.put(owner, swapped)
            self._rows.setdefault(owner[0], set()).add(owner[1])
            self._unlist([owner, *self._swap_space.take_evicted()])

    def forget(self, key: Hashable) -> None:
        """Drop an entry: the row has other tokens, or the prompt's values are invalid."""
        self._release([key] if key in self._cached else [])
        self._swap_space.forget(key)
        self._unlist([key])

    def forget_session(self, session: str) -> None:
        """Drop the entries of all rows of a session that is over."""
        for row in list(self._rows.get(session, ())):
            self.forget((session, row))

    def _unlist(self, keys: Iterable[Hashable]) -> None:
        """Forget which rows there are, of those keys that have no entry any more."""
        for key in keys:
            if key in self._cached or key in self._swap_space:
                continue
            match key:
                case (str() as session, int() as row) if session in self._rows:
                    self._rows[session].discard(row)
                    if not self._rows[session]:
                        del self._rows[session]

    def clear(self) -> None:
        """Drop every entry: the weights are about to change."""
        self._release(list(self._cached))
        self._swap_space.clear()
        self._rows.clear()

    def _release(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._pages.release(self._drop(key).pages)


def _usable(cached: Sequence[int], prefix: Ids) -> int:
    """How many cached tokens a request can use: the shorter of the two, or none if they differ before its end."""
    shorter = min(len(cached), len(prefix))
    return shorter if common_prefix_length(cached, prefix) == shorter else 0
