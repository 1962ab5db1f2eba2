"""A training run that is attacked again and again, and proven whole at the end.

    PYTHONPATH=. python bench/chaos.py --cycles 50 --rank-cycles 5 --seed 0

Each cycle attacks `treadle train calculator` in fully_async at a random moment: SIGKILL, SIGTERM, SIGINT or SIGHUP for
the driver, an engine, that of validation, an agent worker or a reward worker; no more room for the driver's files; or
the run directory taken away. The run goes on, or ends with a status that is not 0 and a cause, and is started again.
`--rank-cycles` are the same for the ranks of a run whose policy is on two. After the last one `treadle audit` must find
no task skipped and none trained twice, and `treadle replay` the weights of every step again. `--minutes` ends sooner.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from statistics import median

from tests.chaos import RANKS, WORDS, ChaosRun, Cycle, Part, command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--rank-cycles", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cycle after these")
    parser.add_argument("--run-dir", type=Path, help="where to keep the runs; a temporary directory unless given")
    arguments = parser.parse_args()
    rng, until = Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as scratch:
        base = arguments.run_dir or Path(scratch)
        done, whole = _attack(ChaosRun(base / "ranks", rng, RANKS), arguments.rank_cycles, Part.RANK, until)
        more, also = _attack(ChaosRun(base / "run", rng, WORDS), arguments.cycles, None, until)
    print(_table(done + more))
    return 0 if whole and also else 1


def _attack(run: ChaosRun, cycles: int, part: Part | None, until: float) -> tuple[list[Cycle], bool]:
    """The cycles that were made, and whether the run is whole after them."""
    began = time.monotonic()
    with run:
        for number in range(1, cycles + 1):
            if time.monotonic() > until:
                break
            print(f"{number:4}  {_describe(run.cycle(part))}", flush=True)
        if not run.cycles:
            return [], True
        status = run.finish()
    audited = command("audit", run.run_dir)
    print(f"interrupted after 3 more steps: status {status}\n{audited.stdout.strip()}{audited.stderr.strip()}")
    whole = status == 130 and audited.returncode == 0 and "none skipped, none trained twice" in audited.stdout
    if part is None:
        replayed = command("replay", run.run_dir)
        whole = whole and replayed.returncode == 0
        print(
            f"replay: {replayed.stdout.count('the same weights')} steps give the same weights; {replayed.stderr[-300:]}"
        )
    print(
        f"{len(run.cycles)} cycles in {time.monotonic() - began:.0f} s: {'whole' if whole else 'NOT WHOLE'}", flush=True
    )
    return run.cycles, whole


def _describe(cycle: Cycle) -> str:
    went = "the run went on" if cycle.status is None else f"status {cycle.status}: {cycle.cause[:140]}"
    return f"{cycle.fault:18} {cycle.part:19} after {cycle.after_s:5.1f} s and {cycle.steps} steps: {went}"


def _table(cycles: list[Cycle]) -> str:
    """By fault and part, as a table in Markdown."""
    kinds: dict[tuple[str, str], list[Cycle]] = defaultdict(list)
    for cycle in cycles:
        kinds[cycle.part, cycle.fault].append(cycle)
    lines = [
        "| part | fault | cycles | went on | ended, status | recovery, median (longest) |",
        "|---|---|---|---|---|---|",
    ]
    for (part, fault), same in sorted(kinds.items()):
        ended = sorted({cycle.status for cycle in same if cycle.status is not None})
        count = sum(cycle.status is not None for cycle in same)
        told = f"{count}, {', '.join(map(str, ended))}" if ended else "0"
        times = [cycle.recovery_s for cycle in same if cycle.recovery_s is not None]
        recovery = f"{median(times):.1f} s ({max(times):.1f} s)" if times else ""
        lines.append(f"| {part} | {fault} | {len(same)} | {len(same) - count} | {told} | {recovery} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
