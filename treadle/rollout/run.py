"""Stand-alone rollout, from config to summary: what `treadle rollout` does, for use from Python too.

Owns the run directory and the order of things. Reads `model`, `data`, `rollout`, `reward` and `logging`; a trainer
section in the same file is ignored. An interrupted run continues: finished samples are in the journal and are not
drawn again, as long as their provenance matches what is asked for now.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path

from treadle.aio import run_to_end
from treadle.config import Config, DataConfig, to_yaml
from treadle.config.show import hide_in_words
from treadle.data.renderer import Renderer
from treadle.data.tasks import NOT_READ, RunTasks, load_tasks, load_validation_tasks
from treadle.errors import RunError
from treadle.journal import Journal, JournalReader, fresh_start, logging_to
from treadle.observe import FinishedTrajectory, RolloutCounters, Summary, summarize
from treadle.process.interrupt_watcher import watched_interrupts
from treadle.rollout.dispatch import no_trajectory
from treadle.rollout.manager import FROM_CONFIG, AgentLoopManager
from treadle.rollout.protocol import Dropped
from treadle.rollout.provenance import ReusableSamples, RunInputs, find_reusable, record_inputs
from treadle.rollout.service import RolloutKind, RolloutParts
from treadle.rollout.startup_checks import survey_prompts
from treadle.terminal import warn
from treadle.types import Task, Trajectory

log = getLogger(__name__)

ShowProgress = Callable[[RolloutCounters, int], AbstractContextManager[object]]
"""Shows counters while they grow towards a total."""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What came of a run."""

    summary: Summary
    interrupted: bool
    run_dir: Path | None


def hide_progress(counters: RolloutCounters, total: int) -> AbstractContextManager[object]:
    """No view at all."""
    return nullcontext()


def run_rollout(
    config: Config,
    *,
    validation: bool = False,
    fresh: bool = False,
    command: Sequence[str] = (),
    parts: RolloutParts = FROM_CONFIG,
    progress: ShowProgress = hide_progress,
    stop: threading.Event | None = None,
    tasks: RunTasks = NOT_READ,
) -> RolloutResult:
    """Roll out every task of the training files, or of the validation files, and keep everything in the run directory.

    `parts` replace or add to what the config would build. Ctrl-C ends it in order, and so does `stop`, at the next
    trajectory that ends: what is finished is kept, and the same call goes on from there. Trajectories of another model,
    sampling or prompt are never taken for the result: a directory that holds some is refused with what changed, unless
    `fresh` sets it aside. Where only the reward changed, they are scored again.
    """
    listed = _list_tasks(config.data, tasks, validation=validation)
    renderer = Renderer.create(config.model)  # a mistake in model or tasks leaves no run directory behind
    survey = run_to_end(survey_prompts(listed, config.rollout, renderer))
    if note := survey.note(config.rollout):
        warn(f"note: {note}")
    cut = 0 if config.rollout.overlong_prompts == "drop" else len(survey.overlong)
    if not config.logging.journal:
        run = _RolloutRun(config, listed, None, validation, ReusableSamples(), replace(parts, renderer=renderer))
        with progress(run.counters, run.total):
            interrupted = run.roll_out(stop)
        return RolloutResult(run.summary(num_cut=cut), interrupted, None)
    run_dir = Path(config.logging.directory("validation" if validation else "rollout"))
    with fresh_start(config, run_dir) if fresh else nullcontext():
        inputs = RunInputs.of(config.rollout, config.model, config.reward)
        kept = find_reusable(run_dir, config, inputs, listed, validation=validation)
        with _open_journal(config, run_dir, command) as journal:
            record_inputs(journal, inputs, validation=validation)
            brought = replace(parts, renderer=renderer, journal=journal, inputs=inputs)
            run = _RolloutRun(config, listed, journal, validation, kept, brought)
            with progress(run.counters, run.total):
                interrupted = run.roll_out(stop)
    return RolloutResult(run.summary(num_cut=cut), interrupted, run_dir)


def _list_tasks(data: DataConfig, tasks: RunTasks, *, validation: bool) -> list[Task]:
    """Every task once, whatever its share in training."""
    if validation:
        return list(tasks.validation or load_validation_tasks(data))
    return list(tasks.training or load_tasks(data.train_files, data, data.train_max_samples))


@contextmanager
def _open_journal(config: Config, run_dir: Path, command: Sequence[str]) -> Iterator[Journal]:
    resolved, words = to_yaml(config, origins=True, secrets=False), hide_in_words(command)
    max_mb = config.logging.journal_max_mb
    with Journal.open(run_dir, max_mb=max_mb, config_yaml=resolved, command=words) as journal, logging_to(run_dir):
        log.info("started: %s", " ".join(words))
        try:
            yield journal
        except Exception as error:
            log.info("ended by %s", type(error).__name__, exc_info=error)
            raise
        log.info("ended")


class _RolloutRun:
    """One start of a run: what earlier starts finished, and what this one adds."""

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        journal: Journal | None,
        validation: bool,
        kept: ReusableSamples,
        parts: RolloutParts,
    ) -> None:
        rollout = config.rollout
        self._config = config
        self._tasks = tasks
        self._journal = journal
        self._validation = validation
        self._parts = parts
        self._n = rollout.val_kwargs.n if validation else rollout.n
        self._finished: list[FinishedTrajectory] = [*kept.finished]
        self._unscored = kept.unscored
        self._dropped: set[str] = set()
        self._began = time.monotonic()
        self.counters = RolloutCounters()
        for headline in kept.finished:
            self.counters.add_finished(headline)
        if journal is not None:
            for task in tasks:
                journal.add_task(task)

    @property
    def total(self) -> int:
        return sum(task.n or self._n for task in self._tasks)

    def roll_out(self, stop: threading.Event | None) -> bool:
        """Draw what is missing; whether it was interrupted."""
        config = self._config
        done = {(finished.uid, finished.sample) for finished in self._finished}
        if len(done) == self.total:
            return False
        kind = RolloutKind.VALIDATION if self._validation else RolloutKind.TRAINING
        parts = replace(self._parts, observers=(self.counters,))
        try:
            with (
                watched_interrupts(),
                AgentLoopManager.create_blocking(
                    rollout=config.rollout, model=config.model, reward=config.reward, parts=parts
                ) as manager,
            ):
                self._began = time.monotonic()
                find = self._find_unscored()
                for result in manager.stream_blocking(self._tasks, kind=kind, done=done, unscored=find):
                    if isinstance(result, Dropped):
                        self._dropped.add(result.uid)
                    else:
                        self._finished.append(result)
                    if stop is not None and stop.is_set():
                        return True
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

    def _find_unscored(self) -> Callable[[str, int], Trajectory | None]:
        """Reads tokens that are to be scored again, one trajectory at a time."""
        journal, wanted = self._journal, self._unscored
        if journal is None or not wanted:
            return no_trajectory
        reader = JournalReader.open(journal.run_dir)

        def find(uid: str, sample: int) -> Trajectory | None:
            entry = reader.trajectory(uid, sample) if (uid, sample) in wanted else None
            if entry is None or not (entry.headline.is_intact and entry.headline.has_body):
                return None
            return replace(entry.trajectory, reward=None)

        return find

    def summary(self, num_cut: int) -> Summary:
        threshold, wall_s = self._config.reward.success_threshold, time.monotonic() - self._began
        dropped = len(self._dropped)
        return summarize(
            self._finished, success_threshold=threshold, wall_s=wall_s, num_dropped=dropped, num_cut=num_cut
        )
