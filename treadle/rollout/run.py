"""A stand-alone rollout from config to summary: what `treadle rollout` does, for use from Python too.

Owns the run directory and the order of things. Reads `model`, `data`, `rollout`, `reward` and `logging`; a trainer
section in the same file is not looked at. A run that was interrupted goes on where it stopped: finished samples are in
the journal and are not drawn again.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.config import Config, to_yaml
from treadle.data.renderer import Renderer
from treadle.data.tasks import load_training_tasks, load_validation_tasks
from treadle.errors import RunError
from treadle.journal import Headline, Journal, JournalReader, RunStatus
from treadle.observe import Finished, Summary, Tally, summarize
from treadle.rollout.manager import CONFIGURED, AgentLoopManager
from treadle.rollout.prompts import survey_prompts
from treadle.rollout.service import Kind, Parts
from treadle.rollout.worker import Dropped
from treadle.terminal import warn
from treadle.types import Task

Progress = Callable[[Tally, int], AbstractContextManager[object]]
"""Shows a tally while it grows towards a total."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run."""

    summary: Summary
    interrupted: bool
    run_dir: Path | None


def hide_progress(tally: Tally, total: int) -> AbstractContextManager[object]:
    """No view at all."""
    return nullcontext()


def run_rollout(
    config: Config,
    *,
    validation: bool = False,
    command: Sequence[str] = (),
    parts: Parts = CONFIGURED,
    progress: Progress = hide_progress,
) -> Result:
    """Roll out every task of the training files, or of the validation files, and keep everything in the run directory.

    `parts` replace or add to what the config would build. Ctrl-C ends it in order: what is finished is kept, and the
    same call goes on from there.
    """
    tasks = list(load_validation_tasks(config.data) if validation else load_training_tasks(config.data))
    renderer = Renderer.create(config.model)  # a mistake in model or tasks leaves no run directory behind
    survey = asyncio.run(survey_prompts(tasks, config.rollout, renderer))
    if note := survey.note(config.rollout):
        warn(f"note: {note}")
    with _open_journal(config, command) as journal:
        run = _Run(config, tasks, journal, validation, replace(parts, renderer=renderer, journal=journal))
        run.recall()
        with progress(run.tally, run.total):
            interrupted = run.roll_out()
        if interrupted and journal is not None:
            journal.close_blocking(RunStatus.INTERRUPTED)
    cut = 0 if config.rollout.overlong_prompts == "drop" else len(survey.overlong)
    return Result(run.summary(num_cut=cut), interrupted, journal.run_dir if journal else None)


@contextmanager
def _open_journal(config: Config, command: Sequence[str]) -> Iterator[Journal | None]:
    logging = config.logging
    if not logging.journal:
        yield None
        return
    resolved = to_yaml(config, origins=True)
    run_dir = Path(logging.directory())
    with Journal.open(run_dir, max_mb=logging.journal_max_mb, config_yaml=resolved, command=command) as journal:
        yield journal


class _Run:
    """One start of a run: what earlier starts finished, and what this one adds."""

    def __init__(
        self, config: Config, tasks: Sequence[Task], journal: Journal | None, validation: bool, parts: Parts
    ) -> None:
        rollout = config.rollout
        self._config = config
        self._tasks = tasks
        self._journal = journal
        self._validation = validation
        self._parts = parts
        self._n = rollout.val_kwargs.n if validation else rollout.n
        self._finished: list[Finished] = []
        self._dropped: set[str] = set()
        self._began = time.monotonic()
        self.tally = Tally()

    @property
    def total(self) -> int:
        return sum(task.n or self._n for task in self._tasks)

    def recall(self) -> None:
        """Take over what earlier starts of this run finished."""
        if self._journal is None:
            return
        wanted = {(task.uid, sample) for task in self._tasks for sample in range(task.n or self._n)}
        with JournalReader.open(self._journal.run_dir) as reader:
            kept = [line for line in reader.headlines() if _belongs(line, wanted)]
        for headline in kept:
            self.tally.recall(headline)
        self._finished += kept
        for task in self._tasks:
            self._journal.add_task(task)

    def roll_out(self) -> bool:
        """Draw what is missing; whether it was interrupted."""
        config = self._config
        done = {(finished.uid, finished.sample) for finished in self._finished}
        if len(done) == self.total:
            return False
        kind = Kind.VALIDATION if self._validation else Kind.TRAINING
        parts = replace(self._parts, observers=(self.tally,))
        try:
            with AgentLoopManager.create_blocking(
                rollout=config.rollout, model=config.model, reward=config.reward, parts=parts
            ) as manager:
                self._began = time.monotonic()
                for result in manager.stream_blocking(self._tasks, kind=kind, done=done):
                    if isinstance(result, Dropped):
                        self._dropped.add(result.uid)
                    else:
                        self._finished.append(result)
        except KeyboardInterrupt:
            return True
        self._check_complete()
        return False

    def _check_complete(self) -> None:
        """Every sample has ended, or the run has failed: what is missing is never passed over."""
        found = {(finished.uid, finished.sample) for finished in self._finished}
        wanted = [(task.uid, sample) for task in self._tasks for sample in range(task.n or self._n)]
        missing = [key for key in wanted if key not in found and key[0] not in self._dropped]
        if missing:
            uid, sample = missing[0]
            raise RunError(f"{len(missing)} of {len(wanted)} trajectories are missing, such as {uid}/{sample}")

    def summary(self, num_cut: int) -> Summary:
        threshold, wall_s = self._config.reward.success_threshold, time.monotonic() - self._began
        dropped = len(self._dropped)
        return summarize(
            self._finished, success_threshold=threshold, wall_s=wall_s, num_dropped=dropped, num_cut=num_cut
        )


def _belongs(headline: Headline, wanted: set[tuple[str, int]]) -> bool:
    return headline.outcome.ok and (headline.uid, headline.sample) in wanted
