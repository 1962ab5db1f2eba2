"""The store where processes find each other listens where it was told, and knows its members by a key."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from treadle.policy.rank import Store
from treadle.policy.rendezvous import RendezvousServer, join_store
from treadle.weights.collective import CollectiveTransport
from treadle.weights.parcel import Cast

SHORT = timedelta(seconds=0.3)


def listening(port: int) -> set[str]:
    """The local addresses that something listens at, on this port, as the kernel spells them."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].rpartition(":")[0] for row in lines if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}


LOOPBACK = {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}


def test_ranks_meet_on_the_loopback_alone():
    store = Store()
    assert listening(store.port) == LOOPBACK
    assert store.key and store.key != Store().key


def test_weights_are_offered_on_the_address_that_was_named():
    transport = CollectiveTransport(host="127.0.0.1", receivers=1)
    try:
        parcel = transport.offer(1, Cast({"w": torch.zeros(2)}, None))
        assert listening(parcel.address[1]) == LOOPBACK
    finally:
        transport.close()


def test_members_find_each_other_and_others_do_not():
    server = RendezvousServer("127.0.0.1", "right")
    join_store("127.0.0.1", server.port, "right").set("seat", "1")
    assert server.store.get("seat") == b"1"
    stranger = join_store("127.0.0.1", server.port, "wrong", SHORT)
    stranger.set("seat", "2")
    assert server.store.get("seat") == b"1"
    with pytest.raises(RuntimeError):
        join_store("127.0.0.1", server.port, "other", SHORT).get("seat")
