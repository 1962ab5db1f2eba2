"""Processes of a box: a command or a call that has no reply yet, and a process that stays between calls.

Owns what they have written, and the messages of their requests as bytes. Imports the standard library alone.

Messages are lists of byte strings: the length of the list's bytes, then for each string its length and itself.
    exec   id timeout_ms most cwd stdin argc argv… NAME=value…     one command
    spawn  id cwd argc argv… NAME=value…                          a process that stays, asked by `call`
    call   id process timeout_ms most data                        data to its input; its line on descriptor 3 is the end
    read   id timeout_ms most path                                a file
    write  id timeout_ms path mode data                           a file, with the folders it needs
    kill   id                                                     a command, or a process that stays
    done   id code timed_out dropped stdout stderr line           what is sent back
"""

import os
import select

from treadle.sandbox.init.kernel import PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:  # at the cost of no import
    from treadle.sandbox.init.server import Init

CLOSED = -1


def pack(fields: "list[bytes]") -> bytes:
    """A message as bytes."""
    body = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes) -> "list[bytes]":
    """The fields of a message; ValueError where they do not fit."""
    fields: list[bytes] = []
    at = 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        at += 4 + size
        if at > len(body):
            raise ValueError("a field is longer than its message")
        fields.append(body[at - size : at])
    return fields


class Running:
    """A command or a call that has no reply yet."""

    def __init__(self, number: bytes, pid: int, most: int, deadline: float) -> None:
        self.number, self.pid, self.most, self.deadline = number, pid, most, deadline
        self.out, self.err, self.line = bytearray(), bytearray(), bytearray()
        self.dropped = 0
        self.timed_out = False
        self.ended: int | None = None
        self.process: Staying | None = None
        """The process that stays, for a call."""
        self.pipes: list[int] = []

    def keep(self, buffer: bytearray, data: bytes) -> None:
        room = max(0, self.most - len(buffer))
        buffer += data[:room]
        self.dropped += max(0, len(data) - room)


class Staying:
    """A process that stays: an interpreter or a shell, which ends each answer with a line on descriptor 3."""

    def __init__(self, init: "Init", number: bytes, pid: int, given: int, out: int, err: int, status: int) -> None:
        self.init, self.number, self.pid, self.given, self.status = init, number, pid, given, status
        self.call: Running | None = None
        init.watch_end(pid)
        self.early = Running(number, pid, 0, 0.0)
        self.pipes = {out: "out", err: "err"}
        init.watch(out, select.POLLIN, lambda: self.read(out))
        init.watch(err, select.POLLIN, lambda: self.read(err))
        init.watch(status, select.POLLIN, self.finish)

    def read(self, descriptor: int) -> int:
        try:
            data = os.read(descriptor, PIECE)
        except BlockingIOError:
            return 0
        if not data:
            self.init.forget(descriptor)
            del self.pipes[descriptor]
            return 0
        item = self.call or self.early
        item.keep(item.out if self.pipes[descriptor] == "out" else item.err, data)
        return len(data)

    def ask(self, item: Running, data: bytes) -> None:
        self.call = item
        self.init.feed(self.given, data, close=False)

    def finish(self) -> None:
        try:
            line = os.read(self.status, PIECE)
        except BlockingIOError:
            return
        if not line:
            self.init.forget(self.status)
            self.status = CLOSED
            return
        item = self.call
        if item is None:
            return
        item.keep(item.line, line)
        if b"\n" not in line:
            return
        self.drain()
        self.call = None
        self.init.reply(item, 0)

    def drain(self) -> None:
        for descriptor in list(self.pipes):
            while descriptor in self.pipes and self.read(descriptor):
                pass

    def end(self, code: int) -> None:
        """The process is gone: the call that waits has its status."""
        self.init.staying.pop(self.number, None)
        self.drain()
        item, self.call = self.call, None
        for descriptor in self.pipes:
            self.init.forget(descriptor)
        if self.status != CLOSED:
            self.init.forget(self.status)
        if self.given in self.init.writers:
            self.init.forget(self.given)
        else:
            os.close(self.given)
        if item is not None:
            self.init.reply(item, code)
