"""The viewer on large runs, and beside a run that writes: seconds of each answer, and what the writer loses by it.

    python bench/view.py [--gb 4] [--directory DIR] [--browser]

Makes a journal of that size (and keeps it in DIR, to be used again), with one trajectory of 100,000 tokens; asks for
every screen from a fresh server, as a browser would; with --browser, a headless Chromium opens screens, from the
navigation to the painted page, and scrolls through all groups.

Then it writes trajectories as fast as the journal takes them, from a process on one core: alone, beside four viewers on
another core, processes that ask for screens twice a second, and beside four processes there that use as much of the
processor and open no journal. What the second rate loses against the third is what the readers cost the writer. The
three take turns, five times; median and spread of the rates, and of the slowest of 20 commits.
"""

import argparse
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser import Browser
from treadle.inspect.findings import RunScan
from treadle.inspect.timeline import TimelineReader
from treadle.inspect.timeline_svg import draw_svg
from treadle.journal import Journal, RowAnnotation
from treadle.types import Outcome, Row, Score, StopReason, Timing, Trajectory, Turn
from treadle.view.difference import RowPlace, compare_rows
from treadle.view.find import Indexes, find
from treadle.view.run_pages import RunPages
from treadle.view.server import SCAN_S, TIMELINE_S, ViewerServer
from treadle.view.trajectory_pages import TrajectoryPages

LONG = 100_000
TOKENS = 2_000
SAMPLES = 8
GROUPS = 32


def make_trajectory(uid: str, sample: int, tokens: int, rng: random.Random) -> Trajectory:
    ids = tuple(rng.choices(range(300), k=tokens))
    row = Row(
        (5, 6, 7), ids, (1,) * tokens, (-0.25,) * tokens, (0,) * tokens, (Turn(0, tokens, tokens, StopReason.STOP),)
    )
    said = " ".join(str(id) for id in ids[:400])
    messages = ({"role": "user", "content": f"task {uid}"}, {"role": "assistant", "content": said})
    score = Score(float(rng.random() < 0.5), {"answer": 1.0})
    timing = Timing(time.time(), 2.0, 1.5, 0.2, 0.1, 0.1)
    return Trajectory(uid, sample, (row,), Outcome.ended(StopReason.STOP), score, messages, timing)


def write_step(journal: Journal, step: int, tokens: int, rng: random.Random) -> None:
    uids = [f"step {step} task {at}" for at in range(GROUPS)]
    for uid in uids:
        for sample in range(SAMPLES):
            journal.add(make_trajectory(uid, sample, tokens, rng))
    groups = [[uid, [[sample, 0] for sample in range(SAMPLES)]] for uid in uids]
    journal.add_event("step", step=step, version=step, groups=groups, positions=[], baselines=None)
    now = time.time()
    journal.add_event("spans", step=step, spans=[["rollout", now - 2, now - 1], ["train", now - 1, now]])
    journal.add_annotations([annotate(uid, tokens, step) for uid in uids[:3]])
    journal.add_metrics(step, {"reward/mean": rng.random(), "response_length/mean": float(tokens)})
    journal.flush_blocking(600)


def annotate(uid: str, tokens: int, step: int) -> RowAnnotation:
    """What a step records of a row, for a tenth of the groups."""
    trainer = struct.pack(f"<{tokens}f", *([-0.25] * (tokens - 1)), -0.3)
    one = struct.pack("<f", 1.0)
    return RowAnnotation(uid, 0, 0, 0, step, trainer, None, None, one, one, one, b"\0")


def make_run(run_dir: Path, num_bytes: float) -> int:
    """Steps until the journal has that size; returns how many."""
    rng, step = random.Random(0), 0
    with Journal.open(run_dir, max_mb=1 << 20, config_yaml="model:\n  path: treadle/tiny-calculator\n") as journal:
        journal.add(make_trajectory("long", 0, LONG, rng))
        while (run_dir / "journal.sqlite").stat().st_size < num_bytes:
            step += 1
            write_step(journal, step, TOKENS, rng)
    return step


def measure(name: str, ask: Callable[[], object]) -> None:
    began, used = time.perf_counter(), time.process_time()
    ask()
    print(f"  {name:44} {time.perf_counter() - began:8.3f} s, {time.process_time() - used:.3f} s of the processor")


