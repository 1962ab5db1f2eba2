"""Hostile model outputs through tool-call parsers, the renderer, built-in rewards and the terminal.

    PYTHONPATH=. python bench/hostile_text.py --count 1000000 --seed 0 --jobs 16
    PYTHONPATH=. python bench/hostile_text.py --count 1000000 --seed 1 --jobs 16 --minutes 8 --out results

Counts what breaks (an exception, a control token from text, an escape sequence that would be printed) and says how long
the slowest text took, in one table for all jobs. Ends with status 1 if anything broke. Targets whose package is not
installed are left out, and named. With `--minutes` it ends then, and says how many texts that were; another seed makes
other texts. `--out` is a folder: the table is appended to `hostile_text.jsonl` there, and `--table` adds such files up.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from tests.hostile import TARGETS, Report, attack, missing_targets


def main() -> int:
    arguments = _parse()
    if arguments.table:
        return _show(_read(arguments.table))
    ends = time.time() + 60 * arguments.minutes
    missing = missing_targets(arguments.targets)
    for name, problem in missing.items():
        print(f"left out: {name}: {problem}", flush=True)
    share, more = divmod(arguments.count, arguments.jobs)
    counts = [share + (number < more) for number in range(arguments.jobs)]
    seeds = [arguments.seed * 1000 + number for number in range(arguments.jobs)]
    targets = tuple(name for name in arguments.targets if name not in missing)
    total = Report()
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(attack, counts, seeds, repeat(targets), repeat(ends)):
            total.add(report)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        with (arguments.out / "hostile_text.jsonl").open("a") as file:
            file.write(json.dumps({"seed": arguments.seed, "left_out": missing, **vars(total)}) + "\n")
    return _show(total)


def _show(total: Report) -> int:
    print("\n".join(total.lines()))
    return 1 if total.broken or not total.texts else 0


def _read(files: Iterable[Path]) -> Report:
    """All reports of these files as one."""
    total = Report()
    for file in files:
        for line in file.read_text().splitlines():
            found = json.loads(line)
            slowest = {name: (took, length) for name, (took, length) in found["slowest"].items()}
            ended, seconds = Counter(found["ended"]), Counter(found["seconds"])
            total.add(Report(found["texts"], found["characters"], found["broken"], ended, slowest, seconds))
    return total


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the texts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after these, with fewer texts")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS], default=[*TARGETS])
    parser.add_argument("--out", type=Path, help="folder of hostile_text.jsonl")
    parser.add_argument("--table", type=Path, nargs="+", metavar="JSONL", help="attack nothing: add these up")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
