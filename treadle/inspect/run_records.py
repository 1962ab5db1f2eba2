"""Run records: the trajectories, steps, validations and metrics of a run directory, read back for people and programs.

The one place that finds them: `treadle show`, `treadle metrics`, `treadle export` and a `Run` of the Python interface
read through it. `RunRecords(run_dir)` opens the journal for each question and closes it again, so it may be asked while
the run goes on, and from any thread. Imports no torch and changes nothing.

    records = RunRecords(Path("runs/treadle/calculator"))
    records.select(step=40, order="worst", limit=3)       # trajectories that step 40 trained on
    records.select(step=40, validation=True)              # trajectories of the validation after step 40
    records.metrics()["reward/mean"]                      # [(1, 0.47), (2, 0.50), …]
    print(describe_trajectory(records.select()[0]))       # from `transcript`: as `treadle show` prints it

Invariant: a step or validation that a crash or resume undid is not shown; what counts is what the run went on from.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from treadle.config import Config, load
from treadle.errors import ConfigError, Mistake, RunError, nearest
from treadle.journal import Filter, Headline, JournalReader
from treadle.journal.schema import FILE_NAME
from treadle.types import Status, Task, Trajectory

Curve = list[tuple[int, float]]
"""A metric over training steps."""

Order = Literal["written", "worst", "best"]

_VALIDATION = re.compile(r"validation-(\d+)/(.*)", re.DOTALL)
_SAMPLE = re.compile(r"(.*)/(\d+)", re.DOTALL)


class RolloutPurpose(StrEnum):
    """Purpose of a trajectory."""

    TRAINING = "training"
    VALIDATION = "validation"
    ROLLOUT = "rollout"
    """Of a rollout that stands alone, or sampled for training and never trained on."""


@dataclass(frozen=True, slots=True)
class RecordedTrajectory:
    """A trajectory as a run recorded it, with the step it belongs to."""

    purpose: RolloutPurpose
    step: int | None
    """The step that trained on it, or after which it was a validation; None where neither holds."""
    headline: Headline
    trajectory: Trajectory
    """Without rows and messages where the journal dropped them for its size (`headline.has_body`)."""
    ground_truth: Any = None
    """What the task's row says the answer is, where the journal has the task."""

    @property
    def name(self) -> str:
        """uid and sample, as `treadle show` takes them."""
        return f"{self.headline.uid}/{self.headline.sample}"

    @property
    def reward(self) -> float | None:
        return None if self.headline.reward is None else self.headline.reward.value


@dataclass(frozen=True, slots=True)
class FoundTrajectory:
    """The headline of a trajectory, with its place in the run."""

    headline: Headline
    purpose: RolloutPurpose
    step: int | None

    @property
    def reward(self) -> float | None:
        return None if self.headline.reward is None else self.headline.reward.value


@dataclass(slots=True)
class _Steps:
    """What each training step in force was trained on: (uid, sample, attempt)."""

    trained: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)

    def step_of(self) -> dict[tuple[str, int, int], int]:
        return {sample: step for step, samples in self.trained.items() for sample in samples}


