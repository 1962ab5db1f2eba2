"""Training runs that are attacked again and again, and proven whole after each attack.

    PYTHONPATH=. python bench/chaos.py --cycles 50                             one after the other
    PYTHONPATH=. python bench/chaos.py --cycles 1000 --jobs 16 --out results   side by side
    PYTHONPATH=. python bench/chaos.py --cycles 1000 --jobs 16 --out results --minutes 8    go on for 8 minutes
    PYTHONPATH=. python bench/chaos.py --only 237                              one cycle alone
    PYTHONPATH=. python bench/chaos.py --kinds program box --cycles 200        runs with these parts alone
    PYTHONPATH=. python bench/chaos.py --table results/chaos.jsonl more.jsonl  the table of what is there, merged

A cycle attacks `treadle train calculator` at a random moment: SIGKILL, SIGTERM, SIGINT or SIGHUP for the driver, an
engine, that of validation, an agent worker, a reward worker, a rank, an agent program, an MCP server, a classifier or a
box; SIGSTOP for an engine, a worker or a rank, in runs with short deadlines; no more room for the driver's files; or
the run directory taken away. The run goes on, or ends with a status that is not 0 and a cause, and is started again.
Ten cycles share a run directory, since most of a cycle is the start of a
run; with `--cycles-per-run 1` each has its own. Which kind of run, which part, which fault and which moment follow from
`--seed` and the number of the cycle alone. Kinds that a machine cannot have are left out, and named with the reason.

After each cycle the journal is audited: no task skipped, none trained twice. After the last one of a run `treadle
replay` must find the weights of every step again (but for ranks). Status 1 where anything was not so. What each cycle
came to is in `chaos.jsonl` of the `--out` folder at once; cycles that are there already are not made again. `--minutes`
is for all of it: whatever is under way then is ended and not counted.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import SimpleQueue
from pathlib import Path
from random import Random

from bench.chaos_report import describe, finished_cycles, read_records, report, write_record
from tests.chaos import ChaosRun, Cycle, Fault, OutOfTime, Part, command
from tests.chaos_kinds import KINDS, RunKind

DEALT = (
    *("plain", "validated", "program", "box", "mcp", "classifier", "plain", "ranks", "program", "box"),
    *("plain", "validated", "mcp-sessions", "program", "plain", "classifier", "box", "validated", "mcp", "plain"),
    *("frozen", "frozen-ranks"),
)
"""The kinds of 22 runs in a row."""

EARLY = 0.25
"""The share of starts that are attacked before their first step."""

PROOF_S = 90.0
"""Before the end of the budget: from then on runs are proven, and no cycle begins. At most a quarter of it."""

CLEANUP_S = 15.0
"""The last of the budget, in which what is under way is killed."""


@dataclass(frozen=True, slots=True)
class Job:
    """Cycles that share a run directory."""

    cycles: tuple[int, ...]
    per_run: int
    seed: int
    base: Path
    results: Path
    begin_until: float
    until: float

    @property
    def number(self) -> int:
        return (self.cycles[0] - 1) // self.per_run

    @property
    def kind(self) -> RunKind:
        return KINDS[DEALT[self.number % len(DEALT)]]

    def write(
        self, number: int, cycle: Cycle | None, wrong: str = "", *, proven: bool = False, quiet: bool = False
    ) -> None:
        """What a cycle came to; a later record of the same cycle knows more (`quiet`: one will follow)."""
        record = write_record(self.results, self.seed, number, self.kind.name, cycle, wrong, proven=proven)
        if not quiet:
            print(describe(record), flush=True)


def main() -> int:
    arguments = _parse()
    if arguments.table:
        return report([record for file in arguments.table for record in read_records(file)])
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    began, budget_s = time.time(), 60 * arguments.minutes
    skipped = {name: problem for name in arguments.kinds if (problem := KINDS[name].missing())}
    for name, problem in skipped.items():
        print(f"left out: runs of the kind {name}: {problem}", flush=True)
    with tempfile.TemporaryDirectory() as scratch, _pool(arguments.jobs) as pool:
        base = (arguments.run_dir or Path(scratch)).resolve()
        until = began + budget_s - min(CLEANUP_S, budget_s / 4)
        jobs = [*_jobs(arguments, base, until - min(PROOF_S, budget_s / 4), until)]
        jobs = [job for job in jobs if job.kind.name in arguments.kinds and job.kind.name not in skipped]
        if budget_s == float("inf"):
            jobs.sort(key=lambda job: job.kind.name != "ranks")  # those take the longest: each cycle ends its run
        for done in as_completed([pool.submit(_attack, job) for job in jobs]):
            done.result()
    print(f"{time.time() - began:.0f} s with {arguments.jobs} side by side\n")
    return report(read_records(out / "chaos.jsonl"), out, skipped)


def _jobs(arguments: argparse.Namespace, base: Path, begin_until: float, until: float) -> Iterator[Job]:
    """The runs that have cycles left to make."""
    first, last = arguments.only or (1, arguments.cycles)
    results, per_run = arguments.out / "chaos.jsonl", arguments.cycles_per_run
    finished = finished_cycles(results, arguments.seed)
    runs: dict[int, list[int]] = defaultdict(list)
    for cycle in range(first, last + 1):
        if cycle not in finished:
            runs[(cycle - 1) // per_run].append(cycle)
    for cycles in runs.values():
        yield Job(tuple(cycles), per_run, arguments.seed, base, results, begin_until, until)


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Processes with a share of the cores each, which what they start inherits: runs do not wait for each other."""
    shares: SimpleQueue[list[int]] = SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    for job in range(jobs):
        shares.put(cores[job % len(cores) :: jobs])
    return ProcessPoolExecutor(jobs, initializer=_pin, initargs=(shares,))


