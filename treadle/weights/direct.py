"""Tensors of one GPU as another process on that GPU sees them: nothing is copied for it.

Owns the CUDA IPC handles. Making and opening them takes milliseconds, so both sides keep them: the sender as long as
its tensors stay where they are, the reader until it opens others.
"""

import os
import pickle
import socket
import threading
from collections.abc import Sequence

from torch import Tensor

from treadle.weights.ring import NAME_BYTES, frame, read_exactly, read_frame, rebuild, reduce

_WANTED, _KNOWN = b"\1", b"\0"


class Shares:
    """The sender's side: what each reader was given."""

    def __init__(self) -> None:
        self._given: dict[bytes, tuple[tuple[int, ...], bytes]] = {}
        """For each reader, where the tensors were, and what the handles were called."""
        self._lock = threading.Lock()

    def send(self, connection: socket.socket, reader: bytes, tensors: Sequence[Tensor]) -> None:
        """Let `reader`, at the other end of `connection`, open these tensors."""
        places = tuple(tensor.data_ptr() for tensor in tensors)
        with self._lock:
            before, name = self._given.get(reader, ((), b""))
            if before != places:
                name = os.urandom(NAME_BYTES)
                self._given[reader] = (places, name)
        connection.sendall(name)
        if read_exactly(connection, 1) == _WANTED:
            connection.sendall(frame(pickle.dumps([reduce(tensor) for tensor in tensors])))


class _Opened:
    """What this process opened last."""

    name: bytes = b""
    tensors: Sequence[Tensor] = ()


def open_shares(connection: socket.socket) -> Sequence[Tensor]:
    """The tensors that the other end of `connection` shares, in its order."""
    name = read_exactly(connection, NAME_BYTES)
    if name == _Opened.name:
        connection.sendall(_KNOWN)
        return _Opened.tensors
    _Opened.name, _Opened.tensors = b"", ()  # what they take on the GPU goes first
    connection.sendall(_WANTED)
    tensors = [rebuild(handle) for handle in pickle.loads(read_frame(connection))]
    _Opened.name, _Opened.tensors = name, tensors
    return tensors
