"""Training run of a single controller: put together, driven by its schedule, and closed again, wherever its parts live.

Owns the order of starting and closing, and what Ctrl-C means. Knows no schedule's inside, and no runtime's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from treadle.aio import first_error, first_error_of
from treadle.checkpoint.store import Checkpoints
from treadle.cluster import missing_packages
from treadle.cluster.local import LocalRuntime
from treadle.cluster.runtime import Runtime
from treadle.cluster.signals import StopSignals
from treadle.config import DataConfig, TrainConfig, to_yaml
from treadle.config.rules import check_rules
from treadle.config.show import flatten, hide_in_words, hide_secret
from treadle.data.renderer import Renderer
from treadle.data.task_feed import load_feed
from treadle.data.task_source import TaskSource
from treadle.data.tasks import NOT_READ, RunTasks, load_training_tasks, load_validation_tasks
from treadle.engine.gpus import plan_here
from treadle.errors import ConfigError, RunError
from treadle.inspect.findings import scan_run
from treadle.inspect.timeline import write_timeline
from treadle.journal import Journal, fresh_start, logging_to
from treadle.model.tokenizer import require_same_vocabulary, resolve_model_path
from treadle.observe.trackers import Trackers
from treadle.rollout import AgentLoopManager, RolloutParts
from treadle.rollout.provenance import RunInputs
from treadle.rollout.startup_checks import survey_prompts
from treadle.trainer.recorder import RunView
from treadle.trainer.resume import RunHistory, check_changes, config_items, record_config, settings_digest
from treadle.trainer.schedules import SCHEDULES
from treadle.trainer.state import RunInterrupted
from treadle.trainer.step import Learner
from treadle.trainer.trainer import Trainer
from treadle.trainer.validation import Validation
from treadle.types import NOTHING, Task

log = logging.getLogger(__name__)

FINDINGS_READ = 512
"""Trajectories that are looked at when a run ends: the newest."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What came of a run."""

    run_dir: Path
    steps: int
    interrupted: bool
    validations: tuple[Validation, ...]
    notes: tuple[str, ...] = ()
    """What a reader should not miss: rewards that taught nothing, batches larger than the data."""
    trained: int = 0
    """Those of `steps` that this start did."""
    findings: tuple[str, ...] = ()
    """What to look at in the newest groups, as `treadle show RUN --findings` has it: one line for each kind."""


async def train(
    config: TrainConfig,
    view: RunView,
    command: Sequence[str] = (),
    api_keys: Mapping[str, str] = NOTHING,
    *,
    fresh: bool = False,
    allow_changes: bool = False,
    on_signals: Callable[[StopSignals], None] | None = None,
    tasks: RunTasks = NOT_READ,
) -> TrainingResult:
    """Train as the config says. Ctrl-C, SIGTERM and SIGHUP end it in order and save; the same call goes on from there.

    A run directory whose run had another model, other tasks or other settings is refused with what changed: `fresh`
    sets it aside, `allow_changes` goes on with other settings. `on_signals` is given what stops the run, for a caller
    in another thread, which signals do not reach. `tasks` are those that a check of this config has read.
    """
    check(config)
    run_dir = Path(config.logging.directory())
    with StopSignals(config.checkpoint.grace_s) as signals:
        if on_signals is not None:
            on_signals(signals)
        try:
            request = _TrainRequest(view, command, api_keys, fresh, allow_changes, tasks)
            return await _train_here(config, run_dir, request, signals)
        except asyncio.CancelledError:
            if signals.received is None:
                raise
            raise KeyboardInterrupt(signals.received) from None


@dataclass(frozen=True, slots=True)
class _TrainRequest:
    """What a caller of `train` gives beside the config."""

    view: RunView
    command: Sequence[str]
    api_keys: Mapping[str, str]
    fresh: bool
    allow_changes: bool
    tasks: RunTasks


async def _train_here(
    config: TrainConfig, run_dir: Path, request: _TrainRequest, signals: StopSignals
) -> TrainingResult:
    async with _assembled(config, run_dir, request, signals) as run:
        signals.stop_with(run.request_stop)
        interrupted = False
        try:
            await SCHEDULES[config.trainer.mode](run)
        except RunInterrupted:
            interrupted = True
            await run.save_interrupted()
        finally:
            await _draw_timeline(run, run_dir)
        validations = tuple(sorted(run.validations, key=lambda found: found.step))
        findings = () if interrupted or not run.trained else await _look_for_findings(run, run_dir)
        return TrainingResult(run_dir, run.step, interrupted, validations, run.notes, run.trained, findings)


async def _look_for_findings(run: Trainer, run_dir: Path) -> tuple[str, ...]:
    """What a reader should look at in the newest groups, one line for each kind; counts go to the trackers."""
    try:
        found = await asyncio.to_thread(scan_run, run_dir, FINDINGS_READ)
        run.record_findings(found.metrics())
        return tuple(found.lines())
    except Exception as error:  # noqa: BLE001  a courtesy: it changes nothing about how the run ends
        log.warning("findings could not be looked for: %r", error)
        return ()


async def _draw_timeline(run: Trainer, run_dir: Path) -> None:
    """A courtesy: whatever keeps the picture from being drawn is told, and changes nothing about how the run ends."""
    try:
        await run.record_rest()
        await asyncio.to_thread(write_timeline, run_dir)
    except RunError as error:
        log.debug("no timeline: %s", error)  # there is nothing to draw, or a dead journal, which ends the run itself
    except Exception as error:  # noqa: BLE001
        log.warning("the timeline could not be drawn: %r", error)


