"""Hostile model outputs through tool-call parsers, the renderer, built-in rewards and the terminal.

    PYTHONPATH=. python bench/hostile_text.py --count 1000000 --seed 0 --jobs 16

Counts what breaks (an exception, a control token from text, an escape sequence that would be printed) and says how long
the slowest text took, in one table for all jobs. Ends with status 1 if anything broke.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

from tests.hostile import TARGETS, Report, attack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the texts")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS], default=[*TARGETS])
    arguments = parser.parse_args()
    share, more = divmod(arguments.count, arguments.jobs)
    counts = [share + (number < more) for number in range(arguments.jobs)]
    seeds = [arguments.seed * 1000 + number for number in range(arguments.jobs)]
    total = Report()
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(attack, counts, seeds, repeat(tuple(arguments.targets))):
            total.add(report)
    print("\n".join(total.lines()))
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
