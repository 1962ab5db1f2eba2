"""Unix socket server for processes of this machine and this user.

Owns the socket's name, the check of the peer's user, and the framing of messages. The name is abstract, no file, so
nothing stays behind a killed process; but every process on the machine can read such names, so either side checks the
credentials of the other.
"""

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

ID_BYTES = 16
OWN_ID = os.urandom(ID_BYTES)
"""This process, to those it visits."""

_SIZE = struct.Struct("<I")
HEAD_BYTES = _SIZE.size
"""A frame begins with its length."""
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group at the other end, as Linux tells them."""
_NO_DESCRIPTOR_S = 0.05
"""How long to wait where the process has no descriptor left for a connection."""


class UnixServer:
    """Calls `serve` with each connection, in a thread of its own; an OSError ends that connection."""

    def __init__(self, serve: Callable[[socket.socket], None], *, timeout_s: float) -> None:
        self.address = f"\0treadle-{secrets.token_hex(8)}"
        self._serve = serve
        self._timeout_s = timeout_s
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept, name="unix server", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0 if self._closed else _NO_DESCRIPTOR_S)
            else:
                threading.Thread(
                    target=self._handle, args=(connection,), name="unix server connection", daemon=True
                ).start()

    def _handle(self, connection: socket.socket) -> None:
        connection.settimeout(self._timeout_s)
        with connection, suppress(OSError):
            _require_same_user(connection)
            self._serve(connection)

    def close(self) -> None:
        """Accept no more connections. Open ones are served to the end."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()


@contextmanager
def connect_unix(address: str, *, timeout_s: float) -> Iterator[socket.socket]:
    """A connection to the server with this address; OSError where there is none, or another user's."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        _require_same_user(connection)
        yield connection


def frame(message: bytes) -> bytes:
    """A message that others may follow at once."""
    return _SIZE.pack(len(message)) + message


def read_frame(connection: socket.socket, head: bytes = b"") -> bytes:
    """A message, of which `head` was read already."""
    head += read_exactly(connection, HEAD_BYTES - len(head))
    return read_exactly(connection, _SIZE.unpack(head)[0])


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Wait for all of it: what is long comes in pieces."""
    found = bytearray()
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionError("the other side has gone")
        found += more
    return bytes(found)


def _require_same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise PermissionError(f"process {process} is of another user: {user}")
