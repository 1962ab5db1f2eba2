"""Rows and pages for tickets: who gets which, with what is there already, and what becomes of them afterwards.

Owns every row and every page, and that copies between pages are made together and before one of them changes hands.
Refuses to know when anything happens: the scheduler decides who is seated, who grows and who has to leave.
Invariant: pages are held by tickets that are seated and by residents, and are free otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.engine.native.cache import Move, PageCache
from treadle.engine.native.growth import STRIDE
from treadle.engine.native.pages import Free, Pages
from treadle.engine.native.parking import Parked, Parking
from treadle.engine.native.residents import Found, Residents
from treadle.engine.native.ticket import Ticket

SPARSE = 0.75
"""Rows are moved together when fewer than this fraction of those computed would do."""


@dataclass(frozen=True, slots=True)
class _Need:
    """What a ticket starts from, how many pages of that it keeps or shares, and how many it needs besides."""

    found: Found | None
    kept: int
    new: int


class Seating:
    """See the module. `rows` bounds how many tickets are seated."""

    def __init__(self, cache: PageCache, parking: Parking, rows: int, *, caching: bool) -> None:
        self._cache = cache
        self._parking = parking
        self.num_rows = min(cache.rows, rows)
        self.free_rows = Free(self.num_rows)
        self.pages = Pages(self.num_rows if cache.aligned else cache.pages)
        self.residents = Residents(cache, self.pages, parking, enabled=caching)
        self._growing: set[Ticket] = set()
        """Tickets that may come to need more pages: for each of them one is left free when others are seated."""
        self._moves: list[Move] = []
        self._departures = 0

    @property
    def changes(self) -> int:
        """Another number whenever somebody who found no room may find some."""
        return self.pages.releases + self._departures

    def seat(self, ticket: Ticket, sibling: Ticket | None) -> int | None:
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
        ticket.pages = self._bring(ticket, need, sibling)
        ticket.row = ticket.pages[0] if self._cache.aligned else self.free_rows.take()
        if self._cache.aligned:
            self.free_rows.remove(ticket.row)
        self._cache.assign(ticket.row, 0, ticket.pages)
        self._watch(ticket)
        return 0 if need.found is None else need.found.tokens

    def _need(self, ticket: Ticket, sibling: Ticket | None) -> _Need:
        found, page = self._find(ticket), self._cache.page
        total = self._cache.count_pages(min(len(ticket.prefix) + 1 + STRIDE, ticket.places))
        kept = 0
        if found is not None and found.held is not None:
            whole, rest = divmod(found.tokens, page)
            kept = whole + (rest > 0 and found.own and not self._must_copy(found, whole))
        elif found is None and sibling is not None:
            kept = len(ticket.prefix) // page
        return _Need(found, kept, total - kept)

    def _find(self, ticket: Ticket) -> Found | None:
        if ticket.parked is not None:
            return Found(len(ticket.parked.ids), parked=ticket.parked)
        return self.residents.find(ticket.request.session, ticket.prefix)

    def _must_copy(self, found: Found, at: int) -> bool:
        """Whether a session goes back to the middle of a page that others read further on."""
        assert found.held is not None
        return found.tokens < len(found.held.ids) and self.pages.users(found.held.pages[at]) > 1

    def _free_aligned(self) -> None:
        """Have the lowest row's page free, unless another is free that is close enough to the rows that run."""
        row, page = self.free_rows.lowest(), self.pages.free.lowest()
        near = (self.num_rows - len(self.free_rows) + 1) / SPARSE
        if row is not None and (page is None or (row < page and page >= near)):
            self.copy()
            self.residents.vacate(row)

    def _bring(self, ticket: Ticket, need: _Need, sibling: Ticket | None) -> list[int]:
        """The ticket's pages, with all that was found in them."""
        found, new = need.found, self.pages.take(need.new)
        if found is None:
            shared = [] if sibling is None else sibling.pages[: need.kept]
            self.pages.share(shared)
            return shared + new
        if found.held is None:
            assert found.parked is not None
            self._cache.restore(new[: self._cache.count_pages(found.tokens)], found.parked.kv)
            self._let_go(ticket)
            if found.own:
                self._parking.forget(ticket.request.session)  # its pages are what stays, from now on
            return new
        held, rest = found.held, found.tokens % self._cache.page
        if rest and need.kept == found.tokens // self._cache.page:
            self._moves.append(Move(held.pages[need.kept], new[0], rest))
        if not found.own:
            self.pages.share(held.pages[: need.kept])
            return held.pages[: need.kept] + new
        pages = self.residents.wake(ticket.request.session)
        if need.kept < len(pages):
            self.copy()
            self.pages.release(pages[need.kept :])
        return pages[: need.kept] + new

    def _watch(self, ticket: Ticket) -> None:
        if len(ticket.pages) * self._cache.page < ticket.places:
            self._growing.add(ticket)
        else:
            self._growing.discard(ticket)

    def lacks(self, ticket: Ticket, places: int) -> int:
        """How many pages a ticket lacks to have so many places, or as many as it may ever need."""
        return max(0, self._cache.count_pages(min(places, ticket.places)) - len(ticket.pages))

    def grow(self, ticket: Ticket, count: int) -> None:
        """Give a ticket more pages; there are so many."""
        new = self.pages.take(count)
        self._cache.assign(ticket.row, len(ticket.pages), new)
        ticket.pages += new
        self._watch(ticket)

    def places_of(self, ticket: Ticket) -> int | None:
        """How many places a ticket has; None when it needs no more."""
        return len(ticket.pages) * self._cache.page if ticket in self._growing else None

    def evict(self) -> bool:
        """Have something give way that is kept for later; False if nothing would free a page."""
        self.copy()
        return self.residents.evict()

    def copy(self) -> None:
        """Make the copies that wait. Before pages change hands, and before anyone reads what was found."""
        if self._moves:
            self._cache.copy(self._moves)
            self._moves.clear()

    def share(self, first: Ticket, others: Sequence[Ticket], tokens: int) -> None:
        """What `first` has computed is for siblings too: they have its full pages, and now get the last one."""
        at, rest = divmod(tokens, self._cache.page)
        if rest:
            self._moves += [Move(first.pages[at], other.pages[at], rest) for other in others]

    def move(self, ticket: Ticket, row: int, tokens: int) -> None:
        """Give a ticket another row. Only where rows and pages are aligned do its tokens have to be copied."""
        self.free_rows.remove(row)
        self.free_rows.add(ticket.row)
        ticket.row = row
        if self._cache.aligned:
            self.residents.vacate(row)
            self.pages.claim(row)
            self._cache.copy([Move(ticket.pages[0], row, tokens)])
            self.pages.release(ticket.pages)
            ticket.pages = [row]
        self._cache.assign(row, 0, ticket.pages)

    def stay(self, ticket: Ticket, ids: tuple[int, ...]) -> None:
        """A ticket leaves; these tokens of it stay in their pages for the session's next turn."""
        self.residents.stay(ticket.request.session, ids, ticket.pages)
        self._depart(ticket)

    def leave(self, ticket: Ticket) -> None:
        """A ticket leaves, and nobody wants what its pages hold."""
        self.pages.release(ticket.pages)
        self._depart(ticket)

    def park(self, ticket: Ticket, tokens: int) -> None:
        """A ticket leaves and will be back: park its first tokens, if there is room, to go on from there."""
        self.copy()
        pages = ticket.pages[: self._cache.count_pages(tokens)]
        if tokens and self._parking.hold(self._cache.weigh(pages, tokens)):
            ticket.parked = Parked(ticket.prefix[:tokens], self._cache.save(pages, tokens))
        self.leave(ticket)

    def _depart(self, ticket: Ticket) -> None:
        self.free_rows.add(ticket.row)
        self._growing.discard(ticket)
        self._departures += 1
        ticket.row, ticket.pages = -1, []

    def drop_parked(self, ticket: Ticket, *, for_session: bool) -> None:
        """A ticket will not go on from what it parked; its session may."""
        if ticket.parked is not None:
            parked = ticket.parked
            self._let_go(ticket)
            if for_session:
                self.residents.leave(ticket.request.session, parked)

    def _let_go(self, ticket: Ticket) -> None:
        if ticket.parked is not None:
            self._parking.let_go(ticket.parked.size)
            ticket.parked = None
