"""Run pages: what the viewer shows of one run, read from its journal page by page in SQL.

Owns what is asked of the journal and the size of every page: runs, steps, groups, samples, one trajectory, counts,
metrics, waits. A run is never in memory: what is kept between two questions are its metrics, one entry for each step,
and the step of each task. Every question opens a read-only connection of its own and closes it, so no snapshot outlives
an answer and the writer's log can always be folded back into the file. Imports no torch.
Invariant: answers are plain JSON values; a step that a resume undid is not shown; a number of rows in an answer is
bounded by the page, whatever the size of the run.
"""

import json
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from treadle.errors import RunError
from treadle.inspect.gaps import TokenGap
from treadle.journal import Headline, RunStatus, schema
from treadle.journal.codec import read_headline
from treadle.journal.run_directory import CONFIG_FILE, DIED, RUN_FILE, read_owner, read_starts
from treadle.view.queries import COLUMNS, HAS_BODY, Json, RunQuery, finite, sample_line, task_name, validation_of

TIMELINE = "timeline.svg"
"""As `treadle.inspect.timeline` names it; read without what draws it."""
GROUPS = 40
"""Groups on a page."""
SAMPLES = 100
"""Trajectories on a page of a list."""
STEPS = 200
POINTS = 500
"""Points of a curve; longer ones are thinned."""
COUNTED = 100_000
"""Trajectories that one answer counts; the next one goes on."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A training step in force."""

    step: int
    event: int
    version: int
    time: float
    num_groups: int


@dataclass(slots=True)
class _Kept:
    """What is kept of a run between two questions, each with the last id it was read through."""

    steps: dict[int, StepEntry] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    """Step by task."""
    events: int = 0
    metric_steps: "array[int]" = field(default_factory=lambda: array("q"))
    curves: dict[str, "array[float]"] = field(default_factory=dict)
    """By name; NaN where a measurement lacks it."""
    last_metric: tuple[int, float] = (0, 0.0)
    counts: dict[tuple[str, str, str | None], int] = field(default_factory=dict)
    counted: int = 0


