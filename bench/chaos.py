"""Training runs that are attacked again and again, and proven whole after each attack.

    PYTHONPATH=. python bench/chaos.py --cycles 50                                    one after the other
    PYTHONPATH=. python bench/chaos.py --cycles 1000 --jobs 16 --results chaos.jsonl  side by side
    PYTHONPATH=. python bench/chaos.py --only 237                                     one cycle alone
    PYTHONPATH=. python bench/chaos.py --table chaos.jsonl                            the table of what is there

A cycle attacks `treadle train calculator` at a random moment: SIGKILL, SIGTERM, SIGINT or SIGHUP for the driver, an
engine, that of validation, an agent worker, a reward worker or a rank; no more room for the driver's files; or the run
directory taken away. The run goes on, or ends with a status that is not 0 and a cause, and is started again. Ten cycles
share a run directory, since most of a cycle is the start of a run; with `--cycles-per-run 1` each has its own. Which
part, which fault and which moment follow from `--seed` and the number of the cycle alone.

After each cycle the journal is audited: no task skipped, none trained twice. After the last one of a run `treadle
replay` must find the weights of every step again (but for ranks). Status 1 where anything was not so.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import SimpleQueue
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from tests.chaos import RANKS, VALIDATED, WORDS, ChaosRun, Cycle, Fault, Part, command

SIGNALS = [*Fault][:4]
PLAIN = [(part, fault) for part in (Part.ENGINE, Part.WORKER, Part.REWARD) for fault in SIGNALS]
PLAIN += [(Part.DRIVER, fault) for fault in Fault]
EARLY = 0.25
"""The share of starts that are attacked before their first step."""


@dataclass(frozen=True, slots=True)
class Job:
    """Cycles that share a run directory."""

    cycles: tuple[int, ...]
    per_run: int
    seed: int
    base: Path
    results: Path
    until: float

    @property
    def number(self) -> int:
        return (self.cycles[0] - 1) // self.per_run

    def kinds(self) -> tuple[tuple[str, ...], list[tuple[Part, Fault]]]:
        """How the run is started, and what may happen to it: of 20 runs 1 has ranks, and 4 validate."""
        if self.number % 20 == 7:
            return RANKS, [(Part.RANK, fault) for fault in SIGNALS]
        if self.number % 5 == 1:
            return VALIDATED, [*PLAIN, *((Part.VALIDATION, fault) for fault in SIGNALS * 4)]
        return WORDS, PLAIN


def main() -> int:
    arguments = _parse()
    if arguments.table:
        return _report(arguments.table)
    first, last = arguments.only or (1, arguments.cycles)
    results: Path = arguments.results
    results.write_text("")
    until, per_run = time.time() + 60 * arguments.minutes, arguments.cycles_per_run
    runs: dict[int, list[int]] = defaultdict(list)
    for cycle in range(first, last + 1):
        runs[(cycle - 1) // per_run].append(cycle)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, _pool(arguments.jobs) as pool:
        base = arguments.run_dir or Path(scratch)
        jobs = [Job(tuple(cycles), per_run, arguments.seed, base, results, until) for cycles in runs.values()]
        jobs.sort(key=lambda job: job.kinds()[0] is not RANKS)  # those take the longest: each cycle ends its run
        for done in as_completed([pool.submit(_attack, job) for job in jobs]):
            done.result()
    print(f"{time.monotonic() - began:.0f} s with {arguments.jobs} side by side\n")
    return _report([results])


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
    parser.add_argument("--cycles-per-run", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs under attack at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cycle after these")
    parser.add_argument("--run-dir", type=Path, help="where to keep the runs; a temporary directory unless given")
    parser.add_argument("--results", type=Path, default=Path("chaos.jsonl"), help="a line per cycle, written at once")
    parser.add_argument("--table", type=Path, nargs="+", metavar="RESULTS", help="attack nothing: print their table")
    return parser.parse_args()


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _attack(job: Job) -> None:
    """All cycles of a run. One that ends wrong is recorded, and the rest go on in a directory of their own."""
    words, kinds = job.kinds()
    left, attempt = list(job.cycles), 0
    while left and time.time() < job.until:
        directory = job.base / f"run-{job.number}-{attempt}"
        wrong = _attack_run(job, ChaosRun(directory, words), left, kinds)
        attempt += 1
        if not wrong:
            shutil.rmtree(directory, ignore_errors=True)


def _attack_run(job: Job, run: ChaosRun, left: list[int], kinds: Sequence[tuple[Part, Fault]]) -> str:
    """Attack until no cycle is left, or one ends wrong; what was wrong."""
    numbers, wrong = list[int](), ""
    try:
        with run:
            while left and time.time() < job.until:
                numbers.append(left.pop(0))
                rng = Random(f"{job.seed}/{numbers[-1]}")
                part, fault = rng.choice(kinds)
                # A directory that goes before the run has written to it is made anew: nothing was attacked.
                run.cycle(rng, part, fault, early=rng.random() < EARLY and fault is not Fault.VANISHED)
                if len(numbers) > 1:
                    _write(job, numbers[-2], run.cycles[-2])
                _write(job, numbers[-1], run.cycles[-1], quiet=True)
            status = run.finish()
            assert status == 130, f"status {status} after the last Ctrl-C"
        wrong = _replay(run.run_dir) if Part.RANK not in {part for part, _ in kinds} else ""
    except Exception as error:  # noqa: BLE001 (whatever a cycle comes to is what is being counted)
        wrong = f"{type(error).__name__}: {error}"
    if len(run.cycles) < len(numbers):  # the start that was to be attacked did not come up
        _write(job, numbers[-1], None, wrong)
        wrong_of_last = f"the start after it: {wrong}"
    else:
        wrong_of_last = wrong
    if run.cycles:
        _write(job, numbers[len(run.cycles) - 1], run.cycles[-1], wrong_of_last)
    return wrong


def _replay(run_dir: Path) -> str:
    replayed = command("replay", run_dir)
    return "" if replayed.returncode == 0 else f"replay: {replayed.stdout[-300:]}{replayed.stderr[-1000:]}"


def _write(job: Job, number: int, cycle: Cycle | None, wrong: str = "", *, quiet: bool = False) -> None:
    """A line of the results; a later line of the same cycle knows more (`quiet`: another will follow)."""
    record: dict[str, Any] = {"cycle": number, "wrong": wrong, **(asdict(cycle) if cycle else {})}
    with job.results.open("ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")
    if quiet:
        return
    went = "not attacked" if cycle is None else _describe(cycle)
    print(f"{number:5}  {went}{f'  WRONG: {wrong}' if wrong else ''}", flush=True)


def _describe(cycle: Cycle) -> str:
    went = "the run went on" if cycle.status is None else f"status {cycle.status}: {cycle.cause[:140]}"
    return f"{cycle.fault:18} {cycle.part:19} after {cycle.after_s:5.1f} s and {cycle.steps} steps: {went}"


def _report(files: Sequence[Path]) -> int:
    """Print the tables by part and by fault; 1 where anything was lost, repeated or wrong."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = [*{line["cycle"]: line for line in lines}.values()]
    for key in ("part", "fault"):
        print("\n".join(_table(rows, key)), end="\n\n")
    wrong = [row for row in rows if row["wrong"] or row.get("problems")]
    for row in wrong:
        print(f"cycle {row['cycle']}: {row['wrong']} {'; '.join(row.get('problems', ()))}")
    return 1 if wrong or not rows else 0


def _table(rows: Sequence[dict[str, Any]], key: str) -> Iterator[str]:
    yield f"| {key} | cycles | went on | ended, status | lost | repeated | ended wrong | recovery, median (longest) |"
    yield "|---|---|---|---|---|---|---|---|"
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row.get(key, "a start that was not attacked")].append(row)
    for name, same in [*sorted(groups.items()), ("all", list(rows))]:
        statuses = [row["status"] for row in same if row.get("status") is not None]
        ended = f"{len(statuses)}: {', '.join(map(str, sorted(set(statuses))))}" if statuses else "0"
        problems = [problem for row in same for problem in row.get("problems", ())]
        lost = sum("lost" in problem or "skipped" in problem for problem in problems)
        wrong = sum(bool(row["wrong"]) for row in same)
        times = [row["recovery_s"] for row in same if row.get("recovery_s") is not None]
        recovery = f"{median(times):.1f} s ({max(times):.1f} s)" if times else ""
        counts = f"{len(same)} | {len(same) - len(statuses)} | {ended} | {lost} | {len(problems) - lost} | {wrong}"
        yield f"| {name} | {counts} | {recovery} |"


if __name__ == "__main__":
    sys.exit(main())
