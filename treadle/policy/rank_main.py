"""The rank's end: `python -m treadle.policy.rank_main FD`. Started by `LocalRanks`, never by hand.

Waits: the main thread waits for calls and runs them; a second thread reads them, so that the end of the driving process
is seen in the middle of a call too.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from treadle.policy.local_ranks import FAREWELL, Answer, Setup
from treadle.policy.rank import FSDPRank
from treadle.policy.rank_group import portable_error

LINGER_S = 5.0
"""How long a call that nobody waits for may go on."""


class Inbox:
    """Messages of the driving process, until it is gone."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: SimpleQueue[bytes] = SimpleQueue()  # one call is open at a time
        self._finished = Event()
        Thread(target=self._read, daemon=True).start()

    def next(self) -> bytes:
        """The next message; the farewell again and again once there are no more."""
        return self._messages.get()

    def finish(self) -> None:
        self._finished.set()

    def _read(self) -> None:
        try:
            while message := self._pipe.recv_bytes():
                self._messages.put(message)
        except (EOFError, OSError):
            pass  # the driving process is gone
        self._messages.put(FAREWELL)
        if not self._finished.wait(LINGER_S):
            # The main thread is in a collective that other ranks have left: nothing else can end it.
            os._exit(1)


def serve(pipe: Connection) -> None:
    """Take a seat, then run calls until the farewell."""
    setup: Setup = pickle.loads(pipe.recv_bytes())
    sys.path[:] = setup.path
    inbox = Inbox(pipe)
    name = f"policy rank {setup.seat.rank} (pid {os.getpid()})"
    rank: FSDPRank | None = None
    trouble: Exception | None = None
    try:
        rank = FSDPRank.create(setup.seat, setup.spec)
    except Exception as error:  # noqa: BLE001  (whatever it is, the driving process must hear it)
        trouble = error
    while message := inbox.next():
        pipe.send_bytes(_failed(trouble, name) if rank is None and trouble else _run(rank, message, name))
    if rank is not None:
        rank.close()
    inbox.finish()


def _run(rank: FSDPRank | None, message: bytes, name: str) -> bytes:
    """The answer to one call."""
    assert rank is not None, "a rank that could not start answers with its trouble"
    try:
        function: Callable[..., Any]
        function, args = pickle.loads(message)
        return pickle.dumps(Answer(rank.run(function, *args)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001  (whatever it is, the driving process must hear it)
        return _failed(error, name)


def _failed(error: Exception, name: str) -> bytes:
    """An error that the other end can surely read."""
    carried = portable_error(error, name)
    try:
        message = pickle.dumps(Answer(error=carried))
        pickle.loads(message)
    except (pickle.PickleError, TypeError, AttributeError):
        message = pickle.dumps(Answer(error=portable_error(RuntimeError(f"{type(error).__name__}: {error}"), name)))
    return message


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driving process, which ends this one in order
    serve(Connection(int(sys.argv[1])))
