"""KV cache manager (block manager): rows and pages for sequences.

Owns every row and every page: which sequence gets which, what is reused from the prefix cache, when a running row needs
its next page, and that copies between pages are made together before one of them changes owner. Refuses to decide when
anything happens: the scheduler says which sequence is admitted, grows or is preempted. A row grows by one slot a step
at most, so the step that may need a page follows from when the row started, however far the GPU is ahead of the host.
Invariant: pages are held by sequences that have a row and by the prefix cache, and are free otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.engine.native.kv_cache import PageCopy, PagedKVCache
from treadle.engine.native.page_pool import FreeList, PagePool
from treadle.engine.native.prefix_cache import PrefixCache, PrefixHit, SwappedTokens, SwapSpace
from treadle.engine.native.sequence import SequenceState

LOOKAHEAD_STEPS = 8
"""Steps for which pages are allocated ahead, so that not every step changes the page table. Less than a page."""


class PageSchedule:
    """Sequences by the step that needs their next page."""

    def __init__(self) -> None:
        self._due: dict[int, list[SequenceState]] = {}
        self._when: dict[SequenceState, int] = {}
        """What is in `_due` and not here was dropped or rescheduled."""
        self._reached = -1

    def add(self, sequence: SequenceState, step: int) -> None:
        """Schedule a page before this step, which lies after the steps allocated so far."""
        when = step // LOOKAHEAD_STEPS
        assert when > self._reached, "a row has slots for the next steps when it starts"
        self._when[sequence] = when
        self._due.setdefault(when, []).append(sequence)

    def drop(self, sequence: SequenceState) -> None:
        """Drop a sequence that needs no more pages."""
        self._when.pop(sequence, None)

    def next(self, step: int) -> list[SequenceState]:
        """The sequences that need a page before this step or the following lookahead; each is returned once."""
        if step // LOOKAHEAD_STEPS == self._reached:
            return []
        self._reached = step // LOOKAHEAD_STEPS
        due = self._due.pop(self._reached, [])
        return [
            sequence for sequence in due if self._when.get(sequence) == self._reached and self._when.pop(sequence) >= 0
        ]


COMPACT_BELOW = 0.75
"""Rows are moved together when fewer than this fraction of those computed would do."""


@dataclass(frozen=True, slots=True)
class _Allocation:
    """Planned allocation: the prefix hit, how many of its pages are kept or shared, and how many are new."""

    found: PrefixHit | None
    kept: int
    new: int


class KVCacheManager:
    """Rows and pages of the sequences. `rows` bounds how many sequences are admitted."""

    def __init__(self, cache: PagedKVCache, swap_space: SwapSpace, rows: int, *, caching: bool) -> None:
        self._cache = cache
        self._swap_space = swap_space
        self.num_rows = min(cache.num_rows, rows)
        self.free_rows = FreeList(self.num_rows)
        self.pages = PagePool(self.num_rows if cache.aligned else cache.num_pages)
        self.prefix_cache = PrefixCache(cache, self.pages, swap_space, enabled=caching)
        self._growing: set[SequenceState] = set()
        """Sequences that may need more pages: one page is left free for each of them when others are admitted."""
        self._copies_due: list[PageCopy] = []
        self._freed_rows = 0

    @property
    def changes(self) -> int:
        """Changes whenever an allocation that failed may succeed."""
        return self.pages.releases + self._freed_rows

    def allocate(self, sequence: SequenceState, sibling: SequenceState | None) -> int | None:
        """Allocate a row, and pages for the prefix and the lookahead; returns how many tokens are cached in them.

        `sibling` computes the same prefix right now. None: there is no room, and the sequence has nothing.
        """
        if not self.free_rows:
            return None
        allocation = self._plan_allocation(sequence, sibling)
        if self._cache.aligned and allocation.new:
            self._free_aligned()
            allocation = self._plan_allocation(sequence, sibling)
        while allocation.new + len(self._growing) > len(self.pages.free):
            if not self.free_pages():
                return None
            allocation = self._plan_allocation(sequence, sibling)
        sequence.pages = self._assemble_pages(sequence, allocation, sibling)
        sequence.row = sequence.pages[0] if self._cache.aligned else self.free_rows.take()
        if self._cache.aligned:
            self.free_rows.remove(sequence.row)
        self._cache.assign(sequence.row, 0, sequence.pages)
        self._update_growing(sequence)
        return 0 if allocation.found is None else allocation.found.tokens

    def _plan_allocation(self, sequence: SequenceState, sibling: SequenceState | None) -> _Allocation:
        found, page = self._find_prefix(sequence), self._cache.page_size
        total = self._cache.count_pages(min(len(sequence.prefix) + 1 + LOOKAHEAD_STEPS, sequence.slots))
        kept = 0
        if found is not None and found.cached is not None:
            whole, rest = divmod(found.tokens, page)
            kept = whole + (rest > 0 and found.own and not self._must_copy(found, whole))
        elif found is None and sibling is not None:
            kept = len(sequence.prefix) // page
        return _Allocation(found, kept, total - kept)

    def count_cached(self, sequence: SequenceState) -> int:
        """How many tokens of its prefix need not be computed."""
        found = self._find_prefix(sequence)
        return 0 if found is None else found.tokens

    def _find_prefix(self, sequence: SequenceState) -> PrefixHit | None:
        if sequence.swapped is not None:
            return PrefixHit(len(sequence.swapped.ids), swapped=sequence.swapped)
        return self.prefix_cache.find(sequence.request.session_row, sequence.prefix)

    def _must_copy(self, found: PrefixHit, at: int) -> bool:
        """Whether a session continues in the middle of a page that others read beyond that (copy on write)."""
        assert found.cached is not None
        return found.tokens < len(found.cached.ids) and self.pages.users(found.cached.pages[at]) > 1

    def _free_aligned(self) -> None:
        """Free the lowest row's page, unless another free one is close enough to the running rows."""
        row, page = self.free_rows.lowest(), self.pages.free.lowest()
        near = (self.num_rows - len(self.free_rows) + 1) / COMPACT_BELOW
        if row is not None and (page is None or (row < page and page >= near)):
            self.run_copies()
            self.prefix_cache.evict_page(row)

    def _assemble_pages(
        self, sequence: SequenceState, allocation: _Allocation, sibling: SequenceState | None
    ) -> list[int]:
        """The sequence's pages, with the cached prefix in them."""
        found, new = allocation.found, self.pages.take(allocation.new)
        if found is None:
            shared = [] if sibling is None else sibling.pages[: allocation.kept]
            self.pages.share(shared)
            return shared + new
        if found.cached is None:
            assert found.swapped is not None
            self._cache.restore(new[: self._cache.count_pages(found.tokens)], found.swapped.kv)
            self._free_swapped(sequence)
            if found.own:
                self.prefix_cache.forget(sequence.request.session_row)  # its pages are the cached copy from now on
            return new
        cached, rest = found.cached, found.tokens % self._cache.page_size
        if rest and allocation.kept == found.tokens // self._cache.page_size:
            self._copies_due.append(PageCopy(cached.pages[allocation.kept], new[0], rest))
        if not found.own:
            self.pages.share(cached.pages[: allocation.kept])
            return cached.pages[: allocation.kept] + new
        pages = self.prefix_cache.take_row(sequence.request.session_row)
        if allocation.kept < len(pages):
            self.run_copies()
            self.pages.release(pages[allocation.kept :])
        return pages[: allocation.kept] + new

    def _update_growing(self, sequence: SequenceState) -> None:
        if len(sequence.pages) * self._cache.page_size < sequence.slots:
            self._growing.add(sequence)
        else:
            self._growing.discard(sequence)

    def missing_pages(self, sequence: SequenceState, slots: int) -> int:
        """Pages missing for so many slots, or for as many as the sequence may ever need."""
        return max(0, self._cache.count_pages(min(slots, sequence.slots)) - len(sequence.pages))

    def grow(self, sequence: SequenceState, count: int) -> None:
        """Allocate more pages to a sequence; the caller has checked that they are free."""
        new = self.pages.take(count)
        self._cache.assign(sequence.row, len(sequence.pages), new)
        sequence.pages += new
        self._update_growing(sequence)

    def num_slots(self, sequence: SequenceState) -> int | None:
        """Slots that a sequence has; None when it needs no more."""
        return len(sequence.pages) * self._cache.page_size if sequence in self._growing else None

    def free_pages(self) -> bool:
        """Free pages: new ones where the cache can grow, else those of an evicted prefix. False if there are none."""
        new = self._cache.grow()
        if new:
            self.pages.extend(new)
            return True
        self.run_copies()
        return self.prefix_cache.evict()

    def release(self) -> None:
        """Release the memory of a cache that no sequence uses, with all cached prefixes."""
        self.prefix_cache.clear()
        self._cache.release()
        if not self._cache.aligned:
            self.pages.reset(self._cache.num_pages)

    def run_copies(self) -> None:
        """Run the pending page copies: before pages change owner, and before cached prefixes are read."""
        if self._copies_due:
            self._cache.copy(self._copies_due)
            self._copies_due.clear()

    def share(self, first: SequenceState, others: Sequence[SequenceState], tokens: int) -> None:
        """Share a finished prefill with siblings: they have its full pages, and now get a copy of the last one."""
        at, rest = divmod(tokens, self._cache.page_size)
        if rest:
            self._copies_due += [PageCopy(first.pages[at], other.pages[at], rest) for other in others]

    def move(self, sequence: SequenceState, row: int, tokens: int) -> None:
        """Move a sequence to another row. Its tokens are copied only where rows and pages are aligned."""
        self.free_rows.remove(row)
        self.free_rows.add(sequence.row)
        sequence.row = row
        if self._cache.aligned:
            self.prefix_cache.evict_page(row)
            self.pages.claim(row)
            self._cache.copy([PageCopy(sequence.pages[0], row, tokens)])
            self.pages.release(sequence.pages)
            sequence.pages = [row]
        self._cache.assign(row, 0, sequence.pages)

    def free_and_cache(self, sequence: SequenceState, ids: tuple[int, ...]) -> None:
        """Free a sequence; these tokens stay in the prefix cache for the session's next turn."""
        self.prefix_cache.add_row(sequence.request.session_row, ids, sequence.pages)
        self._free_row(sequence)

    def free(self, sequence: SequenceState) -> None:
        """Free a sequence and its pages; nothing of it is cached."""
        self.pages.release(sequence.pages)
        self._free_row(sequence)

    def swap_out(self, sequence: SequenceState, tokens: int) -> None:
        """Swap a preempted sequence's first tokens out to host memory, if there is room, and free its pages."""
        self.run_copies()
        pages = sequence.pages[: self._cache.count_pages(tokens)]
        if tokens and self._swap_space.reserve(self._cache.saved_bytes(pages, tokens)):
            sequence.swapped = SwappedTokens(sequence.prefix[:tokens], self._cache.save(pages, tokens))
        self.free(sequence)

    def _free_row(self, sequence: SequenceState) -> None:
        self.free_rows.add(sequence.row)
        self._growing.discard(sequence)
        self._freed_rows += 1
        sequence.row, sequence.pages = -1, []

    def drop_swapped(self, sequence: SequenceState, *, for_session: bool) -> None:
        """Drop a sequence's swapped tokens, or hand them to its session's cache entry."""
        if sequence.swapped is not None:
            swapped = sequence.swapped
            self._free_swapped(sequence)
            if for_session:
                self.prefix_cache.add_swapped(sequence.request.session_row, swapped)

    def _free_swapped(self, sequence: SequenceState) -> None:
        if sequence.swapped is not None:
            self._swap_space.unreserve(sequence.swapped.size)
            sequence.swapped = None
