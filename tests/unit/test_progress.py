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

from treadle.errors import Boundary, EngineFailure, ToolFailure
from treadle.observe import LiveProgress, ReplicaStatus, RolloutCounters
from treadle.observe.progress import describe
from treadle.types import Outcome, Row, Score, StopReason, Timing, Trajectory

DONE = Outcome.ended(StopReason.STOP)


def make(
    uid: str = "task",
    outcome: Outcome = DONE,
    reward: float | None = None,
    num_tokens: int = 10,
    timing: Timing = Timing(),  # noqa: B008 - frozen
) -> Trajectory:
    row = Row((1,), (2,) * num_tokens, (1,) * num_tokens, (0.0,) * num_tokens, (0,) * num_tokens)
    return Trajectory(uid, 0, (row,), outcome, None if reward is None else Score(reward), timing=timing)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_trajectories_are_counted_by_how_they_ended() -> None:
    counters = RolloutCounters()
    outcomes = [
        DONE,
        Outcome.ended(StopReason.LENGTH),
        Outcome.ended(StopReason.LENGTH),
        Outcome.ended(StopReason.DEADLINE),
        Outcome.failed(EngineFailure("x")),
        Outcome.failed(ToolFailure("y")),
        Outcome.failed(ToolFailure("z")),
    ]
    for _ in range(10):
        counters.start()
    for outcome in outcomes:
        counters.finish(make(outcome=outcome))
    counters.drop()
    assert (counters.done, counters.running, counters.dropped, counters.tokens) == (7, 2, 1, 70)
    assert counters.truncated == {StopReason.LENGTH: 2, StopReason.DEADLINE: 1}
    assert counters.failed == {Boundary.ENGINE: 1, Boundary.TOOL: 2}
    assert counters.num_failed == 3


def test_a_retried_attempt_goes_on_running_and_its_tokens_count() -> None:
    counters = RolloutCounters()
    counters.start()
    counters.retry(make(outcome=Outcome.failed(EngineFailure("x"))))
    assert (counters.done, counters.running, counters.retried, counters.num_failed, counters.tokens) == (0, 1, 1, 0, 10)


def test_a_trajectory_of_an_earlier_start_is_done_but_was_not_running() -> None:
    counters = RolloutCounters()
    counters.add_finished(make(reward=1.0))
    assert (counters.done, counters.running, counters.tokens, counters.mean_reward) == (1, 0, 0, 1.0)


def test_the_reward_is_the_mean_over_what_was_scored() -> None:
    counters = RolloutCounters()
    assert counters.mean_reward is None
    for reward in (1.0, 0.0, None, 0.5):
        counters.finish(make(reward=reward))
    counters.finish(make(outcome=Outcome.failed(EngineFailure("x")), reward=-100.0))
    assert counters.mean_reward == 0.5


def test_tokens_per_second_slide_with_the_clock() -> None:
    clock = Clock()
    counters = RolloutCounters(clock=clock)
    assert counters.tokens_per_s == 0.0
    for _ in range(120):
        clock.now += 0.5
        counters.finish(make(num_tokens=50))
    assert counters.tokens_per_s == pytest.approx(100, rel=0.05)
    clock.now += 15
    assert counters.tokens_per_s == pytest.approx(50, rel=0.1)
    clock.now += 31
    assert counters.tokens_per_s == 0.0


def test_the_rate_of_a_long_run_takes_no_more_memory() -> None:
    clock = Clock()
    counters = RolloutCounters(clock=clock)
    for _ in range(1000):
        clock.now += 1.0
        counters.finish(make())
    assert len(counters._rate._slots) <= 30


def test_early_on_the_rate_is_over_the_time_there_was() -> None:
    clock = Clock()
    counters = RolloutCounters(clock=clock)
    clock.now += 4
    counters.finish(make(num_tokens=400))
    assert counters.tokens_per_s == pytest.approx(100)


def test_each_stage_knows_mean_max_and_the_slowest() -> None:
    counters = RolloutCounters()
    counters.finish(make("quick", timing=Timing(generate_s=1.0, tool_s=0.5)))
    counters.finish(make("slow", timing=Timing(generate_s=3.0, score_s=0.25)))
    assert (counters.generate.mean_s, counters.generate.max_s, counters.generate.slowest) == (2.0, 3.0, "slow/0")
    assert (counters.tool.mean_s, counters.tool.slowest) == (0.5, "quick/0")
    assert (counters.score.mean_s, counters.score.slowest) == (0.25, "slow/0")