class RunRecords:
    """Everything a run directory holds about trajectories and metrics (see the module).

    >>> import treadle
    >>> from treadle.inspect.run_records import RunRecords
    >>> sums = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2+4=", "answer": "6"}]
    >>> run = treadle.train(model="treadle/tiny-calculator", tasks=sums, reward="number_match", steps=1,
    ...                     rollout={"n": 2, "response_length": 32}, logging={"logger": []})
    >>> records = RunRecords(run.run_dir)
    >>> records.steps(), len(records.find(step=1)), len(records.metrics()["reward/mean"])
    ((1,), 4, 1)
    >>> rewards = [found.reward for found in records.select(step=1, order="worst")]
    >>> rewards == sorted(rewards)
    True
    """

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir / FILE_NAME).is_file():
            raise ConfigError([Mistake(str(run_dir), _explain_missing(run_dir), fix=_suggest_run(run_dir))])
        self.run_dir = run_dir

    @cached_property
    def config(self) -> Config:
        """The resolved config of the newest start."""
        path = self.run_dir / "config.yaml"
        if not path.is_file():
            raise RunError(f"{self.run_dir} has no config.yaml: the run was not started by treadle train or rollout")
        return load(path)

    def steps(self) -> tuple[int, ...]:
        """Training steps that are recorded, in order."""
        with JournalReader.open(self.run_dir) as reader:
            return tuple(sorted(_read_steps(reader).trained))

    def validations(self) -> tuple[int, ...]:
        """Steps after which a validation ended, in order."""
        return tuple(step for step, _ in self.metrics().get("validation/success", ()))

    def metrics(self) -> dict[str, Curve]:
        """Every metric by name, as (step, value) in the order of the steps."""
        curves: dict[str, dict[int, float]] = {}
        with JournalReader.open(self.run_dir) as reader:
            after = 0
            while page := reader.metrics(after):
                for measured in page:
                    for name, value in measured.values.items():
                        curves.setdefault(name, {})[measured.step] = float(value)
                after = page[-1].id
        return {name: sorted(values.items()) for name, values in sorted(curves.items())}

    def find(
        self,
        step: int | None = None,
        uid: str | None = None,
        *,
        validation: bool = False,
        failed: bool = False,
        order: Order = "written",
    ) -> list[FoundTrajectory]:
        """Trajectories of a training step, of the validation after it, or of a task, without their messages.

        Without step and uid: those of the newest step or validation; of a rollout that stands alone, all. `uid` may be
        `UID/SAMPLE` for one sample, and a task's own name finds it in every validation. With `failed`, only those that
        failed, over the whole run unless a step or task is named, attempts that were repeated included. Ordered as they
        were written, or by reward; what has no reward comes last.
        """
        with JournalReader.open(self.run_dir) as reader:
            if step is None and uid is None and (validation or not failed):
                step, validation = self._newest(reader, validation)
            found = list(self._search(reader, step, uid, validation, failed))
        if order == "written":
            return found
        sign = 1 if order == "worst" else -1
        scored = [item for item in found if item.reward is not None]
        return sorted(scored, key=lambda item: sign * (item.reward or 0.0)) + [
            item for item in found if item.reward is None
        ]

    def load(self, found: Sequence[FoundTrajectory]) -> list[RecordedTrajectory]:
        """The whole of trajectories that `find` found."""
        with JournalReader.open(self.run_dir) as reader:
            return [load_recorded(reader, item) for item in found]

    def select(
        self,
        step: int | None = None,
        uid: str | None = None,
        *,
        validation: bool = False,
        failed: bool = False,
        order: Order = "written",
        limit: int | None = None,
    ) -> list[RecordedTrajectory]:
        """The first `limit` of what `find` finds, whole."""
        return self.load(self.find(step, uid, validation=validation, failed=failed, order=order)[:limit])

    def _newest(self, reader: JournalReader, validation: bool) -> tuple[int | None, bool]:
        """The newest step of training, or of validation where that is asked for or all there is; None for a rollout."""
        trained = _read_steps(reader).trained
        if trained and not validation:
            return max(trained), False
        newest = max(self.validations(), default=None)
        if validation and newest is None:
            raise RunError(f"{self.run_dir} has no validation: none ended yet, or data.val_files is empty")
        return newest, newest is not None

    def _search(
        self, reader: JournalReader, step: int | None, uid: str | None, validation: bool, failed: bool
    ) -> Iterator[FoundTrajectory]:
        steps = _read_steps(reader)
        places = steps.step_of()
        if uid is not None:
            headlines = self._of_task(reader, uid, failed)
        elif step is not None and validation:
            headlines = list(reader.headlines(Filter(uid_prefix=f"validation-{step}/", superseded=failed)))
        elif step is not None:
            headlines = list(_of_step(reader, steps.trained.get(step, ())))
        else:
            status = Status.FAILED if failed else None
            headlines = list(reader.headlines(Filter(superseded=failed, status=status)))
        for headline in headlines:
            if failed and headline.outcome.status is not Status.FAILED:
                continue
            yield _place(headline, places)

    def _of_task(self, reader: JournalReader, uid: str, superseded: bool) -> list[Headline]:
        """Trajectories of a task: by its uid, with a sample, or in validations by the name it has in its file."""
        split = _SAMPLE.fullmatch(uid)
        names: list[tuple[str, int | None]] = [(uid, None)]
        if split is not None:
            names.append((split[1], int(split[2])))
        for name, sample in names:
            found = list(reader.headlines(Filter(uid=name, superseded=superseded)))
            for step in () if found else self.validations():
                found += reader.headlines(Filter(uid=f"validation-{step}/{name}", superseded=superseded))
            if chosen := [item for item in found if sample in (None, item.sample)]:
                return chosen
        return []


