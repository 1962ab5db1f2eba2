"""Tensors of one GPU as another process on that GPU sees them: nothing is copied for it.

Owns the CUDA IPC handles. Making and opening them takes milliseconds, so both sides keep them: the sender as long as
its tensors stay where they are, the reader until it opens others, or ends. What a reader has open has a name.
"""

import os
import pickle
import socket
import threading
from collections.abc import Sequence
from multiprocessing.util import Finalize

from torch import Tensor

from treadle.weights.ring import NAME_BYTES, frame, read_exactly, read_frame, rebuild, reduce

_NOTHING = bytes(NAME_BYTES)


class Shares:
    """The sender's side: what each reader was given."""

    def __init__(self) -> None:
        self._given: dict[bytes, tuple[tuple[int, ...], bytes]] = {}
        """For each reader, where the tensors were, and their name."""
        self._lock = threading.Lock()

    def send(self, connection: socket.socket, reader: bytes, tensors: Sequence[Tensor]) -> None:
        """Let `reader`, at the other end of `connection`, open these tensors."""
        places = tuple(tensor.data_ptr() for tensor in tensors)
        with self._lock:
            before, name = self._given.get(reader, ((), _NOTHING))
            if before != places:
                name = os.urandom(NAME_BYTES)
                self._given[reader] = (places, name)
        known = read_exactly(connection, NAME_BYTES) == name
        connection.sendall(name if known else name + frame(pickle.dumps([reduce(tensor) for tensor in tensors])))


class _Opened:
    """What this process opened last."""

    name: bytes = _NOTHING
    tensors: Sequence[Tensor] = ()


def open_shares(connection: socket.socket) -> Sequence[Tensor]:
    """The tensors that the other end of `connection` shares, in its order."""
    connection.sendall(_Opened.name)
    name = read_exactly(connection, NAME_BYTES)
    if name != _Opened.name:
        _let_go()  # what they take on the GPU goes first
        _Opened.tensors = [rebuild(handle) for handle in pickle.loads(read_frame(connection))]
        _Opened.name = name
        Finalize(None, _let_go, exitpriority=1)
    return _Opened.tensors


def _let_go() -> None:
    """The sender's memory is its own again; otherwise torch warns of it when the sender ends."""
    _Opened.name, _Opened.tensors = _NOTHING, ()
