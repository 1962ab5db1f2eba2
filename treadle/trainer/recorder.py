"""Run recorder: what each step, push and validation came to, in the journal, to the trackers and to the display.

Owns what is written after a step, a push and a validation, and when a metric counts: what is noted during a step is
written with it. Decides nothing. The state that a resume reads is written by `state.py`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from treadle.config.root import LoggingConfig
from treadle.journal import Journal
from treadle.observe.step_metrics import Spans, add_up, describe_batch
from treadle.observe.trackers import Trackers
from treadle.terminal import warn
from treadle.trainer.buffer import BufferedBatch
from treadle.trainer.step import StepReport
from treadle.trainer.validation import Validation
from treadle.types import Group
from treadle.weights.logprob_probe import ProbeResult
from treadle.weights.sync import PushReport


class RunView(Protocol):
    """Display of a run's progress."""

    def watch(self, phase: Callable[[], str]) -> None: ...

    def begin(self, total_steps: int) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...


class RunRecorder:
    """Recorder of one start. With `overlaps`, sampling goes on during training: its speed is over the whole step."""

    def __init__(
        self,
        journal: Journal,
        trackers: Trackers,
        view: RunView,
        logging: LoggingConfig,
        spans: Spans,
        *,
        overlaps: bool,
    ) -> None:
        self._journal = journal
        self._trackers = trackers
        self._view = view
        self._logging = logging
        self._spans = spans
        self._overlaps = overlaps
        self._noted: dict[str, float] = {}
        self._recorded_at = time.perf_counter()

    def note(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the step under way."""
        self._noted.update(metrics)

    def note_staleness(self, groups: Sequence[Group], version: int) -> None:
        """How many policy versions behind `version` the sampled tokens are."""
        trained = (item for group in groups for item in group.survivors)
        ages = [version - at for item in trained for row in item.rows for at in row.versions if at >= 0]
        if ages:
            self.note({"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))})

    def write_weights(self, report: PushReport) -> None:
        """Record which weights the engines have confirmed."""
        self._journal.add_event("weights", version=report.version, checksum=report.checksum)

    def write_probes(self, results: Sequence[ProbeResult]) -> None:
        """Record what each replica answered to a logprob probe; the farthest one is a metric of the step."""
        for result in results:
            self._journal.add_event("probe", **result.fields())
        if results:
            self.note({"weights/probe_nats": max(result.nats for result in results)})

    def write_step(
        self, step: int, report: StepReport, taken: BufferedBatch, baselines: Sequence[float | None] | None
    ) -> None:
        """Record what a step trained on, which a replay trains again, and its metrics."""
        names = [
            [group.task.uid, [[item.sample, item.attempt] for item in group.trajectories]] for group in taken.groups
        ]
        self._journal.add_event(
            "step",
            step=step,
            version=report.version,
            groups=names,
            positions=list(taken.positions),
            baselines=None if baselines is None else list(baselines),
        )
        if report.annotations:
            self._journal.add_annotations(report.annotations)
        cut = sum(any("prompt_tokens_cut" in item.extra for item in group.trajectories) for group in taken.groups)
        metrics = {
            **report.metrics,
            **self._noted,
            **describe_batch(taken.groups),
            **self._measure(step, taken.groups),
            "prompts/dropped": float(taken.removed.get("prompt dropped", 0)),  # tasks left out, their prompts too long
            "prompts/cut": float(cut),
            **taken.sampler,
        }
        self._noted = {}
        self._log(step, metrics)
        self._view.on_step(step, metrics)

    def write_validation(self, found: Validation) -> None:
        """Record a validation, and its first conversations (`logging.log_val_generations`)."""
        self._log(found.step, found.metrics())
        if count := self._logging.log_val_generations:
            self._trackers.log_texts(found.step, found.transcripts(count))
        self._view.on_validation(found.step, found.success)

    def write_lost_validation(self, step: int, reason: str) -> None:
        """Record a validation that its engines did not live to finish."""
        warn(f"note: the validation of step {step} is lost: {reason}")
        self._journal.add_event("validation_lost", step=step, reason=reason)
        self._log(step, {"validation/lost": 1.0})

    def write_findings(self, step: int, counts: Mapping[str, float]) -> None:
        """To the trackers alone: the journal has what they were found in."""
        if counts:
            self._trackers.log(step, counts)

    async def write_rest(self, step: int) -> None:
        """Write the spans since the last step to the journal: the last validation, the last checkpoint."""
        self._write_spans(step)
        await self._journal.flush()

    def _measure(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        seconds, now = self._write_spans(step), time.perf_counter()
        sampled = sum(item.num_sampled for group in groups for item in group.trajectories)
        sampling_s = now - self._recorded_at if self._overlaps else seconds.get("rollout", 0.0)
        self._recorded_at = now
        metrics = {f"seconds/{name}": value for name, value in seconds.items()}
        return {**metrics, "rollout/tokens_per_s": sampled / max(sampling_s, 1e-9)}

    def _write_spans(self, step: int) -> dict[str, float]:
        """The spans that ended since the last call, added up."""
        spans = self._spans.take()
        if spans:
            self._journal.add_event("spans", step=step, spans=[list(span) for span in spans])
        return add_up(spans)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._journal.add_metrics(step, metrics)
        self._trackers.log(step, metrics)
