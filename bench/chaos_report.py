"""Records of chaos cycles: a line for each as it is known, and the tables of any number of them."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos import Cycle

Record = dict[str, Any]
NOT_ATTACKED = "a start that was not attacked"


def write_record(
    results: Path, seed: int, number: int, kind: str, cycle: Cycle | None, wrong: str, *, proven: bool
) -> Record:
    """Append what a cycle came to."""
    made = asdict(cycle) if cycle else {}
    record: Record = {"seed": seed, "cycle": number, "kind": kind, "wrong": wrong, "proven": proven, **made}
    with results.open("ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")
    return record


def describe(record: Record) -> str:
    """One line about a cycle."""
    went = "not attacked"
    if "part" in record:
        how = "the run went on" if record["status"] is None else f"status {record['status']}: {record['cause'][:140]}"
        after = f"after {record['after_s']:5.1f} s and {record['steps']} steps"
        went = f"{record['fault']:18} {record['part']:19} {after}: {how}"
    more = "  run replayed" if record["proven"] else f"  WRONG: {record['wrong']}" if record["wrong"] else ""
    return f"{record['cycle']:5}  {record['kind']:12} {went}{more}"


def read_records(results: Path) -> list[Record]:
    """The records of a file; a last line that was cut off is left out."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines(keepends=True) if line.endswith("\n")]


def finished_cycles(results: Path, seed: int) -> set[int]:
    """The cycles of a seed that need not be made again."""
    return {record["cycle"] for record in read_records(results) if record.get("seed", 0) == seed}


def report(records: Sequence[Record], out: Path | None = None, skipped: Mapping[str, str] | None = None) -> int:
    """Print the tables, into a folder too; 1 where anything was lost, repeated or wrong."""
    latest = [*{(record.get("seed", 0), record["cycle"]): record for record in records}.values()]
    wrong = [record for record in latest if record["wrong"] or record.get("problems")]
    lines = [line for key in ("part", "fault") for line in (*_table(latest, key), "")]
    lines.append(f"{sum(record.get('proven', False) for record in latest)} runs were replayed to the same weights.")
    for name, problem in (skipped or {}).items():
        lines.append(f"Left out: runs of the kind {name}: {problem}")
    for record in wrong:
        lines.append(f"cycle {record['cycle']}: {record['wrong']} {'; '.join(record.get('problems', ()))}")
    print("\n".join(lines))
    if out is not None:
        (out / "chaos.md").write_text("\n".join(lines) + "\n")
        summary = {"cycles": len(latest), "wrong": wrong, "left_out": dict(skipped or {})}
        for key in ("part", "fault", "kind"):
            summary[key] = {name: _count(same) for name, same in _groups(latest, key)}
        (out / "chaos.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if wrong or not latest else 0


def _groups(records: Sequence[Record], key: str) -> list[tuple[str, list[Record]]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.get(key, NOT_ATTACKED)].append(record)
    return [*sorted(groups.items()), ("all", list(records))]


def _count(same: Sequence[Record]) -> dict[str, Any]:
    statuses = [record["status"] for record in same if record.get("status") is not None]
    problems = [problem for record in same for problem in record.get("problems", ())]
    lost = sum("lost" in problem or "skipped" in problem for problem in problems)
    times = [record["recovery_s"] for record in same if record.get("recovery_s") is not None]
    return {
        "cycles": len(same),
        "went_on": len(same) - len(statuses),
        "ended": len(statuses),
        "statuses": sorted(set(statuses)),
        "lost": lost,
        "repeated": len(problems) - lost,
        "wrong": sum(bool(record["wrong"]) for record in same),
        "recovery_s": [median(times), max(times)] if times else None,
    }


def _table(records: Sequence[Record], key: str) -> Iterator[str]:
    yield f"| {key} | cycles | went on | ended, status | lost | repeated | ended wrong | recovery, median (longest) |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, same in _groups(records, key):
        found = _count(same)
        ended = f"{found['ended']}: {', '.join(map(str, found['statuses']))}" if found["ended"] else "0"
        times = found["recovery_s"]
        recovery = f"{times[0]:.1f} s ({times[1]:.1f} s)" if times else ""
        counts = f"{found['cycles']} | {found['went_on']} | {ended}"
        yield f"| {name} | {counts} | {found['lost']} | {found['repeated']} | {found['wrong']} | {recovery} |"
