"""Supervised fine-tuning run: put together, driven to its end, and closed again, on this machine.

Owns the order of starting and closing, and what Ctrl-C means; the steps are `trainer.sft`'s.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from treadle.checkpoint.store import Checkpoints
from treadle.cluster.runtime import Networks, load_networks
from treadle.cluster.signals import StopSignals
from treadle.cluster.training import check, log_end
from treadle.config import SFTRunConfig, to_yaml
from treadle.config.show import flatten, hide_in_words, hide_secret
from treadle.data.renderer import Renderer
from treadle.engine.gpus import plan_here
from treadle.journal import Journal, fresh_start, logging_to
from treadle.model.tokenizer import resolve_model_path
from treadle.observe.trackers import Trackers
from treadle.rollout.provenance import RunInputs
from treadle.trainer.resume import RunHistory, check_changes, config_items, record_config, settings_digest
from treadle.trainer.sft import LossAfterStep, SFTTrainer, SFTView
from treadle.trainer.sft_data import SFTRows, load_sft_rows, with_step_settings
from treadle.trainer.state import RunInterrupted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SFTResult:
    """What came of a run."""

    run_dir: Path
    steps: int
    trained: int
    """Those of `steps` that this start did."""
    interrupted: bool
    validations: tuple[LossAfterStep, ...]


@dataclass(frozen=True, slots=True)
class SFTData:
    """The rows of a run."""

    training: SFTRows
    validation: SFTRows | None

    @classmethod
    async def load(cls, config: SFTRunConfig) -> "SFTData":
        """Read and rendered, every row; a ConfigError with all mistakes in them."""
        renderer = await asyncio.to_thread(Renderer.create, config.model)
        training = await load_sft_rows(config, renderer)
        held_out = config.data.val_files
        return cls(training, await load_sft_rows(config, renderer, validation=True) if held_out else None)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(rows.longest for rows in (self.training, self.validation) if rows is not None)

    def describe_repeats(self, batch: int) -> str:
        """Whether a batch of so many rows holds some more than once, in words; empty where it does not."""
        count = len(self.training.source)
        if batch <= count:
            return ""
        return (
            f"data.train_batch_size {batch} is more than the {count} rows there are: one batch holds rows up to "
            f"{ceil(batch / count)} times"
        )

    def describe(self) -> list[str]:
        """What trains and what validates, one line each."""
        lines = [f"training   {self.training.describe()}"]
        return lines if self.validation is None else [*lines, f"validation {self.validation.describe()}"]


async def fine_tune(
    config: SFTRunConfig,
    view: SFTView,
    command: Sequence[str] = (),
    *,
    fresh: bool = False,
    allow_changes: bool = False,
    on_data: Callable[[SFTData], None] | None = None,
    on_signals: Callable[[StopSignals], None] | None = None,
) -> SFTResult:
    """Fine-tune as the config says. Ctrl-C, SIGTERM and SIGHUP finish the step and save; the same call goes on.

    A run directory whose run had another model, other rows or other settings is refused with what changed: `fresh`
    sets it aside, `allow_changes` goes on with other settings. `on_data` is told what was read before anything loads.
    """
    check(config)
    run_dir = Path(config.logging.directory())
    with StopSignals(config.checkpoint.grace_s) as signals:
        if on_signals is not None:
            on_signals(signals)
        try:
            data = await SFTData.load(config)
            if on_data is not None:
                on_data(data)
            resolve_model_path(config.model.path, origin=config.model.origin("path"))
            with fresh_start(config, run_dir) if fresh else nullcontext():
                async with _assembled(config, data, run_dir, view, command, allow_changes, signals) as run:
                    return await _drive(run, run_dir, signals)
        except asyncio.CancelledError:
            if signals.received is None:
                raise
            raise KeyboardInterrupt(signals.received) from None


async def _drive(run: "_StartedRun", run_dir: Path, signals: StopSignals) -> SFTResult:
    trainer = run.trainer
    signals.stop_with(trainer.request_stop)
    interrupted = False
    watching = asyncio.ensure_future(run.networks.watch())
    training = asyncio.ensure_future(trainer.run())
    try:
        await asyncio.wait({watching, training}, return_when=asyncio.FIRST_COMPLETED)
        if not training.done():
            training.cancel()
            await asyncio.wait({training})
            watching.result()  # raises: a rank is gone
        training.result()
    except RunInterrupted:
        interrupted = True
    finally:
        watching.cancel()
    return SFTResult(run_dir, trainer.step, trainer.step - trainer.began, interrupted, tuple(trainer.validations))


@dataclass(frozen=True, slots=True)
class _StartedRun:
    trainer: SFTTrainer
    networks: Networks


@asynccontextmanager
async def _assembled(
    config: SFTRunConfig,
    data: SFTData,
    run_dir: Path,
    view: SFTView,
    command: Sequence[str],
    allow_changes: bool,
    signals: StopSignals,
) -> AsyncIterator[_StartedRun]:
    """Every part, started; closed again in the opposite order."""
    inputs = RunInputs.of(config.rollout, config.model, config.reward)
    items = config_items(config, inputs, data.training.source)
    changed = check_changes(run_dir, config, items, allow=allow_changes)
    async with AsyncExitStack() as parts:
        resolved, words = to_yaml(config, origins=True, secrets=False), hide_in_words(command)
        journal = Journal.open(run_dir, max_mb=config.logging.journal_max_mb, config_yaml=resolved, command=words)
        await parts.enter_async_context(journal)
        parts.enter_context(logging_to(run_dir))
        parts.push(log_end)
        log.info("started: %s", " ".join(words))
        signals.journal = journal
        record_config(journal, items, changed)
        for change in changed:
            log.warning("changed since the last start: %s", change)
        for line in data.describe():
            log.info("%s", line)
        shown = {name: hide_secret(name, value) for name, value in flatten(config).items()}
        trackers = Trackers.start(config.logging, run_dir, shown)
        parts.callback(trackers.close)
        history = RunHistory.read(run_dir, settings=settings_digest(config, inputs))
        parts.callback(history.close)
        steps = config.total_steps(len(data.training.source))
        gpus = plan_here(config).trainer_gpus()
        networks = await asyncio.to_thread(load_networks, with_step_settings(config, data.longest), steps, gpus)
        parts.push_async_callback(asyncio.to_thread, networks.close)
        trainer = SFTTrainer(
            config,
            networks.step.policy,
            data.training,
            data.validation,
            checkpoints=Checkpoints(run_dir, checkpoint=config.checkpoint, model=config.model),
            journal=journal,
            trackers=trackers,
            view=view,
            history=history,
        )
        yield _StartedRun(trainer, networks)
