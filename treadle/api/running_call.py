"""Running calls: a prepared run in the thread that calls, or in one of its own, and how it is stopped.

A blocking call runs in the thread that makes it, as a command does, Ctrl-C included; where that thread has a running
event loop (a notebook cell), and for the coroutines, in a thread of its own. Stopping it, by Ctrl-C or by
cancelling the awaiting task, is the same everywhere: the step under way is finished and saved.
An interrupted command ends with status 130 and one line, and so does a script that does not catch the interrupt: left
to Python it ends with a traceback, or with status 1 where a library's clean-up hides the interrupt. In a REPL, in a
notebook and where the script catches it, KeyboardInterrupt is an exception like any other.
"""

import asyncio
import atexit
import os
import shutil
import sys
import threading
import traceback
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from treadle.api.prepared_run import PreparedRun
from treadle.api.results import Evaluation, Run
from treadle.config import SFTRunConfig, TrainConfig
from treadle.errors import ConfigError
from treadle.exit_status import STATUS_INTERRUPTED
from treadle.journal import fresh_start
from treadle.terminal import note, warn

if TYPE_CHECKING:
    from treadle.cluster.signals import StopSignals

T = TypeVar("T")

_NOTHING_TRAINED = "interrupted before the first step: nothing was trained"


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class RunningCall(Generic[T]):
    """A prepared run, in this thread or in one of its own."""

    def __init__(self, prepared: PreparedRun, fresh: bool) -> None:
        self.prepared = prepared
        self._fresh = fresh

    def _work(self) -> T:
        raise NotImplementedError

    def _stop(self) -> None:
        """Ask the work in the other thread to end in order."""
        raise NotImplementedError

    def run_blocking(self) -> T:
        if not _has_running_loop():
            return self._work_in_directory()
        future = self._start()
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                self._stop()

    async def run(self) -> T:
        future = self._start()
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._stop()
            while not waiting.done():
                try:
                    await asyncio.wait([waiting])
                except asyncio.CancelledError:
                    continue  # it saves, and cannot do so faster
            waiting.exception()
            raise

    def _start(self) -> "Future[T]":
        future: Future[T] = Future()
        context = copy_context()

        def work() -> None:
            try:
                future.set_result(context.run(self._work_in_directory))
            except BaseException as error:  # noqa: BLE001  whatever it is, the caller must hear it
                future.set_exception(error)

        threading.Thread(target=work, name=f"treadle-{self.prepared.call}", daemon=True).start()
        return future

    def _work_in_directory(self) -> T:
        """Do the work; a config that is refused leaves every directory as it was."""
        prepared = self.prepared
        try:
            with fresh_start(prepared.config, prepared.run_dir) if self._fresh else nullcontext():
                return self._write_and_work()
        except ConfigError as error:
            raise prepared.explain(error) from None

    def _write_and_work(self) -> T:
        prepared = self.prepared
        is_new, goes_on = not prepared.run_dir.exists(), prepared.has_run
        prepared.write()
        try:
            result = self._work()
        except ConfigError:
            if is_new and not prepared.has_run:
                shutil.rmtree(prepared.run_dir, ignore_errors=True)
            raise
        if goes_on or self._fresh:  # a fresh start may have been given the YAML of the earlier run
            prepared.write_yaml()
        return result

    @property
    def _command(self) -> list[str]:
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        return [f"treadle.{self.prepared.call}", *([script] if script else [])]


class TrainingCall(RunningCall[Run]):
    def __init__(self, prepared: PreparedRun, fresh: bool, allow_changes: bool) -> None:
        super().__init__(prepared, fresh)
        self._allow_changes = allow_changes
        self._lock = threading.Lock()
        self._signals: StopSignals | None = None
        self._stopping = False

    def _work(self) -> Run:
        from treadle.cli.results import next_commands
        from treadle.cli.train import describe_end, run_training

        config, run_dir = self.prepared.config, self.prepared.run_dir
        assert isinstance(config, TrainConfig), "a call of train has a trainer section"
        try:
            result = run_training(
                config, self._command, allow_changes=self._allow_changes, on_signals=self._take_signals
            )
        except KeyboardInterrupt:
            raise make_interrupt(_NOTHING_TRAINED) from None
        if result.interrupted:
            for text in result.notes:
                note(f"note: {text}")
            raise self._interruption(result.steps)
        self._conclude(describe_end(result), next_commands(run_dir))
        return Run(run_dir)

    def _conclude(self, end: str, commands: str) -> None:
        """The last lines of the command, beside the progress; where that is not wanted, the notes alone."""
        if "console" in self.prepared.config.logging.logger:
            note(f"\n{end}\n{commands}")
        else:
            for line in end.splitlines():
                if line.startswith("note: "):
                    note(line)

    def _interruption(self, steps: int) -> KeyboardInterrupt:
        run_dir = self.prepared.run_dir
        where = self.prepared.command(f"logging.run_dir={run_dir}")
        return make_interrupt(
            f"stopped after step {steps} and saved in {run_dir}: the same call with "
            f"run_dir={str(run_dir)!r}, or `{where}`, goes on from there"
        )

    def _take_signals(self, signals: "StopSignals") -> None:
        with self._lock:
            self._signals = signals
            if self._stopping:
                signals.request()

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            if self._signals is not None:
                self._signals.request()


class SFTCall(TrainingCall):
    def _work(self) -> Run:
        from treadle.cli.results import next_sft_commands
        from treadle.cli.sft import describe_end, run_sft

        config = self.prepared.config
        assert isinstance(config, SFTRunConfig), "a call of sft has an sft section"
        try:
            result = run_sft(config, self._command, allow_changes=self._allow_changes, on_signals=self._take_signals)
        except KeyboardInterrupt:
            raise make_interrupt(_NOTHING_TRAINED) from None
        if result.interrupted:
            raise self._interruption(result.steps)
        self._conclude(describe_end(result), next_sft_commands(self.prepared.run_dir))
        return Run(self.prepared.run_dir)


class RolloutCall(RunningCall[Evaluation]):
    def __init__(self, prepared: PreparedRun, fresh: bool) -> None:
        super().__init__(prepared, fresh)
        self._stopping = threading.Event()

    def _work(self) -> Evaluation:
        from treadle.cli.rollout import run_evaluation

        run_dir = self.prepared.run_dir
        result = run_evaluation(self.prepared.config, self._command, stop=self._stopping)
        if result.interrupted:
            raise make_interrupt(
                f"stopped after {result.summary.num_trajectories} trajectories, which are kept in {run_dir}: the same "
                f"call with run_dir={str(run_dir)!r} goes on from there"
            )
        return Evaluation(run_dir, result.summary)

    def _stop(self) -> None:
        self._stopping.set()


def make_interrupt(message: str) -> KeyboardInterrupt:
    """The exception to raise. A script that does not catch it ends with its message and status 130."""
    interrupt, before = KeyboardInterrupt(message), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not interrupt or hasattr(sys, "ps1") or sys.flags.interactive:
            before(kind, error, trace)
            return
        warn("".join(traceback.format_exception_only(error)).rstrip())
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(STATUS_INTERRUPTED)

    sys.excepthook = hook
    return interrupt
