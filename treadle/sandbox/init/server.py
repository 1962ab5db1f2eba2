"""Init of a box: the process that runs commands there, one message at a time over its standard input and output.

    read a message ─► fork ─► (confine) ─► exec, or read or write a file
    poll: messages, output of commands, their ends, deadlines ─► reply

Runs inside the box (bubblewrap, a container) as process 1, or beside it (Landlock) as the parent of all that is
confined. Files are read and written by a child that is confined like any command: a link that a command left
leads no further than the command could go.
Where the kernel does not count what a box has, this process does: ten times a second while a command runs, and once a
second while something is left in the background. Too many processes or too much memory end everything; too many files
do the same, and until some are removed no command can make one grow.
Invariant: one reply for each request; output is bounded; after a deadline nothing of the command is left, nor what it
left to process 1. No command can read, signal or trace this process. Nothing of the box outlives it, nor the other end.
"""

import os
import resource
import select
from time import monotonic

from treadle.sandbox.init.kernel import (
    LIBC,
    PIECE,
    become,
    children,
    find_excess,
    install_filter,
    kill,
    lower_limits,
    read_file,
    tree,
    write_file,
)
from treadle.sandbox.init.processes import CLOSED, Running, Staying, pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:  # at the cost of no import
    from collections.abc import Callable
    from typing import NoReturn

NOT_STARTED = 126
"""Exit status of a command that could not be started for want of processes or memory, as shells have it."""
NOT_FOUND = 127
MAX_MESSAGE = 1 << 30
ROUNDS = 200
WATCH_MS = 100
IDLE_WATCH_MS = 1000
PR_SET_DUMPABLE = 4
SIGPIPE = 13


