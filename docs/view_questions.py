"""Figures of docs/view.md, "Three questions": `python docs/view_questions.py SUCCESS GAMED STALE [--since STEP]`.

On the page's runs; the first question is about the validations from STEP (20) on. Prints what the page says of each
run, by the same functions that the viewer asks.
"""

import argparse
from collections import Counter
from itertools import compress, groupby, pairwise
from pathlib import Path

from treadle.inspect.findings import scan_run
from treadle.inspect.gaps import largest_gap
from treadle.inspect.run_records import RecordedTrajectory, RunRecords
from treadle.journal import JournalReader
from treadle.journal.codec import unpack_ints


def explain_success(run_dir: Path, since: int) -> None:
    """Why did success stand, and what ended it: how each wrong answer of the validations from a step on came about."""
    records = RunRecords(run_dir)
    metrics = records.metrics()
    print("validation/success:", ", ".join(f"{value:.2f}" for _, value in metrics["validation/success"]))
    validations = [step for step in records.validations() if step >= since]
    before: set[str] = set()
    for step in validations:
        found = records.select(step, validation=True)
        wrong = [item for item in found if not item.reward]
        names = {item.headline.uid.partition("/")[2] for item in wrong}
        again = f", {len(names & before)} of them also last time" if before else ""
        print(f"after step {step}: {len(wrong)} of {len(found)} wrong{again}: {dict(Counter(map(_cause, wrong)))}")
        before = names
    for first, last in pairwise([0, *records.validations()]):
        if last > first:
            _explain_training(records, range(first + 1, last + 1))


def _explain_training(records: RunRecords, steps: range) -> None:
    """How much was wrong in training, and how many groups taught anything."""
    groups = [
        [item.reward or 0.0 for item in found]
        for step in steps
        for _, found in groupby(records.find(step), key=lambda item: item.headline.uid)
    ]
    rewards = [reward for group in groups for reward in group]
    wrong, taught = sum(not reward for reward in rewards), sum(min(group) < max(group) for group in groups)
    print(
        f"steps {steps[0]} to {steps[-1]}: {wrong:,} of {len(rewards):,} samples wrong, "
        f"{taught} of {len(groups)} groups with signal"
    )


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


def explain_guesses(run_dir: Path) -> None:
    """Samples that were right without the tool."""
    records = RunRecords(run_dir)
    found = [item for step in records.steps() for item in records.find(step)]
    guessed = [item for item in found if item.headline.num_turns == 1 and (item.reward or 0) >= 1]
    print(f"training samples that were right in one turn: {len(guessed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("success", "gamed", "stale"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--since", type=int, default=20, metavar="STEP")
    given = parser.parse_args()
    print(f"{given.success}")
    explain_success(given.success, given.since)
    explain_guesses(given.success)
    explain_gaps(given.success)
    print(f"\n{given.gamed}")
    explain_gaming(given.gamed)
    print(f"\n{given.stale}")
    explain_gaps(given.stale)


if __name__ == "__main__":
    main()
