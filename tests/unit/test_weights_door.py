"""A door of this machine: who gets in, and what is told to those who come too late."""

import os
import socket
import threading

import pytest
import torch

from treadle.errors import EngineFailure
from treadle.weights.door import Door, enter
from treadle.weights.local import LocalTransport
from treadle.weights.parcel import Cast


def echo(connection: socket.socket) -> None:
    connection.sendall(connection.recv(8))


def test_guests_are_served_each_for_itself_until_the_door_is_closed() -> None:
    door = Door(echo, timeout_s=5)
    with enter(door.address, timeout_s=5) as slow, enter(door.address, timeout_s=5) as quick:
        quick.sendall(b"two")
        assert quick.recv(8) == b"two"
        door.close()
        slow.sendall(b"one")
        assert slow.recv(8) == b"one", "those who are in stay"
    with pytest.raises(OSError), enter(door.address, timeout_s=5):
        pass


def test_another_user_neither_gets_in_nor_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    door, us = Door(echo, timeout_s=5), os.geteuid()
    here = threading.get_ident()
    monkeypatch.setattr(os, "geteuid", lambda: us + (threading.get_ident() != here))
    with enter(door.address, timeout_s=5) as connection:
        assert connection.recv(8) == b"", "the door thinks it another user's"
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    theirs = pytest.raises(PermissionError, match=f"process {os.getpid()} is of another user: {us}")
    with theirs, enter(door.address, timeout_s=5):
        pass
    door.close()


def test_whoever_opens_a_parcel_too_late_is_told() -> None:
    transport = LocalTransport(timeout_s=5)
    late = transport.offer(1, Cast({"a": torch.ones(3)}, None))
    transport.retire(1)
    now = transport.offer(2, Cast({"a": torch.zeros(3)}, None))
    with pytest.raises(EngineFailure, match="the sender of the weights has gone"):
        dict(late.read())
    assert dict(now.read())["a"].tolist() == [0, 0, 0]
    transport.close()
    with pytest.raises(EngineFailure, match="the sender of the weights has gone"):
        dict(now.read())
