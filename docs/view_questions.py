"""Figures of docs/view.md, "Three questions": `python docs/view_questions.py SUCCESS GAMED STALE` on the page's runs.

Prints what the page says of each run, by the same functions that the viewer asks.
"""

import sys
from collections import Counter
from itertools import compress
from pathlib import Path

from treadle.inspect.findings import scan_run
from treadle.inspect.gaps import largest_gap
from treadle.inspect.run_records import RecordedTrajectory, RunRecords
from treadle.journal import JournalReader
from treadle.journal.codec import unpack_ints


def explain_success(run_dir: Path) -> None:
    """Why did success stop: how each wrong answer of the last validation came about."""
    records = RunRecords(run_dir)
    metrics = records.metrics()
    print("validation/success:", ", ".join(f"{value:.2f}" for _, value in metrics["validation/success"]))
    last = records.validations()[-1]
    found = records.select(last, validation=True)
    wrong = [item for item in found if not item.reward]
    causes = Counter(_cause(item) for item in wrong)
    print(f"after step {last}: {len(wrong)} of {len(found)} wrong: {dict(causes)}")
    quiet = [value for _, value in metrics["batch/no_signal"]][-10:]
    print(f"groups without signal in the last ten steps: {min(quiet):.0f} to {max(quiet):.0f}")
    guessed = [
        item
        for step in records.steps()
        for item in records.find(step)
        if item.headline.num_turns == 1 and (item.reward or 0) >= 1
    ]
    print(f"training samples that were right in one turn: {len(guessed)}")


def _cause(item: RecordedTrajectory) -> str:
    answers = [str(message["content"]) for message in item.trajectory.messages if message["role"] == "tool"]
    if not answers:
        return "no call"
    said = str(item.trajectory.messages[-1]["content"]).rpartition("####")[2].strip()
    return "stopped after the first operation" if said == answers[-1].strip() else "copied wrongly"


def explain_gaming(run_dir: Path) -> None:
    """Which samples are gamed: rewards of form alone, and what each part of the reward did."""
    found, metrics = scan_run(run_dir), RunRecords(run_dir).metrics()
    print(f"format_only: {found.counts.get('format_only', 0)} of {found.trajectories} samples")
    for name in ("reward/mean", "reward/part/answer", "reward/part/format"):
        values = [value for _, value in metrics[name]]
        print(f"{name}: {values[0]:.2f} at first, {values[-1]:.2f} at last")


def explain_gaps(run_dir: Path) -> None:
    """Where sampler and trainer part: the largest gap of a row, by how stale its oldest token is."""
    by_age: dict[int, list[float]] = {}
    with JournalReader.open(run_dir) as reader:
        after = 0
        while rows := reader.annotated_rows(after=after):
            for row in rows:
                gap = largest_gap([row])
                age = row.step - 1 - min(compress(unpack_ints(row.versions), row.mask))
                if gap is not None:
                    by_age.setdefault(age, []).append(abs(gap.gap))
            after = rows[-1].id
    for age, gaps in sorted(by_age.items()):
        print(f"staleness {age}: {len(gaps)} rows, gap {sum(gaps) / len(gaps):.2g} on average, {max(gaps):.2g} at most")


if __name__ == "__main__":
    for explain, word in zip((explain_success, explain_gaming, explain_gaps), sys.argv[1:4], strict=True):
        print(f"\n{word}")
        explain(Path(word))
    print(f"\n{sys.argv[1]}")
    explain_gaps(Path(sys.argv[1]))
