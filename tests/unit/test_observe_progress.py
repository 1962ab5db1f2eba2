import fcntl
import io
import os
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from treadle.observe import LiveProgress, ReplicaState, Tally
from treadle.types import Outcome, Score, StopReason, Trajectory

REPLICAS = (ReplicaState("replica-0", "ready", 3), ReplicaState("replica-1", "dead"))


def finished(tally: Tally, count: int = 1) -> None:
    for _ in range(count):
        tally.start()
        tally.finish(Trajectory("task", 0, (), Outcome.ended(StopReason.STOP), Score(0.5)))


class Terminal:
    """A real pseudo-terminal, and what was drawn on it."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.resize(100, 24)
        self.stream: TextIO = os.fdopen(slave, "w")
        self.drawn = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def shows(self, text: str) -> bool:
        return eventually(lambda: text in self.drawn)

    def close(self) -> None:
        self.stream.close()
        self._thread.join(1.0)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                self.drawn += os.read(self._master, 65536).decode()
            except OSError:
                return


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, kind: str = "xterm-256color") -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", kind)
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    opened = Terminal()
    try:
        yield opened
    finally:
        opened.close()


def test_without_a_terminal_it_is_plain_lines_and_a_last_one() -> None:
    tally, out = Tally(), io.StringIO()
    with LiveProgress(tally, total=4, replicas=lambda: REPLICAS, stream=out, plain_interval_s=0.01):
        assert eventually(lambda: "0/4 done" in out.getvalue())
        finished(tally, 4)
    assert out.getvalue().splitlines()[-1].startswith("4/4 done, 0 running, ")
    assert "reward 0.5, replica-1 dead" in out.getvalue().splitlines()[-1]
    assert "\x1b" not in out.getvalue()


def test_a_short_run_still_says_how_it_ended() -> None:
    tally, out = Tally(), io.StringIO()
    with LiveProgress(tally, stream=out):
        finished(tally)
    assert out.getvalue().splitlines() == ["1 done, 0 running, 0 tokens/s, reward 0.5"]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally()
    with terminal(monkeypatch, "dumb") as screen, LiveProgress(tally, stream=screen.stream, plain_interval_s=0.01):
        assert screen.shows("0 done")
        finished(tally)
        assert screen.shows("1 done")
        assert "\x1b" not in screen.drawn


def test_a_terminal_gets_a_live_view_that_leaves_the_cursor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally()
    with terminal(monkeypatch) as screen:
        with LiveProgress(tally, total=2, replicas=lambda: REPLICAS, stream=screen.stream, interval_s=0.01):
            assert screen.shows("0/2 done")
            assert screen.shows("replica-1")
            finished(tally, 2)
            assert screen.shows("2/2 done")
        assert screen.shows("\x1b[?25h")


def test_what_is_printed_meanwhile_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        monkeypatch.setattr(sys, "stdout", screen.stream)
        with LiveProgress(Tally(), interval_s=0.01):
            assert screen.shows("0 done")
            print("a word in between")
            assert screen.shows("a word in between")
        assert sys.stdout is screen.stream


@pytest.mark.parametrize("size", [(0, 0), (1, 1), (7, 2), (400, 1)])
def test_a_resized_terminal_does_not_end_the_view(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    tally = Tally()
    with (
        terminal(monkeypatch) as screen,
        LiveProgress(tally, total=2, replicas=lambda: REPLICAS, stream=screen.stream, interval_s=0.01) as progress,
    ):
        assert screen.shows("0/2 done")
        screen.resize(*size)
        seen = len(screen.drawn)
        assert eventually(lambda: len(screen.drawn) > seen + 100)
        assert progress._thread.is_alive()
        screen.resize(100, 24)
        finished(tally, 2)
        assert screen.shows("2/2 done")


def test_a_closed_terminal_silences_the_view_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        before = sys.stdout, sys.stderr
        with LiveProgress(Tally(), stream=screen.stream, interval_s=0.01) as progress:
            assert screen.shows("0 done")
            screen.stream.close()
            assert eventually(lambda: not progress._thread.is_alive())
        assert (sys.stdout, sys.stderr) == before


def test_a_broken_pipe_silences_the_view_and_nothing_else() -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    with LiveProgress(Tally(), stream=stream, plain_interval_s=0.01) as progress:
        os.read(reader, 1)
        os.close(reader)
        assert eventually(lambda: not progress._thread.is_alive())
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_stream_that_nobody_reads_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.observe.progress._EXIT_TIMEOUT_S", 0.05)
    reader, writer = os.pipe()
    stuck = os.fdopen(writer, "w")
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    began = time.monotonic()
    with LiveProgress(Tally(), stream=stuck, plain_interval_s=0.01) as progress:
        time.sleep(0.05)
    assert time.monotonic() - began < 30
    os.read(reader, 65536)
    progress._thread.join(3.0)
    assert not progress._thread.is_alive()
    stuck.close()
    os.close(reader)