def _pin(shares: "SimpleQueue[list[int]]") -> None:
    os.sched_setaffinity(0, shares.get())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--only", type=_span, metavar="CYCLE[-LAST]", help="these cycles alone, by number from 1")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], help="runs of these kinds alone")
    parser.add_argument("--cycles-per-run", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs under attack at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after these, whatever is under way")
    parser.add_argument("--run-dir", type=Path, help="where to keep the runs; a temporary directory unless given")
    parser.add_argument("--out", type=Path, default=Path("chaos"), help="folder of chaos.jsonl, .json and .md")
    parser.add_argument("--table", type=Path, nargs="+", metavar="JSONL", help="attack nothing: print their table")
    return parser.parse_args()


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _attack(job: Job) -> None:
    """All cycles of a run. One that ends wrong is recorded, and the rest go on in a directory of their own."""
    left, attempt = list(job.cycles), 0
    while left and time.time() < job.begin_until:
        directory = job.base / f"run-{job.number}-{attempt}"
        words = job.kind.words(job.base / f"parts-{job.number}")
        wrong = _attack_run(job, ChaosRun(directory, words, job.until), left)
        attempt += 1
        if not wrong:
            shutil.rmtree(directory, ignore_errors=True)


def _attack_run(job: Job, run: ChaosRun, left: list[int]) -> str:
    """Attack until no cycle is left, or one ends wrong; what was wrong."""
    numbers, wrong, proven, has_ended = list[int](), "", False, 0
    try:
        with run:
            while left and time.time() < job.begin_until:
                numbers.append(left.pop(0))
                _cycle(job, run, numbers[-1], job.kind.attacks())
                has_ended = len(numbers)
                if len(numbers) > 1:
                    job.write(numbers[-2], run.cycles[-2])
                job.write(numbers[-1], run.cycles[-1], quiet=True)
            status = run.finish()
            assert status == 130, f"status {status} after the last Ctrl-C"
        wrong = "" if job.kind.part is Part.RANK else _replay(run.run_dir, job.until)
        proven = not wrong
    except OutOfTime:
        del numbers[has_ended:], run.cycles[has_ended:]  # what is half done says nothing
    except Exception as error:  # noqa: BLE001 (whatever a cycle comes to is what is being counted)
        wrong = f"{type(error).__name__}: {error}"
    if len(run.cycles) < len(numbers):  # the start that was to be attacked did not come up
        job.write(numbers[-1], None, wrong)
        wrong_of_last = f"the start after it: {wrong}"
    else:
        wrong_of_last = wrong
    if run.cycles:
        job.write(numbers[len(run.cycles) - 1], run.cycles[-1], wrong_of_last, proven=proven)
    return wrong


def _cycle(job: Job, run: ChaosRun, number: int, attacks: Sequence[tuple[Part, Fault]]) -> None:
    rng = Random(f"{job.seed}/{number}")
    part, fault = rng.choice(attacks)
    # A directory that goes before the run has written to it is made anew: nothing was attacked.
    run.cycle(rng, part, fault, early=rng.random() < EARLY and fault not in (Fault.VANISHED, Fault.STOP))


def _replay(run_dir: Path, until: float) -> str:
    replayed = command("replay", run_dir, until=until)
    return "" if replayed.returncode == 0 else f"replay: {replayed.stdout[-300:]}{replayed.stderr[-1000:]}"


if __name__ == "__main__":
    sys.exit(main())
