"""Hostile model outputs through tool-call parsers, the renderer, built-in rewards and the terminal.

    PYTHONPATH=. python bench/hostile_text.py --count 1000000 --seed 0 --processes 2

Counts what breaks (an exception, a control token from text, an escape sequence that would be printed) and says how long
the slowest text took. Ends with status 1 if anything did.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from tests.hostile import Report, attack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    share = -(-arguments.count // arguments.processes)
    seeds = [arguments.seed * 1000 + number for number in range(arguments.processes)]
    with ProcessPoolExecutor(arguments.processes) as pool:
        reports = list(pool.map(attack, repeat(share), seeds))
    total = Report()
    for report in reports:
        total.texts += report.texts
        total.characters += report.characters
        total.broken += report.broken
        total.seconds.update(report.seconds)
        for name, slowest in report.slowest.items():
            total.slowest[name] = max(total.slowest.get(name, (0.0, 0)), slowest)
    print("\n".join(total.lines()))
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
