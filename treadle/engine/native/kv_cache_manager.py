"""KV cache manager (block manager): rows and pages for sequences.

Owns every row and every page: which sequence gets which, what is reused from the prefix cache, when a running row needs
its next page, and that copies between pages are made together before one of them changes owner. Refuses to decide when
anything happens: the scheduler says which sequence is admitted, grows or is preempted. A row grows by one slot a step
at most, so the step that may need a page follows from when the row started, however far the GPU is ahead of the host.
Invariant: pages are held by sequences that have a row and by the prefix cache, and are free otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.engine.native.kv_cache import FreeList, PageCopy, PagedKVCache, PagePool
from treadle.engine.native.prefix_cache import PrefixCache, PrefixHit, SwappedTokens, SwapSpace
from treadle.engine.native.sequence import SequenceState

LOOKAHEAD_STEPS = 8
"""Steps that are provided for at once, so that not every step changes tables. A page has more places than this."""


class PageSchedule:
    """Tickets by the steps that need a page for them."""

    def __init__(self) -> None:
        self._due: dict[int, list[SequenceState]] = {}
        self._when: dict[SequenceState, int] = {}
        """What is in `_due` and not here has been dropped, or planned anew."""
        self._reached = -1

    def plan(self, ticket: SequenceState, step: int) -> None:
        """A ticket needs a page before this step, which lies behind those that are provided for."""
        when = step // LOOKAHEAD_STEPS
        assert when > self._reached, "a row has places for the next steps when it starts"
        self._when[ticket] = when
        self._due.setdefault(when, []).append(ticket)

    def drop(self, ticket: SequenceState) -> None:
        """A ticket needs no more pages."""
        self._when.pop(ticket, None)

    def next(self, step: int) -> list[SequenceState]:
        """The tickets that need a page before this step or one of those that follow; each is told once."""
        if step // LOOKAHEAD_STEPS == self._reached:
            return []
        self._reached = step // LOOKAHEAD_STEPS
        due = self._due.pop(self._reached, [])
        return [ticket for ticket in due if self._when.get(ticket) == self._reached and self._when.pop(ticket) >= 0]


COMPACT_BELOW = 0.75
"""Rows are moved together when fewer than this fraction of those computed would do."""


@dataclass(frozen=True, slots=True)
class _Allocation:
    """What a ticket starts from, how many pages of that it keeps or shares, and how many it needs besides."""

    found: PrefixHit | None
    kept: int
    new: int


class KVCacheManager:
    """See the module. `rows` bounds how many tickets are seated."""

    def __init__(self, cache: PagedKVCache, parking: SwapSpace, rows: int, *, caching: bool) -> None:
        self._cache = cache
        self._swap_space = parking
        self.num_rows = min(cache.rows, rows)
        self.free_rows = FreeList(self.num_rows)
        self.pages = PagePool(self.num_rows if cache.aligned else cache.pages)
        self.prefix_cache = PrefixCache(cache, self.pages, parking, enabled=caching)
        self._growing: set[SequenceState] = set()
        """Tickets that may come to need more pages: for each of them one is left free when others are seated."""
        self._moves: list[PageCopy] = []
        self._departures = 0

    @property
    def changes(self) -> int:
        """Another number whenever somebody who found no room may find some."""
        return self.pages.releases + self._departures

    def seat(self, ticket: SequenceState, sibling: SequenceState | None) -> int | None:
        """Give a ticket a row, and pages for its prefix and a little more; how many tokens are in them already.

        `sibling` computes the same prefix right now. None: there is no room, and the ticket has nothing.
        """
        if not self.free_rows:
            return None
        need = self._need(ticket, sibling)
        if self._cache.aligned and need.new:
            self._free_aligned()
            need = self._need(ticket, sibling)
        while need.new + len(self._growing) > len(self.pages.free):
            if not self.evict():
                return None
            need = self._need(ticket, sibling)
        ticket.pages = self._assemble_pages(ticket, need, sibling)
        ticket.row = ticket.pages[0] if self._cache.aligned else self.free_rows.take()
        if self._cache.aligned:
            self.free_rows.remove(ticket.row)
        self._cache.assign(ticket.row, 0, ticket.pages)
        self._watch(ticket)
        return 0 if need.found is None else need.found.tokens

    def _need(self, ticket: SequenceState, sibling: SequenceState | None) -> _Allocation:
        found, page = self._find(ticket), self._cache.page
        total = self._cache.count_pages(min(len(ticket.prefix) + 1 + LOOKAHEAD_STEPS, ticket.places))
        kept = 0
        if found is not None and found.held is not None:
            whole, rest = divmod(found.tokens, page)
            kept = whole + (rest > 0 and found.own and not self._must_copy(found, whole))
        elif found is None and sibling is not None:
            kept = len(ticket.prefix) // page
        return _Allocation(found, kept, total - kept)

    def _find(self, ticket: SequenceState) -> PrefixHit | None:
        if ticket.swapped is not None:
            return PrefixHit(len(ticket.swapped.ids), swapped=ticket.swapped)
        return self.prefix_cache.find(ticket.request.session, ticket.prefix)

    def _must_copy(self, found: PrefixHit, at: int) -> bool:
        """Whether a session goes back to the middle of a page that others read further on."""
        assert found.held is not None
        return found.tokens < len(found.held.ids) and self.pages.users(found.held.pages[at]) > 1

    def _free_aligned(self) -> None:
        """Have the lowest row's page free, unless another is free that is close enough to the rows that run."""
        row, page = self.free_rows.lowest(), self.pages.free.lowest()
        near = (self.num_rows - len(self.free_rows) + 1) / COMPACT_BELOW
        if row is not None and (page is None or (row < page and page >= near)):
            self.copy()
            self.prefix_cache.evict_page(row)

    def _assemble_pages(self, ticket: SequenceState, need: _Allocation, sibling: SequenceState | None) -> list[int]:
        """The ticket's pages, with all that was found in them."""
        found, new = need.found, self.pages.take(need.new)
        if found is None:
            shared = [] if sibling is None else sibling.pages[: need.kept]
            self.pages.share(shared)
            return shared + new
        if found.held is None:
            assert found.swapped is not None
            self._cache.restore(new[: self._cache.count_pages(found.tokens)], found.swapped.kv)
            self._let_go(ticket)
            if found.own:
                self._swap_space.forget(ticket.request.session)  # its pages are what stays, from now on
            return new
        held, rest = found.held, found.tokens % self._cache.page
        if rest and need.kept == found.tokens // self._cache.page:
            self._moves.append(PageCopy(held.pages[need.kept], new[0], rest))
        if not found.own:
            self.pages.share(held.pages[: need.kept])
            return held.pages[: need.kept] + new
        pages = self.prefix_cache.wake(ticket.request.session)
        if need.kept < len(pages):
            self.copy()
            self.pages.release(pages[need.kept :])
        return pages[: need.kept] + new

    def _watch(self, ticket: SequenceState) -> None:
        if len(ticket.pages) * self._cache.page < ticket.places:
            self._growing.add(ticket)
        else:
            self._growing.discard(ticket)

    def lacks(self, ticket: SequenceState, places: int) -> int:
        """How many pages a ticket lacks to have so many places, or as many as it may ever need."""
        return max(0, self._cache.count_pages(min(places, ticket.places)) - len(ticket.pages))

    def grow(self, ticket: SequenceState, count: int) -> None:
        """Give a ticket more pages; there are so many."""
        new = self.pages.take(count)
        self._cache.assign(ticket.row, len(ticket.pages), new)
        ticket.pages += new
        self._watch(ticket)

    def places_of(self, ticket: SequenceState) -> int | None:
        """How many places a ticket has; None when it needs no more."""
        return len(ticket.pages) * self._cache.page if ticket in self._growing else None

    def evict(self) -> bool:
        """Have something give way that is kept for later; False if nothing would free a page."""
        self.copy()
        return self.prefix_cache.evict()

    def copy(self) -> None:
        """Make the copies that wait. Before pages change hands, and before anyone reads what was found."""
        if self._moves:
            self._cache.copy(self._moves)
            self._moves.clear()

    def share(self, first: SequenceState, others: Sequence[SequenceState], tokens: int) -> None:
        """What `first` has computed is for siblings too: they have its full pages, and now get the last one."""
        at, rest = divmod(tokens, self._cache.page)
        if rest:
            self._moves += [PageCopy(first.pages[at], other.pages[at], rest) for other in others]

    def move(self, ticket: SequenceState, row: int, tokens: int) -> None:
        """Give a ticket another row. Only where rows and pages are aligned do its tokens have to be copied."""
        self.free_rows.remove(row)
        self.free_rows.add(ticket.row)
        ticket.row = row
        if self._cache.aligned:
            self.prefix_cache.evict_page(row)
            self.pages.claim(row)
            self._cache.copy([PageCopy(ticket.pages[0], row, tokens)])
            self.pages.release(ticket.pages)
            ticket.pages = [row]
        self._cache.assign(row, 0, ticket.pages)

    def stay(self, ticket: SequenceState, ids: tuple[int, ...]) -> None:
        """A ticket leaves; these tokens of it stay in their pages for the session's next turn."""
        self.prefix_cache.stay(ticket.request.session, ids, ticket.pages)
        self._free_row(ticket)

    def leave(self, ticket: SequenceState) -> None:
        """A ticket leaves, and nobody wants what its pages hold."""
        self.pages.release(ticket.pages)
        self._free_row(ticket)

    def swap_out(self, ticket: SequenceState, tokens: int) -> None:
        """A ticket leaves and will be back: park its first tokens, if there is room, to go on from there."""
        self.copy()
        pages = ticket.pages[: self._cache.count_pages(tokens)]
        if tokens and self._swap_space.hold(self._cache.weigh(pages, tokens)):
            ticket.swapped = SwappedTokens(ticket.prefix[:tokens], self._cache.save(pages, tokens))
        self.leave(ticket)

    def _free_row(self, ticket: SequenceState) -> None:
        self.free_rows.add(ticket.row)
        self._growing.discard(ticket)
        self._departures += 1
        ticket.row, ticket.pages = -1, []

    def drop_swapped(self, ticket: SequenceState, *, for_session: bool) -> None:
        """A ticket will not go on from what it parked; its session may."""
        if ticket.swapped is not None:
            swapped = ticket.swapped
            self._let_go(ticket)
            if for_session:
                self.prefix_cache.leave(ticket.request.session, swapped)

    def _let_go(self, ticket: SequenceState) -> None:
        if ticket.swapped is not None:
            self._swap_space.let_go(ticket.swapped.size)
            ticket.swapped = None