class Init:
    """Commands of one box. `confine` is called in each child before it becomes a command."""

    def __init__(
        self,
        source: int,
        sink: int,
        limits: "list[tuple[int, int]]",
        confine: "Callable[[], None] | None" = None,
        own_namespace: bool = True,
        excess: "Callable[[], tuple[str | None, str | None]] | None" = None,
    ) -> None:
        self.source, self.sink, self.limits, self.confine = source, sink, limits, confine
        self.own_namespace = own_namespace
        self.excess = excess
        """What the box has too much of, where the kernel does not count: processes or memory, and files."""
        self.next_look = 0.0
        self.full = False
        """Whether there are too many files; no command makes one grow then."""
        self.notice = b""
        """What became of the box between two calls, for the next reply."""
        self.poll = select.poll()
        self.readers: dict[int, Callable[[], object]] = {}
        self.writers: dict[int, Callable[[], object]] = {}
        self.running: dict[bytes, Running] = {}
        self.staying: dict[bytes, Staying] = {}
        self.incoming = bytearray()

    def serve(self) -> None:
        """Serve until the other end has gone, which ends all that runs, as an error of this process does."""
        try:
            self.watch(self.source, select.POLLIN, self.receive)
            self.send([b"ready"])
            while self.source in self.readers:
                for descriptor, _ in self.poll.poll(self.wait_ms()):
                    handler = self.readers.get(descriptor) or self.writers.get(descriptor)
                    if handler is not None:
                        handler()
                self.reap()
                self.end_late()
                if monotonic() >= self.next_look:
                    self.look()
        except BrokenPipeError:
            return  # nobody reads replies any more
        finally:
            self.kill_all(set())

    def wait_ms(self) -> "int | None":
        """Until the next deadline; while something runs, half a second, so that orphans are reaped."""
        if not self.running:
            return IDLE_WATCH_MS if self.excess is not None and children(os.getpid()) else None
        nearest = min(item.deadline for item in self.running.values())
        return max(0, min(500 if self.excess is None else WATCH_MS, int((nearest - monotonic()) * 1000) + 1))

    def watch(self, descriptor: int, events: int, handler: "Callable[[], object]") -> None:
        (self.writers if events == select.POLLOUT else self.readers)[descriptor] = handler
        self.poll.register(descriptor, events)

    def forget(self, descriptor: int) -> None:
        self.readers.pop(descriptor, None)
        self.writers.pop(descriptor, None)
        self.poll.unregister(descriptor)
        os.close(descriptor)

    # --- messages

    def receive(self) -> None:
        try:
            data = os.read(self.source, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self.forget(self.source)
            return
        self.incoming += data
        while len(self.incoming) >= 4:
            size = int.from_bytes(self.incoming[:4], "big")
            if size > MAX_MESSAGE:
                raise ValueError("a message is too long")
            if len(self.incoming) < 4 + size:
                return
            fields = unpack(bytes(self.incoming[4 : 4 + size]))
            del self.incoming[: 4 + size]
            self.handle(fields[0].decode(), fields[1], fields[2:])

    def handle(self, verb: str, number: bytes, fields: "list[bytes]") -> None:
        if verb == "kill":
            self.do_kill(number)
        elif number not in self.running and number not in self.staying:
            getattr(self, "do_" + verb)(number, fields)

    def send(self, fields: "list[bytes]") -> None:
        view = memoryview(pack(fields))
        while view:
            view = view[os.write(self.sink, view) :]

    def reply(self, item: Running, code: int) -> None:
        """The one reply of a request."""
        self.running.pop(item.number, None)
        item.err += self.notice
        self.notice = b""
        flags = [b"%d" % code, b"%d" % item.timed_out, b"%d" % item.dropped]
        self.send([b"done", item.number, *flags, bytes(item.out), bytes(item.err), bytes(item.line)])

    # --- requests

    def do_exec(self, number: bytes, fields: "list[bytes]") -> None:
        timeout_ms, most, cwd, stdin, count, *words = fields
        argv, environment = words[: int(count)], words[int(count) :]
        self.start(number, int(timeout_ms), int(most), stdin, lambda: become(argv, cwd, environment))

    def do_read(self, number: bytes, fields: "list[bytes]") -> None:
        timeout_ms, most, path = fields
        self.start(number, int(timeout_ms), int(most) + 4096, b"", lambda: read_file(path, int(most)))

    def do_write(self, number: bytes, fields: "list[bytes]") -> None:
        timeout_ms, path, mode, data = fields
        self.start(number, int(timeout_ms), 4096, data, lambda: write_file(path, int(mode), len(data)))

    def do_spawn(self, number: bytes, fields: "list[bytes]") -> None:
        cwd, count, *words = fields
        argv, environment = words[: int(count)], words[int(count) :]
        started = self.fork(lambda: become(argv, cwd, environment), status=True)
        item = Running(number, 0, 4096, 0.0)
        if isinstance(started, str):
            item.err += started.encode()
            self.reply(item, NOT_STARTED)
            return
        self.staying[number] = Staying(self, number, *started)
        self.send([b"done", number, b"0", b"0", b"0", b"", b"", b""])

    def do_call(self, number: bytes, fields: "list[bytes]") -> None:
        process, timeout_ms, most, data = fields
        item = Running(number, 0, int(most), monotonic() + int(timeout_ms) / 1000)
        staying = self.staying.get(process)
        if staying is None or staying.call is not None:
            item.err += b"there is no such process" if staying is None else b"the process answers another call"
            self.reply(item, NOT_STARTED)
            return
        item.pid, item.process = staying.pid, staying
        self.running[number] = item
        staying.ask(item, data)

    def do_kill(self, number: bytes) -> None:
        if number in self.staying:
            self.kill_tree(self.staying[number].pid)
        elif number in self.running:
            self.running[number].deadline = 0.0

    # --- processes

    def start(self, number: bytes, timeout_ms: int, most: int, stdin: bytes, work: "Callable[[], int]") -> None:
        started = self.fork(work)
        if isinstance(started, str):
            item = Running(number, 0, 4096, 0.0)
            item.err += started.encode()
            self.reply(item, NOT_STARTED)
            return
        pid, given, out, err, _ = started
        item = self.running[number] = Running(number, pid, most, monotonic() + timeout_ms / 1000)
        self.watch_end(pid)
        self.read_into(out, item, item.out)
        self.read_into(err, item, item.err)
        self.feed(given, stdin, close=True)

    def fork(self, work: "Callable[[], int]", status: bool = False) -> "tuple[int, int, int, int, int] | str":
        """A child that does `work`: its number, and our ends of its input, outputs and descriptor 3; or why not."""
        if self.full:
            self.look()
        pipes: list[tuple[int, int]] = []
        try:
            pipes += [os.pipe() for _ in range(4 if status else 3)]
            pid = self.fork_with_room()
        except OSError as error:
            for pipe in pipes:
                os.close(pipe[0])
                os.close(pipe[1])
            return "the box cannot start a process: " + os.strerror(error.errno or 0)
        if pid == 0:
            self.be_child(work, [pipes[0][0], pipes[1][1], pipes[2][1], *([pipes[3][1]] if status else [])])
        ours = [pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][0] if status else CLOSED]
        for descriptor in (pipes[0][0], pipes[1][1], pipes[2][1], *([pipes[3][1]] if status else [])):
            os.close(descriptor)
        for descriptor in ours:
            if descriptor != CLOSED:
                os.set_blocking(descriptor, False)
        return pid, ours[0], ours[1], ours[2], ours[3]

    def fork_with_room(self) -> int:
        """A fork; where there is no room for one, what commands left in the background is ended first."""
        try:
            return os.fork()
        except OSError:
            kept = {item.pid for item in self.running.values()} | {one.pid for one in self.staying.values()}
            if not set(children(os.getpid())) - kept:
                raise
            self.kill_all(kept)
            self.notice += b"\nprocesses in the background were ended: there was no room for another"
            return os.fork()

    def be_child(self, work: "Callable[[], int]", descriptors: "list[int]") -> "NoReturn":
        """Take the descriptors, lose all others, lower the limits, confine, work; never return."""
        code = NOT_STARTED
        try:
            os.setsid()
            for at, descriptor in enumerate(descriptors):  # ours are above 4: `main` has taken the first ones
                os.dup2(descriptor, at)
            LIBC.signal(SIGPIPE, None)  # Python ignores it, and commands rely on it
            lower_limits([*self.limits, *([(resource.RLIMIT_FSIZE, 0)] if self.full else [])])
            if self.confine is not None:
                self.confine()
            os.closerange(len(descriptors), 1 << 20)
            code = work() or 0
        except OSError as error:
            path = error.filename.decode("utf-8", "replace") if isinstance(error.filename, bytes) else error.filename
            os.write(2, (os.strerror(error.errno or 0) + (f": {path}" if path else "")).encode())
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
        except BaseException as error:  # noqa: BLE001  it is said, and this process ends
            os.write(2, repr(error).encode())
        finally:
            os._exit(code)

    def read_into(self, descriptor: int, item: Running, buffer: bytearray) -> None:
        def read() -> None:
            try:
                data = os.read(descriptor, PIECE)
            except BlockingIOError:
                return
            if data:
                item.keep(buffer, data)
            else:
                self.forget(descriptor)

        self.watch(descriptor, select.POLLIN, read)
        item.pipes.append(descriptor)

    def feed(self, descriptor: int, data: bytes, close: bool) -> None:
        left = [memoryview(data)]

        def write() -> None:
            try:
                if left[0]:
                    left[0] = left[0][os.write(descriptor, left[0][:PIECE]) :]
            except BlockingIOError:
                return
            except OSError:
                left[0] = left[0][:0]
            if not left[0]:
                if close:
                    self.forget(descriptor)
                else:
                    self.writers.pop(descriptor, None)
                    self.poll.unregister(descriptor)

        self.watch(descriptor, select.POLLOUT, write)
        write()

    def watch_end(self, pid: int) -> None:
        """Wake when a child ends: its outputs may have closed before."""
        descriptor = os.pidfd_open(pid)
        self.watch(descriptor, select.POLLIN, lambda: self.forget(descriptor))

    def reap(self) -> None:
        """Collect what ended; a command is over when it has ended and both its outputs are closed or drained."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for item in self.running.values():
                if item.pid == pid and item.process is None:
                    item.ended = os.waitstatus_to_exitcode(status)
            for staying in list(self.staying.values()):
                if staying.pid == pid:
                    staying.end(os.waitstatus_to_exitcode(status))
        for item in list(self.running.values()):
            if item.ended is not None:
                self.drain(item)
                self.reply(item, item.ended)

    def drain(self, item: Running) -> None:
        """Read what is there of a command that has ended. What it left running keeps its pipes, and writes to none."""
        for descriptor in item.pipes:
            while descriptor in self.readers:
                before = len(item.out) + len(item.err) + item.dropped
                self.readers[descriptor]()
                if descriptor in self.readers and len(item.out) + len(item.err) + item.dropped == before:
                    self.forget(descriptor)

    def end_late(self) -> None:
        now = monotonic()
        late = [item for item in self.running.values() if item.deadline <= now]
        for item in late:
            item.timed_out = True
            self.kill_tree(item.pid)
        if late:
            kept = {item.pid for item in self.running.values()} | {one.pid for one in self.staying.values()}
            self.kill_all(kept - {item.pid for item in late})
        for item in late:
            if item.number in self.running:
                if item.process is None:
                    self.drain(item)
                    self.reply(item, -9)
                else:
                    item.process.end(-9)

    def look(self) -> None:
        """Count what the kernel does not, and act on too much of it."""
        if self.excess is None or not (self.running or self.full or children(os.getpid())):
            return
        self.next_look = monotonic() + WATCH_MS / 1000
        problem, full = self.excess()
        if full is not None and not self.full:
            self.full = True
            self.end_everything(full + "; none can grow until some are removed")
        elif full is None and self.full:
            self.full = False
            self.end_everything("there is room for files again")  # what runs was started without
        if problem is not None:
            self.end_everything(problem)

    def end_everything(self, why: str) -> None:
        """End all processes, and say so to those who wait, or in the next reply."""
        late = list(self.running.values())
        text = b"\nall processes of the box were ended: " + why.encode()
        for item in late:
            item.err += text
        if not late:
            self.notice += text
        self.kill_all(set())
        for staying in list(self.staying.values()):
            staying.end(-9)
        for item in late:
            if item.number in self.running:
                self.drain(item)
                self.reply(item, -9)

    def kill_tree(self, pid: int) -> None:
        for member in tree(pid):  # from the top: a shell that outlived its command would say so in the output
            kill(member)

    def kill_all(self, spared: "set[int]") -> None:
        """Kill every child of this process that is not spared, with all below it: what a command left, too."""
        for _ in range(ROUNDS):
            strays = [pid for pid in children(os.getpid()) if pid not in spared]
            if not strays:
                return
            for stray in strays:
                self.kill_tree(stray)
            for stray in strays:
                self.collect(stray)
        if self.own_namespace:
            os.kill(-1, 9)

    def collect(self, pid: int) -> None:
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:
            return
        for item in self.running.values():
            if item.pid == pid and item.process is None and item.ended is None:
                item.ended = os.waitstatus_to_exitcode(status)


def main(arguments: "list[str]", confine: "Callable[[], None] | None" = None, own_namespace: bool = True) -> None:
    """Serve on standard input and output, which no command inherits.

    Arguments: the box's directory; limits of the kernel as NUMBER=VALUE; what is to be counted here, as NAME=VALUE;
    a seccomp program for this process and all commands, as seccomp=HEX.
    """
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # else a command could open our descriptors, and answer for us
    home, *words = arguments
    given = dict(word.split("=") for word in words)
    if "seccomp" in given:
        install_filter(bytes.fromhex(given.pop("seccomp")))
    limits = [(int(name), int(value)) for name, value in given.items() if name.isdigit()]
    counted = {name: int(value) for name, value in given.items() if not name.isdigit()}
    excess = (lambda: find_excess(counted, home)) if counted else None
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.set_blocking(source, False)
    Init(source, sink, limits, confine, own_namespace, excess).serve()
