"""A door of this machine: who gets in, how messages are read, and what is told to those who come too late."""

import os
import socket
import struct
import threading

import pytest
import torch

from treadle.errors import EngineFailure
from treadle.weights.shared_memory import SharedMemoryTransport
from treadle.weights.transfer import CastTensors
from treadle.weights.unix_server import UnixServer, _require_same_user, connect_unix, frame, read_frame


def echo(connection: socket.socket) -> None:
    connection.sendall(connection.recv(8))


def test_guests_are_served_each_for_itself_until_the_door_is_closed() -> None:
    door = UnixServer(echo, timeout_s=5)
    with connect_unix(door.address, timeout_s=5) as slow, connect_unix(door.address, timeout_s=5) as quick:
        quick.sendall(b"two")
        assert quick.recv(8) == b"two"
        door.close()
        slow.sendall(b"one")
        assert slow.recv(8) == b"one", "those who are in stay"
    with pytest.raises(OSError), connect_unix(door.address, timeout_s=5):
        pass


def test_another_user_neither_gets_in_nor_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    door, us = UnixServer(echo, timeout_s=5), os.geteuid()
    here = threading.get_ident()
    monkeypatch.setattr(os, "geteuid", lambda: us + (threading.get_ident() != here))
    with connect_unix(door.address, timeout_s=5) as connection:
        assert connection.recv(8) == b"", "the door thinks it another user's"
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    theirs = pytest.raises(PermissionError, match=f"process {os.getpid()} is of another user: {us}")
    with theirs, connect_unix(door.address, timeout_s=5):
        pass
    door.close()


def test_large_user_numbers_are_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer:
        def getsockopt(self, *_: int) -> bytes:
            return struct.pack("iII", 7, 3_000_000_000, 0)

    monkeypatch.setattr(os, "geteuid", lambda: 3_000_000_000)
    _require_same_user(Peer())  # type: ignore[arg-type]


def test_a_long_message_comes_in_pieces_and_is_whole() -> None:
    ours, theirs = socket.socketpair()
    message = os.urandom(3 << 20)
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(10)
        sending = threading.Thread(target=theirs.sendall, args=(frame(message) + frame(b"next"),))
        sending.start()
        assert read_frame(ours) == message and read_frame(ours) == b"next"
        sending.join()
        theirs.close()
        with pytest.raises(ConnectionError, match="the other side has gone"):
            read_frame(ours)


def test_a_closed_transport_can_be_closed_again_and_offers_again() -> None:
    transport = SharedMemoryTransport(timeout_s=5)
    for version in (1, 2):
        transfer = transport.publish(version, CastTensors({"a": torch.ones(3), "none": torch.ones(0)}, None))
        assert [len(tensor) for tensor in transfer.values()] == [3, 0]
        transport.close()
        transport.close()


def test_a_version_is_taken_back_only_when_its_readers_are_done() -> None:
    transport = SharedMemoryTransport(timeout_s=5)
    reading = transport.publish(1, CastTensors({"a": torch.ones(3)}, None)).batches()
    next(reading)
    retiring = threading.Thread(target=transport.retire, args=(1,))
    retiring.start()
    retiring.join(0.05)
    assert retiring.is_alive()
    assert list(reading) == []
    retiring.join(5)
    assert not retiring.is_alive()
    transport.close()


def test_a_parcel_of_nothing_is_read_too() -> None:
    transport = SharedMemoryTransport(timeout_s=5)
    transfer = transport.publish(1, CastTensors({"none": torch.ones(0)}, None))
    assert len(dict(transfer.items())["none"]) == 0
    transport.close()


def test_whoever_opens_a_parcel_too_late_is_told() -> None:
    transport = SharedMemoryTransport(timeout_s=5)
    late = transport.publish(1, CastTensors({"a": torch.ones(3)}, None))
    transport.retire(1)
    now = transport.publish(2, CastTensors({"a": torch.zeros(3)}, None))
    with pytest.raises(EngineFailure, match="the sender of the weights has gone, or taken them back"):
        dict(late.read())
    assert dict(now.read())["a"].tolist() == [0, 0, 0]
    transport.close()
    with pytest.raises(EngineFailure, match="the sender of the weights has gone, or taken them back"):
        dict(now.read())
