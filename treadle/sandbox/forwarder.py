"""Forwarder in a box: a port of 127.0.0.1 there, whose connections go to a local socket that was bound into the box.

Runs inside the box by `python3 -c`, with a port and the socket's path as arguments; needs the standard library alone.
One thread, since threads count as processes of the box. Answers each line on standard input with one on descriptor 3:
that it still runs, and listens.
Invariant: it holds at most `PIECE` bytes in each direction of a connection; it ends with its standard input.
"""

import os
import select
import socket
import sys
from contextlib import suppress

PIECE = 65536
ANSWER = 3


class End:
    """One side of a connection: what is to be written there, and whether it has said all it will."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.fd, self.peer = sock, sock.fileno(), self
        self.waiting, self.said_all, self.shut, self.watched = b"", False, False, False
        sock.setblocking(False)


class Forwarder:
    """All connections of one port."""

    def __init__(self, port: int, path: str) -> None:
        self.server, self.path = socket.create_server(("127.0.0.1", port), backlog=128), path
        self.ends: dict[int, End] = {}
        self.poll = select.poll()

    def serve(self) -> None:
        self.poll.register(0, select.POLLIN)
        self.poll.register(self.server, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll():
                if fd == 0:
                    if not os.read(0, PIECE):
                        return
                    os.write(ANSWER, b"0\n")
                elif fd == self.server.fileno():
                    self.accept()
                elif fd in self.ends:
                    self.move(self.ends[fd])

    def accept(self) -> None:
        inner = None
        try:
            inner = self.server.accept()[0]
            outer = socket.socket(socket.AF_UNIX)
            outer.connect(self.path)
        except OSError:  # no descriptors left, or nothing behind the socket: the program sees its connection end
            if inner is not None:
                inner.close()
            return
        one, other = End(inner), End(outer)
        one.peer, other.peer = other, one
        for end in (one, other):
            self.ends[end.fd] = end
            self.watch(end)

    def move(self, end: End) -> None:
        """Write what waits for this side, read what it has for the other."""
        try:
            if end.waiting:
                end.waiting = end.waiting[end.sock.send(end.waiting) :]
            if not end.said_all and not end.peer.waiting:
                end.peer.waiting = end.sock.recv(PIECE)
                end.said_all = not end.peer.waiting
        except BlockingIOError:
            pass
        except OSError:
            self.close(end)
            return
        for side in (end, end.peer):
            if side.peer.said_all and not side.waiting and not side.shut:
                side.shut = True
                with suppress(OSError):
                    side.sock.shutdown(socket.SHUT_WR)
        if end.shut and end.peer.shut:
            self.close(end)
            return
        self.watch(end)
        self.watch(end.peer)

    def watch(self, end: End) -> None:
        """Wait for what this side can do now; a closed side that can do nothing would be reported without end."""
        reads = select.POLLIN if not end.said_all and not end.peer.waiting else 0
        wanted = reads | (select.POLLOUT if end.waiting else 0)
        if wanted:
            self.poll.register(end.fd, wanted)
        elif end.watched:
            self.poll.unregister(end.fd)
        end.watched = bool(wanted)

    def close(self, end: End) -> None:
        for side in (end, end.peer):
            if side.watched:
                self.poll.unregister(side.fd)
            del self.ends[side.fd]
            side.sock.close()


if __name__ == "__main__":
    Forwarder(int(sys.argv[1]), sys.argv[2]).serve()