def task_name(uid: str) -> str:
    """The name of a task without the validation it was sampled in."""
    found = _VALIDATION.fullmatch(uid)
    return uid if found is None else found[2]


def is_run(run_dir: Path) -> bool:
    """Whether a directory is the run directory of a run."""
    return (run_dir / FILE_NAME).is_file()


def validated_after(uid: str) -> int | None:
    """The step after which a task was sampled for a validation; None where it was not."""
    found = _VALIDATION.fullmatch(uid)
    return None if found is None else int(found[1])


def _read_steps(reader: JournalReader) -> _Steps:
    """The steps in force: a resume undoes those after the one it went on from."""
    steps = _Steps()
    for event in reader.iter_events():
        if not event.is_intact:
            continue
        if event.kind == "resume":
            steps.trained = {step: done for step, done in steps.trained.items() if step <= event.fields["step"]}
        elif event.kind == "step":
            steps.trained[event.fields["step"]] = [
                (uid, sample, attempt) for uid, samples in event.fields["groups"] for sample, attempt in samples
            ]
    return steps


def _of_step(reader: JournalReader, trained: Sequence[tuple[str, int, int]]) -> Iterator[Headline]:
    """Headlines of what a step trained on, in the order of the batch; of a repeated attempt, the newest."""
    by_name: dict[tuple[str, int, int], Headline] = {}
    for uid in dict.fromkeys(uid for uid, _, _ in trained):
        for headline in reader.headlines(Filter(uid=uid, superseded=True)):
            by_name[uid, headline.sample, headline.attempt] = headline
    yield from (by_name[name] for name in trained if name in by_name)


def _place(headline: Headline, places: dict[tuple[str, int, int], int]) -> FoundTrajectory:
    validated = validated_after(headline.uid)
    if validated is not None:
        return FoundTrajectory(headline, RolloutPurpose.VALIDATION, validated)
    step = places.get((headline.uid, headline.sample, headline.attempt))
    return FoundTrajectory(headline, RolloutPurpose.ROLLOUT if step is None else RolloutPurpose.TRAINING, step)


def load_recorded(reader: JournalReader, found: FoundTrajectory) -> RecordedTrajectory:
    """The whole of a trajectory, with its ground truth."""
    headline = found.headline
    entry = reader.trajectory(headline.uid, headline.sample, headline.attempt)
    assert entry is not None, "its headline was read a moment ago"
    task = _task_of(reader, headline.uid)
    whole = replace(headline, is_intact=entry.headline.is_intact, has_body=entry.headline.has_body)
    truth = None if task is None else task.ground_truth
    return RecordedTrajectory(found.purpose, found.step, whole, entry.trajectory, truth)


def _task_of(reader: JournalReader, uid: str) -> Task | None:
    return reader.task(uid) or reader.task(task_name(uid))


def _explain_missing(run_dir: Path) -> str:
    if not run_dir.exists():
        return "there is no such directory"
    return f"is no run directory: it has no {FILE_NAME}"


def _suggest_run(run_dir: Path) -> str:
    """The nearest run directory to one that is none, or how to find one."""
    if around := [parent for parent in run_dir.parents if (parent / FILE_NAME).is_file()]:
        return f"the run is {around[0]}"
    below = sorted(str(path.parent) for path in run_dir.glob(f"*/{FILE_NAME}")) if run_dir.is_dir() else []
    if below:
        return f"it holds runs: {', '.join(below[:5])}"
    beside = [path.parent for path in run_dir.parent.glob(f"*/{FILE_NAME}")] if run_dir.parent.is_dir() else []
    usual = newest_runs()
    if named := [run for run in usual if run.name == run_dir.name]:
        return f"did you mean {str(named[0])!r}?"
    near = nearest(str(run_dir), [str(run) for run in (*beside, *usual)])
    if near or not usual:
        return near or "give the directory that the last lines of the run name (logging.run_dir)"
    return f"runs here, the newest first: {', '.join(str(run) for run in usual[:5])}"


def newest_runs() -> list[Path]:
    """Run directories below `runs/` of the working directory, the one that was written to last first."""
    found = [path for depth in ("*", "*/*") for path in Path("runs").glob(f"{depth}/{FILE_NAME}")]
    return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]
