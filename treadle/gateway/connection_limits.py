"""Connection limits: how many connections a server holds open, which of them give way, and what one session may hold.

A connection that answers a request never gives way. The others do, when a new one comes and there is no room: first
those that were refused, then those that have shown no key, then those between two requests; the oldest first.
Knows no HTTP.
"""

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

MAX_FILES = 65_536
"""Open files that a process asks the system for; some programs look through all that they may have."""

MIN_CONNECTIONS = 64

MAX_SESSION_CONNECTIONS = 256
"""Requests that one session may have on the way at once, where the server has room for many sessions."""


class Idleness(IntEnum):
    """Why a connection gives way; the first of these first."""

    REFUSED = 0
    """It has its answer, and is kept open for a little while so that its client can read it."""
    ANONYMOUS = 1
    """It has shown no key."""
    WAITING = 2
    """It is between two requests."""


class Droppable(Protocol):
    """A connection, as this table knows it."""

    def drop(self) -> None: ...


C = TypeVar("C", bound=Droppable)


@dataclass(eq=False, slots=True)
class ConnectionShare:
    """What requests with one session's key hold of a server, from their first line to the end of their answer."""

    num_connections: int = 0
    num_bytes: int = 0
    """Of bodies, whole or not."""


class ConnectionTable(Generic[C]):
    """The open connections of a server."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._open: dict[C, None] = {}
        self._idle: dict[Idleness, dict[C, None]] = {kind: {} for kind in Idleness}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._open))

    @property
    def max_session_connections(self) -> int:
        """What one session may have of them: whatever it does, there is room for others."""
        return min(MAX_SESSION_CONNECTIONS, max(4, self.max_connections // 8))

    def add(self, connection: C) -> None:
        """A new connection; where there is no room, an idle one is dropped for it, or else itself."""
        oldest = next((one for kind in Idleness for one in self._idle[kind]), connection)
        self._open[connection] = None
        self.set_idle(connection, Idleness.ANONYMOUS)
        if len(self._open) > self.max_connections:
            self.remove(oldest)
            oldest.drop()

    def set_idle(self, connection: C, why: Idleness) -> None:
        """From now on it gives way to new ones."""
        self.set_busy(connection)
        if connection in self._open:
            self._idle[why][connection] = None

    def set_busy(self, connection: C) -> None:
        """It has a request with a key: it does not give way."""
        for kind in self._idle.values():
            kind.pop(connection, None)

    def remove(self, connection: C) -> None:
        self._open.pop(connection, None)
        self.set_busy(connection)


def raise_file_limit() -> int:
    """The open files that this process may have, after it has asked for as many as it is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):
            return soft
        return most
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def connections_within(files: int) -> int:
    """The connections that a server may hold among this many files: sessions have pipes and sockets of their own."""
    return max(MIN_CONNECTIONS, files // 4)
