"""A training run that is killed again and again, and proven whole at the end.

    PYTHONPATH=. python bench/chaos.py --cycles 50 --seed 0

Each cycle starts `treadle train calculator` in fully_async, kills a random part of it (the driver, an engine, that of
validation, an agent worker, a reward worker) at a random moment with SIGKILL, and checks that nothing is left running.
After the last one `treadle audit` must find no task skipped and none trained twice, and `treadle replay` the weights of
every step again.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.chaos import Cycle, command, finish, run_cycle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, help="where to keep the run; a temporary directory unless given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return _torment(arguments.run_dir or Path(scratch) / "run", arguments.cycles, Random(arguments.seed))


def _torment(run_dir: Path, cycles: int, rng: Random) -> int:
    began, done = time.monotonic(), []
    for number in range(1, cycles + 1):
        done.append(run_cycle(run_dir, rng))
        print(f"{number:3}  {_describe(done[-1])}", flush=True)
    status = finish(run_dir)
    print(f"the last start was interrupted after 3 steps: status {status}")
    audited, replayed = command("audit", run_dir), command("replay", run_dir)
    print(audited.stdout.strip())
    print(f"replay: {replayed.stdout.count('the same weights')} steps give the same weights; {replayed.stderr.strip()}")
    killed = ", ".join(f"{count} × {part}" for part, count in Counter(cycle.part for cycle in done).most_common())
    print(f"{cycles} cycles in {time.monotonic() - began:.0f} s; killed: {killed}")
    return 1 if status != 130 or audited.returncode or replayed.returncode else 0


def _describe(cycle: Cycle) -> str:
    end = "killed" if cycle.status is None else f"ended with status {cycle.status}: {cycle.cause[:160]}"
    if cycle.status is None and cycle.part != "driver":
        end = "the run went on, and was killed later"
    return f"{cycle.part:13} after {cycle.after_s:5.1f} s and {cycle.steps} steps: {end}"


if __name__ == "__main__":
    sys.exit(main())
