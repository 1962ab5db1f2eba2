"""A real training run that is attacked again and again: for the chaos tests, and for `bench/chaos.py`.

Every start is the same command, `treadle train calculator`, as small as it gets. A cycle waits for a random moment,
sends a signal to a part, fills the disk or takes the run directory away, and sees what comes of it: the run goes on, or
it ends with a status that is not 0 and says why, and then nothing of it is left running. A run that goes on is attacked
again; one that has ended is started again by the next cycle. After each cycle the journal is audited.
"""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from tests.proc_tree import children, descendants, is_alive
from treadle.errors import RunError
from treadle.inspect.audit import audit
from treadle.journal import JournalReader
from treadle.recipes.calculator import tools
from treadle.reward.builtin.number_match import score as match_numbers

ROOT = Path(__file__).parents[1]

WORDS = (
    "trainer.mode=fully_async",
    "trainer.max_staleness=2",
    "trainer.total_training_steps=100000",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "algorithm.rollout_correction.rollout_is=token",
    "data.train_batch_size=2",
    "data.val_files=[]",
    "actor.ppo_mini_batch_size=2",
    "rollout.nnodes=1",
    "rollout.n=2",
    "rollout.agent.num_workers=2",
    "rollout.multi_turn.tools=tests.chaos:calculate",
    "reward.functions.answer.path=tests.chaos:score",
    "checkpoint.save_freq=2",
)

VALIDATED = (
    *(word for word in WORDS if not word.startswith(("trainer.test_freq=", "trainer.val_", "data.val_"))),
    "trainer.test_freq=3",
    "data.val_max_samples=2",
)
"""With validations, on an engine of their own."""

FROZEN = (*WORDS, "rollout.limits.request_timeout_s=60", "rollout.limits.session_timeout_s=120", "reward.timeout_s=10")
"""With deadlines that a frozen part is seen by."""

RANKS = (
    *(word for word in WORDS if not word.startswith(("trainer.mode=", "trainer.max_staleness=", "rollout.nnodes="))),
    "actor._target_=treadle.config.FSDPActorConfig",
    "trainer.processes_per_node=2",
)
"""The same in sync, with the policy on two ranks."""

FROZEN_RANKS = (*RANKS, "trainer.rank_timeout_s=30")

LIMIT_S = 300.0
"""For a start to make steps, and for one that ends to be gone."""

FOREVER = float("inf")


class OutOfTime(Exception):
    """The budget of the caller is spent: what was being waited for is of no interest any more."""


def tiny_run(steps: int) -> tuple[str, ...]:
    """Words for a run of a few small steps and nothing else."""
    return (
        f"trainer.total_training_steps={steps}",
        "data.train_batch_size=2",
        "data.val_files=[]",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "actor.ppo_mini_batch_size=2",
        "rollout.n=2",
    )


def score(response: str, ground_truth: Any) -> float:
    """The calculator's reward; as a function of our own it runs in a process of its own."""
    return match_numbers(response, ground_truth)


async def calculate(expression: str) -> str:
    """Work out one operation on two whole numbers.

    Args:
        expression: two whole numbers with +, - or * between them, such as 12*7
    """
    # Slow enough that kills, checkpoints and weight updates find sessions half done.
    await asyncio.sleep(crc32(expression.encode()) % 16 / 10)
    return tools.calculate(expression)


class Part(StrEnum):
    """What can be attacked."""

    DRIVER = "driver"
    ENGINE = "engine"
    VALIDATION = "validation's engine"
    WORKER = "agent worker"
    REWARD = "reward worker"
    RANK = "rank"
    PROGRAM = "agent program"
    MCP = "MCP server"
    CLASSIFIER = "classifier"
    BOX = "box"


class Fault(StrEnum):
    """What can happen to a part; the last two to the driver alone."""

    KILL = "SIGKILL"
    TERM = "SIGTERM"
    INT = "SIGINT"
    HUP = "SIGHUP"
    STOP = "SIGSTOP"
    """Frozen: it lives, and answers nothing."""
    FULL_DISK = "full disk"
    VANISHED = "vanished directory"


_MARKS: Mapping[Part, tuple[str, ...]] = {
    Part.ENGINE: ("native-0",),
    Part.VALIDATION: ("validation-0",),
    Part.WORKER: ("agent worker",),
    Part.REWARD: ("reward worker",),
    Part.RANK: ("policy rank",),
    Part.CLASSIFIER: (" classifier ",),
}
"""Words in the command line of what a driver starts."""

_NESTED_MARKS: Mapping[Part, tuple[str, ...]] = {
    Part.PROGRAM: ("chaos_agent.py",),
    Part.MCP: ("chaos_mcp.py",),
    Part.BOX: ("landlock_init", "bwrap", "source, done, scope"),
}
"""The same of what an agent worker starts, and of all that is below."""