def check(config: TrainConfig) -> None:
    """Refuse what the runtime of this config cannot do, before anything is loaded; every reason in one report."""
    if mistakes := [*check_rules(config), *missing_packages(config)]:
        raise ConfigError(mistakes)


@asynccontextmanager
async def _start_runtime(config: TrainConfig, total_steps: int) -> AsyncIterator[Runtime]:
    """The parts, where the plan places them."""
    if config.cluster.backend == "local":
        async with first_error_of(LocalRuntime.start(config, plan_here(config), total_steps), "the runtime") as local:
            yield local
        return
    from treadle.cluster.ray.rollout import planned  # needs Ray
    from treadle.cluster.ray.runtime import RayRuntime

    with planned(config) as plan:
        async with first_error_of(RayRuntime.start(config, plan, total_steps), "the runtime") as runtime:
            yield runtime


@asynccontextmanager
async def _assembled(
    config: TrainConfig, run_dir: Path, request: _TrainRequest, signals: StopSignals
) -> AsyncIterator[Trainer]:
    """Every part, started; closed again in the opposite order."""
    logging, view, api_keys = config.logging, request.view, request.api_keys
    tasks, validation_tasks = _read_tasks(config.data, request.tasks)
    feed = load_feed(tasks, config.data, success_threshold=config.reward.success_threshold)
    await _look_at_inputs(config, tasks, validation_tasks)  # before there is a run directory
    inputs = RunInputs.of(config.rollout, config.model, config.reward)
    items = config_items(config, inputs, tasks)
    async with AsyncExitStack() as parts:
        parts.enter_context(fresh_start(config, run_dir) if request.fresh else nullcontext())
        changed = check_changes(run_dir, config, items, allow=request.allow_changes)
        resolved, words = to_yaml(config, origins=True, secrets=False), hide_in_words(request.command)
        journal = Journal.open(run_dir, max_mb=logging.journal_max_mb, config_yaml=resolved, command=words)
        await parts.enter_async_context(journal)
        parts.enter_context(logging_to(run_dir))
        parts.push(log_end)
        log.info("started: %s", " ".join(words))
        signals.journal = journal
        record_config(journal, items, changed)
        for change in changed:
            log.warning("changed since the last start: %s", change)
        shown = {name: hide_secret(name, value) for name, value in flatten(config).items()}
        trackers = Trackers.start(logging, run_dir, shown)
        parts.callback(trackers.close)
        scored = config.reward.gives_scores() and not config.reward.scores_groups()  # which are recorded before it
        settings, bounds = settings_digest(config, inputs), config.reward.bounds
        history = RunHistory.read(run_dir, settings=settings, scored=scored, bounds=bounds, inputs=inputs)
        parts.callback(history.close)
        runtime = await parts.enter_async_context(_start_runtime(config, config.total_steps(len(tasks))))
        shared = RolloutParts(journal=journal if logging.journal else None, api_keys=api_keys, inputs=inputs)
        backends = [runtime.rollout]
        if runtime.validation and validation_tasks:
            backends.append(runtime.validation)
        with first_error():
            async with asyncio.TaskGroup() as starting:
                rollouts = [
                    starting.create_task(_start_rollout(config, replace(shared, backend=backend), parts))
                    for backend in backends
                ]
        rollout, *validation = [started.result() for started in rollouts]
        yield Trainer(
            config,
            learner=Learner(runtime.networks, runtime.weights.lock),
            rollout=rollout,
            weights=runtime.weights,
            tasks=feed,
            checkpoints=Checkpoints(run_dir, checkpoint=config.checkpoint, model=config.model),
            journal=journal,
            trackers=trackers,
            view=view,
            history=history,
            validation_tasks=validation_tasks,
            validation_rollout=validation[0] if validation else None,
            monitor=runtime,
        )


def _read_tasks(data: DataConfig, known: RunTasks) -> tuple[TaskSource, Sequence[Task]]:
    """Training's tasks and those of validation, where there are some; read here where no check has read them."""
    training = known.training or load_training_tasks(data)
    if not data.val_files:
        return training, ()
    return training, (known.validation or load_validation_tasks(data)).tasks


async def _look_at_inputs(config: TrainConfig, tasks: TaskSource, validation_tasks: Sequence[Task]) -> None:
    """Find models that are not there, prompts that are too long, and tasks that cannot run, before anything is loaded
    for them."""
    resolve_model_path(config.model.path, origin=config.model.origin("path"))
    if config.ref.path is not None:
        require_same_vocabulary(config.model, config.ref.path, "ref.path", config.origin("ref.path"))
    renderer = await asyncio.to_thread(Renderer.create, config.model)
    admitted = config.total_steps(len(tasks)) * config.data.train_batch_size
    admitted *= config.algorithm.filter_groups.max_num_gen_batches
    any_may_come = admitted >= len(tasks) or config.data.sampler is not None
    seen = tasks.tasks if any_may_come else [tasks.at(position) for position in range(admitted)]
    survey = await survey_prompts([*seen, *validation_tasks], config.rollout, renderer)
    if note := survey.note(config.rollout):
        log.warning("%s", note)


async def _start_rollout(config: TrainConfig, brought: RolloutParts, parts: AsyncExitStack) -> AgentLoopManager:
    """A rollout, which `parts` closes."""
    rollout = await AgentLoopManager.create(
        rollout=config.rollout, model=config.model, reward=config.reward, parts=brought
    )
    return await parts.enter_async_context(rollout)


def log_end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """The last line of a run's log: how it ended, with the whole traceback, of which people see a sentence."""
    if error is None:
        log.info("ended")
    else:
        log.info("ended by %s", type(error).__name__, exc_info=error)
