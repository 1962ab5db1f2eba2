"""Training run: put together, driven by its schedule, and closed again, wherever its parts live.

Owns the order of starting and closing, and what Ctrl-C means. Knows no schedule's inside, and no runtime's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle.aio import first_error
from treadle.checkpoint.store import Checkpoints
from treadle.cluster import local
from treadle.cluster.machine import missing_packages
from treadle.cluster.runtime import Runtime
from treadle.cluster.signals import StopSignals
from treadle.config import TrainConfig, to_yaml
from treadle.config.rules import check_rules
from treadle.config.show import flatten, hide_in_words, hide_secret
from treadle.data.renderer import Renderer
from treadle.data.tasks import TaskSource, load_training_tasks, load_validation_tasks
from treadle.errors import ConfigError, RunError
from treadle.inspect.timeline import write_timeline
from treadle.journal import Journal, logging_to, set_aside
from treadle.model.tokenizer import resolve_model_path
from treadle.observe.trackers import Trackers
from treadle.rollout import AgentLoopManager, RolloutParts
from treadle.rollout.provenance import RunInputs
from treadle.rollout.startup_checks import survey_prompts
from treadle.trainer.parts import RunInterrupted, RunView, TrainerParts, Validator, train_in_thread
from treadle.trainer.resume import RunHistory, check_changes, config_items, record_config
from treadle.trainer.schedules import SCHEDULES
from treadle.trainer.step import StepReport
from treadle.trainer.terms import settings_digest, total_steps
from treadle.trainer.trainer import Trainer
from treadle.trainer.validation import Validation
from treadle.types import NOTHING, Task

log = logging.getLogger(__name__)


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


async def train(
    config: TrainConfig,
    view: RunView,
    command: Sequence[str] = (),
    api_keys: Mapping[str, str] = NOTHING,
    *,
    fresh: bool = False,
    allow_changes: bool = False,
) -> TrainingResult:
    """Train as the config says. Ctrl-C, SIGTERM and SIGHUP end it in order and save; the same call goes on from there.

    A run directory whose run had another model, other tasks or other settings is refused with what changed: `fresh`
    sets it aside, `allow_changes` goes on with other settings.
    """
    check(config)
    run_dir = Path(config.logging.directory())
    if fresh:
        set_aside(run_dir)
    with StopSignals(config.checkpoint.grace_s) as signals:
        try:
            return await _train_here(config, run_dir, _TrainRequest(view, command, api_keys, allow_changes), signals)
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
    allow_changes: bool


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
        return TrainingResult(run_dir, run.step, interrupted, validations, run.notes, run.trained)


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


def _runtime(config: TrainConfig, tasks: TaskSource) -> AbstractAsyncContextManager[Runtime]:
    """The parts where the config wants them."""
    if config.cluster.backend == "local":
        return local.started(config, tasks)
    from treadle.cluster.ray import runtime  # needs Ray

    return runtime.started(config, tasks)


@asynccontextmanager
async def _assembled(
    config: TrainConfig, run_dir: Path, request: _TrainRequest, signals: StopSignals
) -> AsyncIterator[Trainer]:
    """Every part, started; closed again in the opposite order."""
    logging, view, api_keys = config.logging, request.view, request.api_keys
    tasks = load_training_tasks(config.data)
    validation_tasks = tuple(load_validation_tasks(config.data)) if config.data.val_files else ()
    resolve_model_path(config.model.path, origin=config.model.origin("path"))  # before there is a run directory
    await _look_at_prompts(config, tasks, validation_tasks)
    inputs = RunInputs.of(config.rollout, config.model, config.reward)
    items = config_items(config, inputs, tasks)
    changed = check_changes(run_dir, config, items, allow=request.allow_changes)
    async with AsyncExitStack() as parts:
        resolved, words = to_yaml(config, origins=True, secrets=False), hide_in_words(request.command)
        journal = Journal.open(run_dir, max_mb=logging.journal_max_mb, config_yaml=resolved, command=words)
        await parts.enter_async_context(journal)
        parts.enter_context(logging_to(run_dir))
        parts.push(_log_end)
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
        lineage = RunHistory.read(run_dir, settings=settings, scored=scored, bounds=bounds)
        parts.callback(lineage.close)
        runtime = await parts.enter_async_context(_runtime(config, tasks))
        brought = RolloutParts(journal=journal if logging.journal else None, api_keys=api_keys, inputs=inputs)
        start = partial(_start_rollout, config, brought, parts)
        wanted = [runtime.rollout]
        if runtime.validation and validation_tasks:
            wanted.append(runtime.validation)
        with first_error():
            async with asyncio.TaskGroup() as starting:
                rollouts = [starting.create_task(start(supplied)) for supplied in wanted]
        rollout, *validation = [started.result() for started in rollouts]
        yield Trainer(
            config,
            TrainerParts(
                step=runtime.step,
                rollout=rollout,
                push=partial(runtime.weights.push, rollout),
                tasks=tasks,
                validation_tasks=validation_tasks,
                checkpoints=Checkpoints(run_dir, checkpoint=config.checkpoint, model=config.model),
                journal=journal,
                trackers=trackers,
                view=view,
                lineage=lineage,
                inputs=inputs,
                train=partial(_train, runtime),
                validator=next((Validator(own, partial(runtime.weights.push_to, own)) for own in validation), None),
                watch=runtime.watch,
                needs_push=runtime.weights.lock.requested,
            ),
        )


async def _look_at_prompts(config: TrainConfig, tasks: TaskSource, validation_tasks: Sequence[Task]) -> None:
    """Find prompts that are too long, and tasks that cannot run, before anything is loaded for them."""
    renderer = await asyncio.to_thread(Renderer.create, config.model)
    admitted = total_steps(config, tasks) * config.data.train_batch_size
    admitted *= config.algorithm.filter_groups.max_num_gen_batches
    seen = [tasks.at(position) for position in range(min(admitted, len(tasks)))]
    survey = await survey_prompts([*seen, *validation_tasks], config.rollout, renderer)
    if note := survey.note(config.rollout):
        log.warning("%s", note)


async def _train(runtime: Runtime, *arguments: Any) -> StepReport:
    async with runtime.weights.lock.training():
        return await train_in_thread(runtime.step, *arguments)


async def _start_rollout(
    config: TrainConfig, brought: RolloutParts, parts: AsyncExitStack, supplied: RolloutParts
) -> AgentLoopManager:
    """A rollout around what the runtime supplies; `runtime` closes it."""
    own = replace(supplied, journal=brought.journal, api_keys=brought.api_keys, inputs=brought.inputs)
    rollout = await AgentLoopManager.create(rollout=config.rollout, model=config.model, reward=config.reward, parts=own)
    return await parts.enter_async_context(rollout)


def _log_end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """The last line of a run's log: how it ended, with the whole traceback, of which people see a sentence."""
    if error is None:
        log.info("ended")
    else:
        log.info("ended by %s", type(error).__name__, exc_info=error)