@dataclass(slots=True)
class Cycle:
    """One attack and what came of it."""

    part: Part
    fault: Fault
    after_s: float
    """How long after the start of the run it came."""
    steps: int
    """Steps that this start made until then; those that no checkpoint covers are made again."""
    status: int | None = None
    """The run's exit status, where it ended; None where it went on."""
    cause: str = ""
    """What it said then."""
    recovery_s: float | None = None
    """From the fault to two more steps; where the run ended, from its next start to the first step."""
    problems: tuple[str, ...] = ()
    """What the audit after it found, and the audit before it had not."""


class Start:
    """A running command."""

    def __init__(self, run_dir: Path, *words: str, command: str = "train", until: float = FOREVER) -> None:
        """`until`: by the clock, when nothing is waited for any longer."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self._until = run_dir, until
        self._before = count_steps(run_dir)
        self._listed: set[int] = set()
        """The processes of the run, when they were last looked at."""
        (run_dir / "stderr.log").unlink(missing_ok=True)
        self._log = (run_dir / "stderr.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "treadle", command, "calculator", f"logging.run_dir={run_dir}", *words],
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=hear_signals,
        )
        self.began = time.monotonic()

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever went wrong, leave nothing running: the parts of a run end with its driver."""
        if self.process.poll() is None:
            self.kill()

    @property
    def steps(self) -> int:
        return count_steps(self.run_dir) - self._before

    def parts(self) -> dict[Part, list[int]]:
        """The processes of the run, by what they are."""
        found: dict[Part, list[int]] = {Part.DRIVER: [self.process.pid]}
        for pid, words in children(self.process.pid):
            for part in _marked(words, _MARKS):
                found.setdefault(part, []).append(pid)
                if part is Part.WORKER:
                    for below, said in descendants(pid):
                        for nested in _marked(said, _NESTED_MARKS):
                            found.setdefault(nested, []).append(below)
        if len(found) > 1:
            self._listed = {pid for pids in found.values() for pid in pids}
        return found

    def has(self, part: Part, count: int) -> bool:
        """Whether it has that part and so many processes, or all that it will have."""
        parts = self.parts()
        return part in parts and (sum(map(len, parts.values())) >= count or self.steps >= 1)

    def wait_for(self, what: str, reached: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Wait until something is so; False where the run ended first."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            if reached():
                return True
            assert time.monotonic() < deadline, f"{what} took more than {limit_s:g} s; it said: {self.said()}"
            if time.time() > self._until:
                raise OutOfTime(what)
            time.sleep(0.1)
        return False

    def interrupt(self) -> int:
        """Ctrl-C, as a terminal sends it: to every process of the group. The exit status."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.end()

    def kill(self) -> None:
        self.parts()
        self.process.kill()
        self.process.wait(LIMIT_S)
        self.end()

    def end(self) -> int:
        """Wait for the end; nothing may be left of the run. Its status."""
        before = self._listed  # a driver that was killed no longer knows its children
        self.parts()
        self.wait_for("its end", lambda: False)
        status = self.process.wait()
        self._log.close()
        deadline = time.monotonic() + 60
        while left := [pid for pid in before | self._listed if is_alive(pid)]:
            assert time.monotonic() < deadline, f"processes {left} outlive the run"
            time.sleep(0.05)
        return status

    def said(self) -> str:
        """The last of what the run said on standard error."""
        return (self.run_dir / "stderr.log").read_text(errors="replace").strip()[-2000:]


class ChaosRun:
    """One run directory under attack."""

    def __init__(self, run_dir: Path, words: tuple[str, ...] = WORDS, until: float = FOREVER) -> None:
        self.run_dir, self.cycles = run_dir, list[Cycle]()
        self._words, self._until = words, until
        self._start: Start | None = None
        self._problems: tuple[str, ...] = ()

    def __enter__(self) -> "ChaosRun":
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is not None:
            self._start.__exit__()

    def cycle(self, rng: Random, part: Part, fault: Fault, *, early: bool = False) -> Cycle:
        """One attack on a part, at a random moment. `early`: where the run must be started for it, while it starts."""
        start = self._running(rng, part, early=early)
        start.wait_for(f"the {part}", lambda: part in start.parts())  # those that check a config come and go
        pids = start.parts().get(part, [])
        cycle = Cycle(part, fault, time.monotonic() - start.began, start.steps)
        self.cycles.append(cycle)
        if fault is Fault.FULL_DISK:
            os.truncate(self.run_dir / "stderr.log", 0)  # the limit is for every file: leave room to say why it ended
            limits = resource.prlimit(start.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(start.process.pid, resource.RLIMIT_FSIZE, (4096, limits[1]))  # no file grows beyond that
        elif fault is Fault.VANISHED:
            self.run_dir.rename(self._away)
        else:
            assert pids, f"the run has no {part}: {start.said()}"
            with suppress(ProcessLookupError):  # an earlier attack has ended it by now
                os.kill(rng.choice(pids), signal.Signals[fault])
        self._watch(start, cycle)
        self._audit(cycle)
        return cycle

    def _audit(self, cycle: Cycle) -> None:
        try:
            problems = audit(self.run_dir).problems
        except RunError:
            return  # it was ended before it wrote anything
        cycle.problems += tuple(problem for problem in problems if problem not in self._problems)
        self._problems = problems

    @property
    def _away(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}-away")

    def _running(self, rng: Random, part: Part, *, early: bool) -> Start:
        if self._start is not None:
            time.sleep(rng.uniform(0.0, 2.0))
            if self._start.wait_for(f"the {part}", lambda: part in self._start.parts()):
                return self._start
            self._end_late(self._start)
        start = self._start = Start(self.run_dir, *self._words, until=self._until)
        if early:
            count = rng.randrange(1, 9) if part is Part.DRIVER else 1
            assert start.wait_for(f"the {part} and {count} processes", lambda: start.has(part, count)), start.said()
            time.sleep(rng.uniform(0.0, 1.0))
            return start
        assert start.wait_for("a step", lambda: start.steps >= 1), start.said()
        if self.cycles and self.cycles[-1].status is not None:
            self.cycles[-1].recovery_s = time.monotonic() - start.began
        time.sleep(rng.uniform(0.0, 2.0))
        return start

    def _watch(self, start: Start, cycle: Cycle) -> None:
        """Until the run has made some more steps, or has ended."""
        began = time.monotonic()
        if cycle.part is not Part.DRIVER:
            enough = cycle.steps + 2
            if start.wait_for("the end, or some more steps", lambda: start.steps >= enough):
                cycle.recovery_s = time.monotonic() - began
                return
        self._end(start, cycle)

    def _end(self, start: Start, cycle: Cycle) -> None:
        self._start = None
        cycle.status = start.end()
        if cycle.fault is Fault.VANISHED:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            self._away.rename(self.run_dir)
        said = start.said()
        cycle.cause = said.splitlines()[-1] if said else ""
        assert cycle.status != 0, f"status 0 after {cycle.fault} of the {cycle.part}: {said}"
        if not (cycle.part is Part.DRIVER and cycle.fault is Fault.KILL):
            assert cycle.status > 0 or cycle.steps == 0, f"status {cycle.status} after {cycle.fault}: {said}"
            assert cycle.cause or cycle.steps == 0, f"nothing was said after {cycle.fault} of the {cycle.part}"

    def _end_late(self, start: Start) -> None:
        """The run took longer to see what was done to it."""
        self.cycles[-1].recovery_s = None
        self._end(start, self.cycles[-1])

    def finish(self, steps: int = 3) -> int:
        """Let it make some steps, and interrupt it as a terminal does. Its status."""
        if self._start is not None:
            enough = self._start.steps + steps
            if not self._start.wait_for(f"{steps} steps", lambda: self._start.steps >= enough):
                self._end_late(self._start)
        start = self._start = self._start or Start(self.run_dir, *self._words, until=self._until)
        assert start.wait_for(f"{steps} steps", lambda: start.steps >= steps), start.said()
        if self.cycles and self.cycles[-1].status is not None and self.cycles[-1].recovery_s is None:
            self.cycles[-1].recovery_s = time.monotonic() - start.began
        self._start = None
        status = start.interrupt()
        if self.cycles:
            self._audit(self.cycles[-1])
        return status


def command(*words: str | Path, until: float = FOREVER) -> "subprocess.CompletedProcess[str]":
    """Any other command, to its end."""
    return _finish("-m", "treadle", *map(str, words), until=until)


def run_python(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A program in a process of its own, to its end."""
    return _finish("-c", program, *arguments)


def _finish(*words: str, until: float = FOREVER) -> "subprocess.CompletedProcess[str]":
    line, limit_s = [sys.executable, *words], min(3600.0, max(1.0, until - time.time()))
    try:
        return subprocess.run(
            line, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        if time.time() < until:
            raise
        raise OutOfTime(" ".join(words)) from late


def hear_signals() -> None:
    """As in a terminal: shells let background jobs ignore Ctrl-C, and nohup lets them ignore SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _environment() -> dict[str, str]:
    """One thread for each process: sums of floats come out alike wherever they are computed."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}


def count_steps(run_dir: Path) -> int:
    """Steps in the journal, those that a crash undid included."""
    try:
        with JournalReader.open(run_dir) as reader:
            return len(reader.events(kind="step", limit=1 << 30))
    except RunError:
        return 0  # there is no journal yet, or it is being made


def _marked(words: str, marks: Mapping[Part, tuple[str, ...]]) -> Iterator[Part]:
    return (part for part, found in marks.items() if any(mark in words for mark in found))
