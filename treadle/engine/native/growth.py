"""When rows need their next page, known before they do.

Owns a calendar of steps. A row grows by one place a step at most, so the step that may need a page follows from when
the row started, however far the GPU is ahead of what the host has heard: nobody looks at all rows in every step. Knows
nothing of pages. Invariant: a ticket is in the calendar once at most.
"""

from treadle.engine.native.ticket import Ticket

STRIDE = 8
"""Steps that are provided for at once, so that not every step changes tables. A page has more places than this."""


class Growth:
    """Tickets by the steps that need a page for them."""

    def __init__(self) -> None:
        self._due: dict[int, list[Ticket]] = {}
        self._when: dict[Ticket, int] = {}
        """What is in `_due` and not here has been dropped, or planned anew."""
        self._reached = -1

    def plan(self, ticket: Ticket, step: int) -> None:
        """A ticket needs a page before this step, which lies behind those that are provided for."""
        when = step // STRIDE
        assert when > self._reached, "a row has places for the next steps when it starts"
        self._when[ticket] = when
        self._due.setdefault(when, []).append(ticket)

    def drop(self, ticket: Ticket) -> None:
        """A ticket needs no more pages."""
        self._when.pop(ticket, None)

    def next(self, step: int) -> list[Ticket]:
        """The tickets that need a page before this step or one of those that follow; each is told once."""
        if step // STRIDE == self._reached:
            return []
        self._reached = step // STRIDE
        due = self._due.pop(self._reached, [])
        return [ticket for ticket in due if self._when.get(ticket) == self._reached and self._when.pop(ticket) >= 0]
