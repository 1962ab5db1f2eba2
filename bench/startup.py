"""How fast the command answers: `treadle --help` and `treadle config check calculator` against `python -c pass`; and
`import treadle`.

    python bench/startup.py [--runs 20]

The bound is 3 × `python -c pass` + 150 ms, from the same run: the three are timed in turns, so that a busy machine
slows all of them alike. Prints the fastest, the median and the least CPU time of each, its share of the bound, and
whether torch was imported. `import treadle` has a bound of its own: `python -c pass` + 100 ms.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TREADLE = str(Path(sys.executable).with_name("treadle"))
BARE = (sys.executable, "-c", "pass")
COMMANDS = {
    "python -c pass": BARE,
    "python -c 'import treadle'": (sys.executable, "-c", "import treadle"),
    "treadle --help": (TREADLE, "--help"),
    "treadle config check calculator": (TREADLE, "config", "check", "calculator"),
}
EXTRA_S = 0.150
IMPORT_EXTRA_S = 0.100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="how often each is started")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as cache:
        times, cpu_times = measure(runs, with_bytecode_in(cache))
    print(f"{'':34} {'fastest':>9} {'median':>9} {'least CPU':>9} {'of the bound':>24}")
    bare_s = times["python -c pass"]
    for name, found in times.items():
        factor, extra_s = (1, IMPORT_EXTRA_S) if "import" in name else (3, EXTRA_S)
        shares = [pick(found) / (factor * pick(bare_s) + extra_s) for pick in (min, statistics.median)]
        share = f"{shares[0]:10.2f} and {shares[1]:.2f}" if found is not bare_s else ""
        told = "".join(
            f" {value * 1000:6.1f} ms" for value in (min(found), statistics.median(found), min(cpu_times[name]))
        )
        print(f"{name:34}{told} {share:>24}")
    bounds = [3 * pick(bare_s) + EXTRA_S for pick in (min, statistics.median)]
    print(f"{'bound: 3 × pass + 150 ms':34} {bounds[0] * 1000:6.1f} ms {bounds[1] * 1000:6.1f} ms")
    print("torch imported:", "yes" if imports_torch() else "no")


def measure(runs: int, environment: dict[str, str]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and CPU seconds of each start, taken in turns after one start each to warm the caches."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    cpu_times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(runs + 1):
        for name, command in COMMANDS.items():
            started, cpu_started = time.perf_counter(), cpu_of_children()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            if turn:
                times[name].append(time.perf_counter() - started)
                cpu_times[name].append(cpu_of_children() - cpu_started)
    return times, cpu_times


def cpu_of_children() -> float:
    """CPU seconds of the processes that were started and have ended: on a busy machine, what a start itself costs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def with_bytecode_in(cache: str) -> dict[str, str]:
    """An environment in which Python keeps compiled code, as it does for a user."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": cache}


def imports_torch() -> bool:
    """Whether checking a config imports torch."""
    code = """
import sys
from treadle.cli.main import main
try:
    main(["config", "check", "calculator"])
except SystemExit:
    sys.exit(3 if "torch" in sys.modules else 0)
"""
    return subprocess.run((sys.executable, "-c", code), stdout=subprocess.DEVNULL).returncode != 0


if __name__ == "__main__":
    main()