class RunPages:
    """The pages of one run (see the module). May be asked from any thread."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.name = name
        self.run_dir = run_dir
        self._path = run_dir / schema.FILE_NAME
        self._kept = _Kept()
        self._lock = threading.Lock()

    @contextmanager
    def query(self, gaps: Mapping[int, TokenGap] | None = None) -> Iterator[RunQuery]:
        """A connection for one answer; with `gaps`, `gap_of(id)` in its SQL is the largest of a trajectory."""
        connection = schema.connect_reader(self._path)
        if gaps is not None:
            connection.create_function("gap_of", 1, lambda id: abs(gaps[id].gap) if id in gaps else None)
        try:
            yield RunQuery(connection, self._path)
        finally:
            connection.close()

    def pulse(self) -> Json:
        """What changes when anything was written: cheap, for a screen that watches a live run."""
        with self.query() as query:
            last = {
                table: query.one(f"SELECT ifnull(max(id), 0) FROM {table}")[0]
                for table in ("trajectories", "events", "metrics")
            }
            start = query.one("SELECT max(start) FROM (SELECT start FROM events ORDER BY id DESC LIMIT 1)")[0]
        return {**last, "start": start, "status": self._status()[0]}

    def overview(self) -> Json:
        """How the run stands, what it did so far, and what was notable."""
        status, cause = self._status()
        starts = [
            {"at": start.started_at, "ended": start.ended_at, "status": start.status, "cause": start.cause}
            for start in read_starts(self.run_dir)
        ]
        if starts:
            starts[-1] |= {"status": status, "cause": cause}
        with self.query() as query:
            steps = self._steps(query)
            trained = [entry.step for entry in steps.values()]
            return {
                "name": self.name,
                "dir": str(self.run_dir),
                "status": status,
                "cause": cause,
                "starts": starts,
                "steps": [min(trained), max(trained)] if trained else [],
                "validations": self._validations(query),
                "trajectories": _last_id(query),
                "events": query.notable(),
                "sources": [row[0] for row in query.all("SELECT DISTINCT data_source FROM tasks LIMIT 50")],
                "annotated": query.has_annotations(),
            }

    def ends(self) -> Json:
        """How trajectories ended, a part of them more with every answer, and how many were counted."""
        with self.query() as query:
            counted, total = self._count(query)
        with self._lock:
            counts = sorted(self._kept.counts.items(), key=lambda item: -item[1])
        return {
            "trajectories": total,
            "counted": counted,
            "ends": [
                {"status": status, "reason": reason, "boundary": boundary, "count": count}
                for (status, reason, boundary), count in counts
            ],
        }

    def metrics(self, names: Sequence[str] | None = None) -> Json:
        """Names of all metrics with their last value, and the curves of those that are asked for, thinned."""
        with self.query() as query, self._lock:
            self._read_metrics(query)
            kept = self._kept
            chosen = [name for name in names if name in kept.curves] if names is not None else []
            return {
                "names": {name: _last(values) for name, values in sorted(kept.curves.items())},
                "curves": {name: _thin(kept.metric_steps, kept.curves[name]) for name in chosen},
            }

    def steps(self, before: int | None = None) -> Json:
        """A page of steps, the newest first, each with the figures that say how it went."""
        with self.query() as query:
            entries = sorted(self._steps(query).values(), key=lambda entry: -entry.step)
            page = [entry for entry in entries if before is None or entry.step < before][:STEPS]
            measured = query.metrics_of([entry.step for entry in page])
        shown = [
            {
                "step": entry.step,
                "version": entry.version,
                "time": entry.time,
                "groups": entry.num_groups,
                **{short: finite(measured.get(entry.step, {}).get(name)) for short, name in _STEP_FIGURES.items()},
            }
            for entry in page
        ]
        return {"steps": shown, "more": len(page) == STEPS}

    def groups(self, step: int | None = None, validation: int | None = None, after: str = "") -> Json:
        """A page of groups: of a training step, of a validation, or of all tasks; `after` is where the last ended."""
        with self.query() as query:
            if step is not None:
                entry = self._steps(query).get(step)
                if entry is None:
                    raise RunError(f"{self.name} has no training step {step}: see the list of steps")
                named = query.groups_of(entry.event)
                start = int(after) if after.isdecimal() else 0
                page = named[start : start + GROUPS]
                groups = [query.group_line(uid, samples) for uid, samples in page]
                following = str(start + GROUPS) if start + GROUPS < len(named) else None
                return {
                    "groups": groups,
                    "next": following,
                    "total": len(named),
                    "event": entry.event,
                    "around": self._around(step),
                }
            prefix = "" if validation is None else f"validation-{validation}/"
            uids = query.uids(prefix, after, GROUPS)
            groups = [query.group_line(uid, None) for uid in uids]
            return {"groups": groups, "next": uids[-1] if len(uids) == GROUPS else None, "total": None}

    def _around(self, step: int) -> list[int | None]:
        """The steps in force before and after one."""
        steps = self._kept.steps
        before = max((other for other in steps if other < step), default=None)
        return [before, min((other for other in steps if other > step), default=None)]

    def group(self, uid: str, step: int | None = None) -> Json:
        """A group whole: the task, and each of its samples with reward parts, lengths, times and last words."""
        with self.query() as query:
            place = step if step is not None else self.step_of(query, uid)
            entry = self._steps(query).get(place) if place is not None else None
            named = dict(query.groups_of(entry.event)) if entry is not None else {}
            samples = query.samples(uid, named.get(uid))
            if not samples:
                raise RunError(f"{self.name} has no trajectory of a task {uid!r}")
            bare = task_name(uid)
            beside = [
                {**query.first_sample(other), "step": self.step_of(query, other)} for other in query.uids_named(bare)
            ]
            beside = [
                other
                for other in beside
                if other["uid"] != uid and (other["step"], other["validation"]) != (None, None)
            ]
            return {
                "uid": uid,
                "step": place,
                "validation": validation_of(uid),
                "task": query.task(uid) or query.task(bare),
                "samples": [{**sample_line(headline), "said": query.last_words(headline.id)} for headline in samples],
                "elsewhere": sorted(beside, key=_when)[:50],
            }

    def samples(
        self,
        where: str,
        values: Sequence[Any],
        before: int | None,
        order: str = "new",
        gaps: Mapping[int, TokenGap] | None = None,
    ) -> Json:
        """A page of trajectories that a condition in SQL holds for, the newest first, by reward or by gap."""
        ordering = _ORDERS[order]
        offset = 0 if order == "new" else before or 0
        narrowed = f"t.id < {int(before)} AND " if order == "new" and before is not None else ""
        with self.query(gaps) as query:
            found = query.all(
                f"SELECT {COLUMNS}, {HAS_BODY} FROM trajectories t WHERE {narrowed}{where} "
                f"ORDER BY {ordering} LIMIT {SAMPLES} OFFSET {offset}",
                values,
            )
            headlines = [read_headline(stored[:-1], bool(stored[-1])) for stored in found]
            lines = [
                {**sample_line(item), **place}
                for item, place in zip(headlines, self.places(query, headlines), strict=True)
            ]
        if gaps is not None:
            for line in lines:
                own = gaps[line["id"]]
                line["gap"] = {"gap": own.gap, "row": own.row, "position": own.position}
        full = len(lines) == SAMPLES
        following = (headlines[-1].id if order == "new" else offset + SAMPLES) if full else None
        return {"samples": lines, "next": following}

    def ids_of_step(self, step: int) -> list[int]:
        """Trajectories that a step in force trained on."""
        with self.query() as query:
            entry = self._steps(query).get(step)
            if entry is None:
                raise RunError(f"{self.name} has no training step {step}: see the list of steps")
            named = query.groups_of(entry.event)
            return sorted(id for uid, samples in named for id in query.ids_of(uid, samples))

    def step_of(self, query: RunQuery, uid: str) -> int | None:
        """The training step in force that trained on a task; None for validations and what was never trained."""
        self._steps(query)
        return self._kept.places.get(uid)

    def places(self, query: RunQuery, headlines: Sequence[Headline]) -> list[Json]:
        """Steps of trajectories: the one in force that trained on each, and whether it took another in its place.

        A task that was sampled again after a resume, or a sample that was tried again, has trajectories that no step
        in force knows.
        """
        steps = self._steps(query)
        of_task = {item.uid: self._kept.places.get(item.uid) for item in headlines}
        named = {step: dict(query.groups_of(steps[step].event)) for step in set(of_task.values()) if step is not None}
        taken = {uid: query.ids_of(uid, named[step].get(uid, ())) for uid, step in of_task.items() if step is not None}
        return [
            {"step": of_task[item.uid], "replaced": False}
            if item.id in taken.get(item.uid, (item.id,))
            else {"step": None, "replaced": True}
            for item in headlines
        ]

    def config(self) -> list[Json]:
        """Every key of the run's config with its value and its origin, in the order of the file."""
        path = self.run_dir / CONFIG_FILE
        try:
            return list(_read_config(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise RunError(f"{self.run_dir} has no {CONFIG_FILE}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error

    def waits(self) -> Json:
        """Seconds of a step by kind of span, on average over all steps: what does not happen in a step counts as 0."""
        with self.query() as query, self._lock:
            self._read_metrics(query)
            kept = self._kept
            names = [name for name in kept.curves if name.startswith("seconds/")]
            measured = {name[8:]: dict(_points(kept.metric_steps, kept.curves[name])) for name in names}
        steps = {step for values in measured.values() for step in values if step > 0}
        means = {name: sum(values.values()) / max(len(steps), 1) for name, values in measured.items()}
        return {"spans": means, "steps": len(steps)}

    def drawn_timeline(self) -> bytes | None:
        """The picture that the newest start drew as it ended; None while it goes on, or where it drew none."""
        path, starts = self.run_dir / TIMELINE, read_starts(self.run_dir)
        try:
            is_last = bool(starts) and path.stat().st_mtime >= starts[-1].started_at
            return path.read_bytes() if is_last and self._status()[0] != "running" else None
        except OSError:
            return None

    def _status(self) -> tuple[str, str | None]:
        """As `run.json` says; a run whose process is gone cannot say that it crashed: the owner of its lock tells."""
        try:
            found = json.loads((self.run_dir / RUN_FILE).read_text(encoding="utf-8"))
            status, cause = str(found.get("status", "unknown")), found.get("cause")
        except (OSError, ValueError, AttributeError):
            return "unknown", None
        owner = read_owner(self.run_dir) if status == RunStatus.RUNNING else None
        return (RunStatus.CRASHED, DIED) if owner is not None and not owner.may_be_alive else (status, cause)

    def _validations(self, query: RunQuery) -> list[int]:
        with self._lock:
            self._read_metrics(query)
            values = self._kept.curves.get("validation/success", ())
            pairs = zip(self._kept.metric_steps, values, strict=False)
            return sorted({step for step, value in pairs if isfinite(value)})

    def _steps(self, query: RunQuery) -> dict[int, StepEntry]:
        """The steps in force; reads what was written since the last call."""
        with self._lock:
            kept = self._kept
            while found := query.step_events(kept.events):
                for id, kind, time, step, version, num_groups in found:
                    kept.events = id
                    if kind == "resume" and step is not None:
                        kept.steps = {at: entry for at, entry in kept.steps.items() if at <= step}
                        kept.places = {uid: at for uid, at in kept.places.items() if at <= step}
                    elif kind == "step" and step is not None:
                        kept.steps[step] = StepEntry(step, id, version or 0, time, num_groups or 0)
                        kept.places |= dict.fromkeys((uid for uid, _ in query.groups_of(id)), step)
            return kept.steps

    def _read_metrics(self, query: RunQuery) -> None:
        kept = self._kept
        id, time = kept.last_metric
        if id and not query.all("SELECT 1 FROM metrics WHERE id = ? AND time = ?", (id, time)):
            kept.metric_steps, kept.curves, kept.last_metric = array("q"), {}, (0, 0.0)  # a resume took some away
        while found := query.metrics_after(kept.last_metric[0]):
            for id, time, step, items in found:
                at = len(kept.metric_steps)
                kept.metric_steps.append(step)
                for name, value in items.items():
                    curve = kept.curves.get(name)
                    if curve is None:
                        curve = kept.curves[name] = array("d")
                    curve.extend([float("nan")] * (at - len(curve)))
                    curve.append(float(value))
                kept.last_metric = (id, time)

    def _count(self, query: RunQuery) -> tuple[int, int]:
        """Count how trajectories ended, a bounded number of them; (counted so far, all)."""
        total = _last_id(query)
        with self._lock:
            kept = self._kept
            through = min(total, kept.counted + COUNTED)
            for status, reason, boundary, count in query.all(
                "SELECT status, reason, boundary, count(*) FROM trajectories WHERE id > ? AND id <= ? GROUP BY 1, 2, 3",
                (kept.counted, through),
            ):
                key = (status, reason, boundary)
                kept.counts[key] = kept.counts.get(key, 0) + count
            kept.counted = through
        return through, total


_ORDERS = {
    "new": "t.id DESC",
    "worst": "t.reward IS NULL, t.reward, t.id",
    "best": "t.reward DESC, t.id",
    "gap": "gap_of(t.id) DESC, t.id",
}
_STEP_FIGURES = {
    "reward": "reward/mean",
    "spread": "reward/std",
    "length": "response_length/mean",
    "no_signal": "batch/no_signal",
    "failed": "batch/failed",
    "truncated": "rollout/truncated",
    "staleness": "staleness/max",
    "loss": "sft/loss",
    "validation": "validation/success",
    "validation_loss": "validation/loss",
    "train_s": "seconds/train",
    "rollout_s": "seconds/rollout",
}
"""Columns of the list of steps, and the metrics behind them."""


def _last_id(query: RunQuery) -> int:
    """How many trajectories there are: they are numbered from 1, and kept for good."""
    return int(query.one("SELECT ifnull(max(id), 0) FROM trajectories")[0])


def _when(place: Json) -> tuple[int, bool]:
    """Steps in order; a validation after a step comes behind it."""
    return (place["validation"], True) if place["step"] is None else (place["step"], False)


def _last(values: Sequence[float]) -> float | None:
    return next((value for value in reversed(values) if isfinite(value)), None)


def _thin(steps: Sequence[int], values: Sequence[float], limit: int = POINTS) -> list[tuple[int, float]]:
    """The finite points of a curve, in the order of steps; every k-th where there are many, and the last."""
    points = _points(steps, values)
    stride = -(-len(points) // limit)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def _points(steps: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    return sorted({step: value for step, value in zip(steps, values, strict=False) if isfinite(value)}.items())


def _read_config(text: str) -> Iterator[Json]:
    """Keys of a resolved config: one a line, nested by indentation, each with its origin after `  # `."""
    path: list[str] = []
    for line in text.splitlines():
        bare = line.lstrip(" ")
        name, colon, rest = bare.partition(":")
        if not colon or bare.startswith(("#", "- ")):
            continue
        depth = (len(line) - len(bare)) // 2
        path = [*path[:depth], name]
        value, mark, origin = rest.strip().rpartition("  # ")
        if mark or rest.strip():
            yield {"key": ".".join(path), "value": value if mark else rest.strip(), "origin": origin if mark else ""}
