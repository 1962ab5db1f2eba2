"""Command entry point: all commands, and how errors leave the program.

What tools and loops started in the process of a command, and did not end, ends with it; workers do the same for what
runs in them. For commands alone: a Python program that calls treadle has children of its own, and so may a shell that
became this process. Those that were there before are spared.
"""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NoReturn

from treadle import __version__
from treadle.cli import check, config, init, inspect, plan, recipes, results, rollout, serve, sft, simulate, train, view
from treadle.cli.early_signals import restore_signals
from treadle.cli.parser import Parser, new_parser, parse
from treadle.errors import ConfigError, Failure, RunError
from treadle.exit_status import STATUS_CONFIG, STATUS_FAILED, STATUS_INTERRUPTED
from treadle.process.interrupt_watcher import discount_interrupt
from treadle.process.tree import adopt_orphans, kill_children, list_children
from treadle.terminal import show_cursor, warn

RUNS = (train.train, sft.sft, rollout.rollout, serve.serve, check.check)
"""Commands that run code of the user's; what that starts does not outlive them."""
LAST_WARNING = 2
"""Ctrl-C so many times: the next one is the system's to deal with."""
AGAIN_S = 0.5
"""After a Ctrl-C in the middle of an import, until it is raised again, should the run still be there."""


def build_parser() -> Parser:
    """Every command and what it takes."""
    parser = new_parser(
        "treadle",
        "Reinforcement learning of language-model agents, with the rollout as a service of its own.",
        """
        CONFIG is a YAML file or a shipped recipe such as calculator; several are laid over each other, left to right.
        KEY=VALUE words win over every file.

          treadle train calculator                    an agent that learns, in two minutes on two cores
          treadle recipes                             what comes with treadle, with the curves we measured
          treadle sft my.yaml                         supervised fine-tuning: chat files, or a run's best trajectories
          treadle init my-project --task tools        a project of your own, which trains as it stands
          treadle check my.yaml                       files, prompts, rewards, model and machine, before a run
          treadle plan calculator rollout.n=16        what would run where, and how batches divide
          treadle view RUN                            a run in the browser, down to single tokens
          treadle show RUN --worst                    trajectories of a run; also: metrics RUN, export RUN DIR
          treadle config show calculator --origins    every value and where it came from
          treadle config migrate run.sh > my.yaml     move over from verl
        """,
    )
    parser.add_argument("--version", action="version", version=f"treadle {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    recipes.register(commands)
    init.register(commands)
    train.register(commands)
    sft.register(commands)
    check.register(commands)
    plan.register(commands)
    simulate.register(commands)
    rollout.register(commands)
    serve.register(commands)
    view.register(commands)
    results.register_show(commands)
    results.register_metrics(commands)
    results.register_export(commands)
    inspect.register_replay(commands)
    inspect.register_annotate(commands)
    inspect.register_audit(commands)
    inspect.register_timeline(commands)
    config.register(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a bad config is a report and status 2, never a traceback."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # what we print is read back as UTF-8, whatever the locale
    parsed = parse(build_parser(), words or ["--help"])
    if arguments is not None:
        sys.exit(_run(parsed.run, parsed))
    end_children = end_children_with_us() if parsed.run in RUNS else None
    leave = _refuse_silent_exit(end_children)
    restore_signals()
    count_interrupts = _count_interrupts()
    _end_in_order_on_signals()
    try:
        status = _run(parsed.run, parsed)
    except Exception:
        if not count_interrupts():
            raise
        # A package was being imported: some take an interrupt for a failed import, go on, and break on what is missing.
        warn("interrupted")
        status = STATUS_INTERRUPTED
    if status == STATUS_INTERRUPTED:
        atexit._run_exitfuncs()
    if status == STATUS_INTERRUPTED or any(
        thread.daemon and thread.name.startswith("treadle-") for thread in threading.enumerate()
    ):
        # Code that did not end on request is still in some library: Python's own end would abort in there.
        _flush()
        if end_children is not None:
            end_children()
        leave(status)
    sys.exit(status)


def _refuse_silent_exit(end_children: Callable[[], None] | None) -> Callable[[int], NoReturn]:
    """`os._exit(0)` in a user's tool must not look like a finished run; returns the real exit."""
    leave, here = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if status == 0 and os.getpid() == here:  # a process that was forked from here may
            place = traceback.extract_stack(limit=2)[0]
            warn(f"os._exit(0) was called in {place.filename}:{place.lineno}, and the run is not done")
            status = STATUS_FAILED
        _flush()
        if end_children is not None and os.getpid() == here:
            end_children()
        leave(status)

    os._exit = refuse
    return leave


def _count_interrupts() -> Callable[[], int]:
    """Handle Ctrl-C: two request a stop, and a third ends the process at once. Returns a function that counts them."""
    count, repeats = 0, False

    def repeat() -> None:
        nonlocal repeats
        repeats = True
        discount_interrupt()
        os.kill(os.getpid(), signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count, repeats
        count, repeats = count + (not repeats), False
        if _is_importing(frame):  # a package may take it for a failed import of its own, and go on
            again = threading.Timer(AGAIN_S, repeat)
            again.daemon = True
            again.start()
        if count == LAST_WARNING:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            show_cursor()
            warn("interrupted again: once more ends it at once")
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)
    return lambda: count


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _end_in_order_on_signals() -> None:
    """Handle SIGTERM and SIGHUP as Ctrl-C, unless a handler is already set (by nohup or by the calling program)."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _run(run: object, parsed: object) -> int:
    assert callable(run), "every command sets what it runs"
    try:
        status = int(run(parsed) or 0)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except ConfigError as error:
        count = len(error.mistakes)
        warn(f"{error}\n\n{count} mistake{'s' if count > 1 else ''}; nothing was started")
        return STATUS_CONFIG
    except (RunError, Failure) as error:
        warn(f"{type(error).__name__}: {error}")
        return STATUS_FAILED
    except KeyboardInterrupt:
        warn("interrupted")
        return STATUS_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed the pipe; Python flushes once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STATUS_FAILED
    except OSError as error:
        from treadle.disk import explain_disk_error  # takes sqlite3 and shutil

        disk = explain_disk_error(error, Path(error.filename or "."))
        if disk is None:
            raise
        if error.filename:
            warn(f"cannot write {error.filename}: {disk.problem}: {disk.fix} and try again")
        else:  # our own output, wherever it goes
            warn(f"cannot write: {error.strerror}")
        return STATUS_FAILED


def end_children_with_us() -> Callable[[], None]:
    """Adopt what children leave behind, and kill all of it as the last thing of this process; returns what does it."""
    before, us = list_children(os.getpid()), os.getpid()

    def end() -> None:
        if os.getpid() == us:  # a process that was forked from here may end, too
            kill_children(spare=before | _helpers())

    adopt_orphans()
    atexit.register(end)  # the first to be registered is the last to be called: packages end theirs in order
    return end


def _helpers() -> set[int]:
    """The process in which Python keeps what is shared, and which ends by itself: it cleans up after all others."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    pid = tracker._resource_tracker._pid if tracker is not None else None
    return set() if pid is None else {pid}