def test_the_line_names_what_there_is() -> None:
    counters = RolloutCounters(clock=Clock())
    assert describe(counters, 8) == "0/8 done, 0 running, 0 tokens/s"
    counters.finish(make(reward=0.25))
    counters.finish(make(outcome=Outcome.failed(ToolFailure("x"))))
    counters.finish(make(outcome=Outcome.ended(StopReason.LENGTH)))
    counters.drop()
    assert describe(counters).startswith("3 done, -4 running, 1 failed (tool 1), 1 truncated, 1 dropped, ")
    assert describe(counters).endswith(" tokens/s, reward 0.25")


REPLICAS = (ReplicaStatus("replica-0", "ready", 3), ReplicaStatus("replica-1", "dead"))


def finished(counters: RolloutCounters, count: int = 1) -> None:
    for _ in range(count):
        counters.start()
        counters.finish(Trajectory("task", 0, (), Outcome.ended(StopReason.STOP), Score(0.5)))


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
    counters, out = RolloutCounters(), io.StringIO()
    with LiveProgress(counters, total=4, replicas=lambda: REPLICAS, stream=out, plain_interval_s=0.01):
        assert eventually(lambda: "0/4 done" in out.getvalue())
        finished(counters, 4)
    assert out.getvalue().splitlines()[-1].startswith("4/4 done, 0 running, ")
    assert "reward 0.5, replica-1 dead" in out.getvalue().splitlines()[-1]
    assert "\x1b" not in out.getvalue()


def test_a_short_run_still_says_how_it_ended() -> None:
    counters, out = RolloutCounters(), io.StringIO()
    with LiveProgress(counters, stream=out):
        finished(counters)
    assert out.getvalue().splitlines() == ["1 done, 0 running, 0 tokens/s, reward 0.5"]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = RolloutCounters()
    with terminal(monkeypatch, "dumb") as screen, LiveProgress(counters, stream=screen.stream, plain_interval_s=0.01):
        assert screen.shows("0 done")
        finished(counters)
        assert screen.shows("1 done")
        assert "\x1b" not in screen.drawn


def test_a_terminal_gets_a_live_view_that_leaves_the_cursor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = RolloutCounters()
    with terminal(monkeypatch) as screen:
        with LiveProgress(counters, total=2, replicas=lambda: REPLICAS, stream=screen.stream, interval_s=0.01):
            assert screen.shows("0/2 done")
            assert screen.shows("replica-1")
            finished(counters, 2)
            assert screen.shows("2/2 done")
        assert screen.shows("\x1b[?25h")


def test_what_is_printed_meanwhile_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        monkeypatch.setattr(sys, "stdout", screen.stream)
        with LiveProgress(RolloutCounters(), interval_s=0.01):
            assert screen.shows("0 done")
            print("a word in between")
            assert screen.shows("a word in between")
        assert sys.stdout is screen.stream


@pytest.mark.parametrize("size", [(0, 0), (1, 1), (7, 2), (400, 1)])
def test_a_resized_terminal_does_not_end_the_view(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    counters = RolloutCounters()
    with (
        terminal(monkeypatch) as screen,
        LiveProgress(counters, total=2, replicas=lambda: REPLICAS, stream=screen.stream, interval_s=0.01) as progress,
    ):
        assert screen.shows("0/2 done")
        screen.resize(*size)
        seen = len(screen.drawn)
        assert eventually(lambda: len(screen.drawn) > seen + 100)
        assert progress._thread.is_alive()
        screen.resize(100, 24)
        finished(counters, 2)
        assert screen.shows("2/2 done")


def test_a_closed_terminal_silences_the_view_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        before = sys.stdout, sys.stderr
        with LiveProgress(RolloutCounters(), stream=screen.stream, interval_s=0.01) as progress:
            assert screen.shows("0 done")
            screen.stream.close()
            assert eventually(lambda: not progress._thread.is_alive())
        assert (sys.stdout, sys.stderr) == before


def test_a_broken_pipe_silences_the_view_and_nothing_else() -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    with LiveProgress(RolloutCounters(), stream=stream, plain_interval_s=0.01) as progress:
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
    with LiveProgress(RolloutCounters(), stream=stuck, plain_interval_s=0.01) as progress:
        time.sleep(0.05)
    assert time.monotonic() - began < 30
    os.read(reader, 65536)
    progress._thread.join(3.0)
    assert not progress._thread.is_alive()
    stuck.close()
    os.close(reader)
