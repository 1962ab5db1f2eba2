"""Rendezvous store: torch's TCPStore on one address, with a key, where the processes of a run find each other.

Owns the listening socket and the key. A plain TCPStore listens on every interface and takes entries from any client:
this one listens on the address it is given, and its members' entries lie under a key that only they are told.
"""

import socket
from datetime import timedelta
from typing import Any

from torch import distributed

_TCPStore: Any = distributed.TCPStore  # type: ignore[attr-defined]
_PrefixStore: Any = distributed.PrefixStore  # type: ignore[attr-defined]

TIMEOUT = timedelta(seconds=300)
"""torch's own."""


class RendezvousServer:
    """The store's server, at a free port of this process; lives as long as this object. `store` is its own client."""

    def __init__(self, host: str, key: str, timeout: timedelta = TIMEOUT) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self.port: int = listener.getsockname()[1]
        self._server: Any = _TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )
        self.store: Any = _PrefixStore(key, self._server)


def join_store(host: str, port: int, key: str, timeout: timedelta = TIMEOUT) -> Any:
    """A client of the store at that address; it needs the store's key."""
    return _PrefixStore(key, _TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))
