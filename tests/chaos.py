"""A real training run that is killed again and again: for the chaos test, and for `bench/chaos.py`.

Every start is the same command, `treadle train calculator`, as small as it gets. A cycle starts it, waits for a random
moment, kills a random part with SIGKILL and sees what comes of it: nothing may be left running, and a run that ends by
itself says why.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from treadle.errors import RunError
from treadle.journal import JournalReader
from treadle.recipes.calculator import tools
from treadle.reward.builtin.number_match import score as match_numbers

ROOT = Path(__file__).parents[1]

WORDS = (
    "trainer.mode=fully_async",
    "trainer.max_staleness=2",
    "trainer.total_training_steps=100000",
    "trainer.test_freq=3",
    "algorithm.rollout_correction.rollout_is=token",
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "actor.ppo_mini_batch_size=2",
    "rollout.nnodes=1",
    "rollout.n=2",
    "rollout.agent.num_workers=2",
    "rollout.multi_turn.tools=tests.chaos:calculate",
    "reward.functions.answer.path=tests.chaos:score",
    "checkpoint.save_freq=2",
)

LIMIT_S = 300.0
"""For a start to make steps, and for one that ends to be gone."""


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
    """What can be killed."""

    DRIVER = "driver"
    ENGINE = "engine"
    VALIDATION = "validation's engine"
    WORKER = "agent worker"
    REWARD = "reward worker"


_MARKS: Mapping[Part, str] = {
    Part.ENGINE: "native-0",
    Part.VALIDATION: "validation-0",
    Part.WORKER: "treadle.rollout.process_main",
    Part.REWARD: "treadle.reward",
}


@dataclass(frozen=True, slots=True)
class Cycle:
    """One start and its end."""

    part: Part
    after_s: float
    """How long after the start the kill came."""
    steps: int
    """Steps that this start made until then; those that no checkpoint covers are made again."""
    status: int | None
    """The run's exit status, where it ended by itself; None where it went on."""
    cause: str
    """What it said then."""


class Start:
    """A running command."""

    def __init__(self, run_dir: Path, *words: str) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self._before = count_steps(run_dir)
        self._log = (run_dir / "stderr.log").open("wb")
        command = [sys.executable, "-m", "treadle", "train", "calculator", f"logging.run_dir={run_dir}", *words]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True
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
            for part, mark in _MARKS.items():
                if mark in words:
                    found.setdefault(part, []).append(pid)
        return found

    def wait_for(self, what: str, reached: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Wait until something is so; False where the run ended first."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            if reached():
                return True
            assert time.monotonic() < deadline, f"{what} took more than {limit_s:g} s; it said: {self.said()}"
            time.sleep(0.05)
        return False

    def interrupt(self) -> int:
        """Ctrl-C, as a terminal sends it: to every process of the group. The exit status."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Wait for the end; nothing may be left of the run. Its status."""
        children = [pid for pids in self.parts().values() for pid in pids]
        status = self.process.wait(LIMIT_S)
        self._log.close()
        deadline = time.monotonic() + 60
        while left := [pid for pid in children if _is_alive(pid)]:
            assert time.monotonic() < deadline, f"processes {left} outlive the run"
            time.sleep(0.05)
        return status

    def said(self) -> str:
        """The last of what the run said on standard error."""
        return (self.run_dir / "stderr.log").read_text(errors="replace").strip()[-2000:]


def run_cycle(run_dir: Path, rng: Random, part: Part | None = None) -> Cycle:
    """Start the run, kill one part of it at a random moment, and see to its end.

    None: any part, and maybe while the run starts.
    """
    with Start(run_dir, *WORDS) as start:
        _wait_for_a_moment(start, rng, maybe_early=part is None)
        there = start.parts()
        victim = part or rng.choice(sorted(there))
        after_s, done = time.monotonic() - start.began, start.steps
        os.kill(rng.choice(there[victim]), signal.SIGKILL)
        if victim is Part.DRIVER:
            start.end()
            return Cycle(victim, after_s, done, None, "")
        enough = done + (8 if victim is Part.VALIDATION else 2)  # validation notices its engine when it is next due
        if start.wait_for("the end, or some more steps", lambda: start.steps >= enough):
            assert victim is not Part.VALIDATION, "the run went on without an engine"
            start.kill()
            return Cycle(victim, after_s, done, None, "")
        status, said = start.end(), start.said()
    assert status > 0, f"the run ended with status {status} after its {victim} was killed: {said}"
    return Cycle(victim, after_s, done, status, said.splitlines()[-1])


def _wait_for_a_moment(start: Start, rng: Random, *, maybe_early: bool) -> None:
    """After some steps; or, one time in four, while the run starts its processes."""
    steps, processes = rng.randrange(1, 5), rng.randrange(1, 9)
    if maybe_early and rng.random() < 0.25:
        start.wait_for(f"{processes} processes", lambda: sum(map(len, start.parts().values())) >= processes)
    else:
        assert start.wait_for(f"step {steps}", lambda: start.steps >= steps), start.said()
        time.sleep(rng.uniform(0.0, 1.0))


def finish(run_dir: Path, steps: int = 3) -> int:
    """Start it once more, let it make some steps, and interrupt it. Its status."""
    with Start(run_dir, *WORDS) as start:
        assert start.wait_for(f"{steps} steps", lambda: start.steps >= steps), start.said()
        return start.interrupt()


def command(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    """Any other command, to its end."""
    return _finish("-m", "treadle", *map(str, words))


def run_python(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A program in a process of its own, to its end."""
    return _finish("-c", program, *arguments)


def _finish(*words: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, *words]
    return subprocess.run(line, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=3600, check=False)


def _environment() -> dict[str, str]:
    """One thread for each process: sums of floats come out alike wherever they are computed."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def count_steps(run_dir: Path) -> int:
    """Steps in the journal, those that a crash undid included."""
    try:
        with JournalReader.open(run_dir) as reader:
            return len(reader.events(kind="step", limit=1 << 30))
    except RunError:
        return 0  # there is no journal yet, or it is being made


def children(pid: int) -> Iterator[tuple[int, str]]:
    """The processes that a process started, and their command lines."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(tasks).split():
            yield int(child), _read(Path(f"/proc/{child}/cmdline")).replace("\0", " ")


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected does not."""
    status = _read(Path(f"/proc/{pid}/stat"))
    return bool(status) and status.rpartition(")")[2].split()[0] != "Z"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # the process has gone