def ask_screens(run_dir: Path, step: int) -> None:
    pages = RunPages("run", run_dir)
    shown = TrajectoryPages(pages)
    index = Indexes.of(pages)
    measure("overview (first answer of a fresh viewer)", pages.overview)
    measure("ends (first answer of a fresh viewer)", pages.ends)
    measure("curves", lambda: pages.metrics(["reward/mean"]))
    measure("steps", pages.steps)
    measure("groups of a step", lambda: pages.groups(step=step))
    measure("a group", lambda: pages.group(f"step {step} task 3"))
    measure("a trajectory of 100,000 tokens", lambda: shown.trajectory(1))
    measure("its tokens, a window in the middle", lambda: shown.tokens(1, 0, LONG // 2))
    measure("its strip", lambda: shown.strip(1, 0))
    measure("difference of two trajectories", lambda: compare_rows(RowPlace(shown, 2), RowPlace(shown, 3)))
    measure("findings (first answer; the rest follows)", lambda: RunScan(run_dir).report(SCAN_S))
    measure("timeline of a live run (its newest part)", lambda: draw_svg(TimelineReader(run_dir).read(TIMELINE_S)))
    measure("timeline of a live run (whole)", lambda: draw_svg(TimelineReader(run_dir).read()))
    measure("config", pages.config)
    measure("where the time goes", pages.waits)
    measure("find by policy version", lambda: find(pages, index, {"version": "1"}))
    measure("find by tool", lambda: find(pages, index, {"tool": "none"}))
    measure("find by gap (first part)", lambda: find(pages, index, {"order": "gap"}))
    measure("find by reward", lambda: find(pages, index, {"max_reward": "0"}))
    measure("find by word (newest part of the index)", lambda: find(pages, index, {"q": "299"}))
    index.texts.close()


PAINTED = """new Promise((done) => {
  const isShown = () => document.getElementById("main")?.dataset.shown && !document.querySelector("[aria-busy]");
  const painted = () => requestAnimationFrame(() => setTimeout(() => done(performance.now())));
  const look = () => (isShown() ? painted() : setTimeout(look, 2));
  look();
})"""
"""Milliseconds from the navigation until a screen is shown and painted."""
SCROLLED = """(async () => {
  const list = document.querySelector("main table"), more = document.querySelector("[data-more]");
  const began = performance.now();
  let most = 0;
  for (let pages = 0; pages < list.tBodies.length; ) {
    pages = list.tBodies.length;
    scrollTo(0, document.body.scrollHeight);
    await more.load();
    await new Promise((shown) => requestAnimationFrame(() => setTimeout(shown)));
    most = Math.max(most, document.querySelectorAll("*").length);
  }
  return [list.tBodies.length, performance.now() - began, most];
})()"""
"""A list read to its end: pages, milliseconds, and the most nodes that the page held."""
STEPPED = """(async () => {
  document.querySelector("main tbody:last-child tr").classList.add("at");
  const began = performance.now();
  for (let at = 0; at < 20; at += 1) {
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "k" }));
    await new Promise((shown) => requestAnimationFrame(() => setTimeout(shown)));
  }
  return (performance.now() - began) / 20;
})()"""
"""Milliseconds of a step to the line above, painted."""


@contextmanager
def serving(run_dir: Path) -> Iterator[str]:
    """The address of a fresh viewer."""
    server = ViewerServer({"run": run_dir})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def browse(run_dir: Path) -> None:
    """Screens in a browser, each from a fresh viewer and with nothing kept."""
    screens = {
        "overview": "/run/run",
        "100,000 tokens, a window in the middle": f"/run/run/t/1/tokens?start={LONG // 2}",
        "difference of two trajectories": "/run/run/diff?id=2&other=3",
        "find by word": "/run/run/find?q=299",
        "all groups": "/run/run/tasks",
    }
    with Browser(deadline_s=600) as browser:
        for name, address in screens.items():
            browser.open("about:blank")
            with serving(run_dir) as url:
                browser.navigate(f"{url}#{address}")
                print(f"  browser: {name:35} {browser.evaluate(PAINTED) / 1000:8.3f} s")
                if name == "all groups":
                    pages, spent_ms, nodes = browser.evaluate(SCROLLED)
                    print(f"  browser: {pages} pages of groups scrolled through in {spent_ms / 1000:.1f} s", end=", ")
                    print(f"{nodes} nodes at most; a step to another line {browser.evaluate(STEPPED):.0f} ms")
                browser.open("about:blank")


def write_rate(run_dir: Path, beside: str, core: int, steps: int = 20) -> tuple[float, float]:
    """Trajectories a second into a fresh journal beside four processes of a kind, and its slowest commit."""
    with Journal.open(run_dir, max_mb=1 << 20, config_yaml="model:\n  path: treadle/tiny-calculator\n") as journal:
        write_step(journal, 0, 200, random.Random(0))
        words = {"alone": [], "viewers": ["--watch", str(run_dir)], "others": ["--burn", str(run_dir)]}[beside]
        command = [sys.executable, __file__, *words, "--core", str(core)]
        companions = [subprocess.Popen(command) for _ in range(4 if words else 0)]
        time.sleep(8 if companions else 0)  # until they have started
        began, rng, commits = time.perf_counter(), random.Random(1), list[float]()
        for step in range(1, steps + 1):
            write_step(journal, step, 200, rng)
            flushed = time.perf_counter()
            journal.add_metrics(step, {"reward/mean": 0.0})
            journal.flush_blocking(600)
            commits.append(time.perf_counter() - flushed)
        seconds = time.perf_counter() - began
        for companion in companions:
            companion.kill()
            companion.wait()
    return steps * GROUPS * SAMPLES / seconds, max(commits)


def compare_writers(folder: Path, rounds: int = 5) -> None:
    """The writer alone, beside viewers and beside others, in turns, so that what else the machine does hits all."""
    first, second, *_ = cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "viewers": [], "others": []}
    for number in range(rounds):
        for beside, measured in found.items():
            measured.append(write_rate(folder / f"{beside}-{number}", beside, second))
    os.sched_setaffinity(0, set(cores))
    print(f"  writer on core {first}, companions on core {second}, {rounds} rounds; load {os.getloadavg()[0]:.1f}")
    for beside, measured in found.items():
        rates, slowest = [rate for rate, _ in measured], [seconds * 1000 for _, seconds in measured]
        print(
            f"  writer beside {beside:10} {median(rates):6.0f} trajectories/s ({min(rates):.0f} to {max(rates):.0f}), "
            f"slowest commit {median(slowest):.1f} ms ({min(slowest):.1f} to {max(slowest):.1f})"
        )


def burn() -> None:
    """As much of a processor as `watch` uses, and no journal: its share is measured first on a journal of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary) / "own"
        with Journal.open(run_dir, max_mb=1 << 20, config_yaml="model:\n  path: treadle/tiny-calculator\n") as journal:
            write_step(journal, 0, 200, random.Random(0))
        pages = RunPages("run", run_dir)
        began = time.process_time()
        for _ in range(5):
            ask_once(pages)
        share_s = (time.process_time() - began) / 5
    while True:
        ends = time.process_time() + share_s
        while time.process_time() < ends:
            sum(range(1000))
        time.sleep(0.5)


def ask_once(pages: RunPages) -> None:
    pages.pulse(), pages.overview(), pages.ends(), pages.steps(), pages.groups(step=0), pages.samples("1", (), None)


def watch(run_dir: Path) -> None:
    """As a browser at a live run does, four times as often."""
    pages = RunPages("run", run_dir)
    while True:
        ask_once(pages)
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--browser", action="store_true", help="open screens in a headless Chromium, too")
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--burn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    if given.watch is not None:
        watch(given.watch)
    if given.burn is not None:
        burn()
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = given.directory or Path(temporary) / "large"
        if not (run_dir / "journal.sqlite").is_file():
            make_run(run_dir, given.gb * 1e9)
        size = (run_dir / "journal.sqlite").stat().st_size
        pages = RunPages("run", run_dir)
        last = pages.steps()["steps"][0]["step"]
        print(f"journal of {size / 1e9:.2f} GB, {last} steps")
        ask_screens(run_dir, last)
        if given.browser:
            browse(run_dir)
        if len(os.sched_getaffinity(0)) < 2:
            print("  the writer and its companions need two cores: this machine lends one")
        else:
            compare_writers(Path(temporary))


if __name__ == "__main__":
    main()
