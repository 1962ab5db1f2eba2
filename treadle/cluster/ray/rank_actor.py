"""One rank of the policy in an actor. torch comes with what it is told to start, after the process was set up.

Waits: calls run one at a time in the main thread; a second thread waits for the driver to go. A rank in the middle of
a collective that the others have left can be ended in no other way, so it ends its process.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import ray

from treadle.cluster.ray.actor import ActorEnvironment, Address, Listener

LINGER_S = 5.0
"""How long a call may go on after its caller has given up."""


class RankActor:
    """One rank of the policy, in an actor of Ray."""

    def __init__(self, environment: ActorEnvironment) -> None:
        environment.settle()
        self._listener = Listener(ray.util.get_node_ip_address())
        self._rank: Any = None
        self._trouble: Exception | None = None
        self._name = ""

    def address(self) -> Address:
        return self._listener.address

    def load(self, start: Callable[[], Any], name: str, timeout_s: float) -> None:
        """Meet the driver, then the other ranks, and load the networks with them. The first answer tells of trouble."""
        self._name = name
        driver = asyncio.run(self._listener.accept(timeout_s))
        Thread(target=_end_with, args=(driver,), name="driver", daemon=True).start()
        try:
            self._rank = start()
        except Exception as error:  # noqa: BLE001  whatever it is, the driver must hear it
            self._trouble = error

    def run(self, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        """The answer to one call."""
        from treadle.policy.local_ranks import RankAnswer
        from treadle.policy.rank_group import portable_error

        function, args = call
        try:
            if self._trouble is not None:
                raise self._trouble
            return RankAnswer(self._rank.run(function, *args))
        except Exception as error:  # noqa: BLE001  whatever it is, the driver must hear it
            return RankAnswer(error=portable_error(error, self._name))


def _end_with(driver: socket.socket) -> None:
    """End this process soon after the driver's end closes."""
    driver.setblocking(True)
    try:
        while driver.recv(1):
            continue
    except OSError:
        pass  # gone, one way or the other
    time.sleep(LINGER_S)
    os._exit(1)
