"""Tensors of one GPU as another process on that GPU sees them: nothing is copied for it.

Owns who was given which handles. Making and opening them takes milliseconds, so both sides keep them: the sender as
long as its tensors stay where they are, the reader until it opens others, or ends. What a reader has open has a name.
"""

import os
import pickle
import socket
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.weights.door import NAME_BYTES, frame, read_exactly, read_frame
from treadle.weights.handles import at_exit, make_handle, open_handle

Place = tuple[int, torch.Size, torch.dtype]
"""Where a tensor lies, and as what."""

_NOTHING = bytes(NAME_BYTES)


class Shares:
    """The sender's side: what each reader was given."""

    def __init__(self) -> None:
        self._given: dict[bytes, tuple[Sequence[Place], bytes]] = {}
        """For each reader, the places, and their name."""
        self._lock = threading.Lock()

    def send(self, connection: socket.socket, reader: bytes, tensors: Sequence[Tensor]) -> None:
        """Let `reader`, at the other end of `connection`, open these tensors."""
        places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
        with self._lock:
            before, name = self._given.get(reader, ((), _NOTHING))
            if before != places:
                name = os.urandom(NAME_BYTES)
                self._given[reader] = (places, name)
        known = read_exactly(connection, NAME_BYTES) == name
        connection.sendall(name if known else name + frame(pickle.dumps([make_handle(tensor) for tensor in tensors])))


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
        _Opened.tensors = [open_handle(handle) for handle in pickle.loads(read_frame(connection))]
        _Opened.name = name
        at_exit(_let_go)
    return _Opened.tensors


def _let_go() -> None:
    _Opened.name, _Opened.tensors = _NOTHING, ()
