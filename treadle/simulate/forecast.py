"""Forecast: step time, waits, staleness and bound of one schedule on one split of the GPUs.

Owns the config that a simulated run gets: the user's, but for the schedule, the number of steps, and what a simulation
leaves out (validation, checkpoints, deadlines; deadlines that real sessions would miss are counted). Owns the
definitions, so that every table and benchmark means the same:
- generation_s: what the engines need for the tokens of one step at full speed, each decoding as many sequences as it
  may (`rollout.max_num_seqs`), plus one prefill of every context.
- training_s: what the trainer needs for the tokens of one step.
- bound_s: the larger of the two; where the same GPUs do both in turn, their sum. Nothing can be faster on this split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any, Literal, TypeVar

from treadle.config import RolloutConfig, TrainConfig
from treadle.config.section import Section
from treadle.simulate.assumptions import Assumptions
from treadle.simulate.engine import ReplicaSpeed, ReplicaWork, replica_speed
from treadle.simulate.workload import MeanSession
from treadle.types import Group

Mode = Literal["sync", "one_step_off", "fully_async"]
MODES: tuple[Mode, ...] = ("sync", "one_step_off", "fully_async")

_NEVER_S = 1e9

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class ScheduleSetup:
    """A schedule on some GPUs. In a shared one, all of them take turns at sampling and training."""

    mode: Mode
    train_gpus: int
    rollout_gpus: int
    shared: bool = False
    max_staleness: int = 0
    """In fully_async."""

    @property
    def gpus(self) -> int:
        return self.train_gpus if self.shared else self.train_gpus + self.rollout_gpus

    @property
    def staleness_bound(self) -> int:
        """Policy versions that a token may be behind."""
        return {"sync": 0, "one_step_off": 1, "fully_async": self.max_staleness}[self.mode]

    def __str__(self) -> str:
        bound = f", staleness {self.max_staleness}" if self.mode == "fully_async" else ""
        where = f"{self.gpus} shared" if self.shared else f"{self.train_gpus} + {self.rollout_gpus}"
        return f"{self.mode} on {where}{bound}"


def setup_of(config: TrainConfig) -> ScheduleSetup:
    """What a config says, without looking at any machine."""
    trainer, rollout = config.trainer, config.rollout
    train_gpus = trainer.num_ranks()
    rollout_gpus = rollout.nnodes * max(rollout.n_gpus_per_node, rollout.tensor_model_parallel_size)
    shared = rollout.nnodes == 0
    return ScheduleSetup(
        trainer.mode, train_gpus, train_gpus if shared else rollout_gpus, shared, trainer.max_staleness
    )


def gpus_per_node(config: TrainConfig) -> int:
    """GPUs of one machine: as the config has them, or 8."""
    return max(config.trainer.n_gpus_per_node, config.rollout.n_gpus_per_node) or 8


def count_replicas(rollout: RolloutConfig, setup: ScheduleSetup) -> int:
    """Engines that sample."""
    return max(1, setup.rollout_gpus // rollout.tensor_model_parallel_size)


def choose_max_sessions(
    rollout: RolloutConfig, assumptions: Assumptions, mean: MeanSession, setup: ScheduleSetup
) -> int:
    """How many sessions may be open at once: as the config says, or else as many as keep the engines full.

    That is as many as the engines decode at once, and those that wait for tools meanwhile. More would wait for an
    engine again at each of their turns.
    """
    agent = rollout.agent
    if agent.max_concurrent_sessions is not None:
        return agent.max_concurrent_sessions
    speed = replica_speed(assumptions, rollout)
    decoding_s = mean.sampled_tokens * speed.token_s(speed.max_num_seqs)
    places = count_replicas(rollout, setup) * speed.max_num_seqs
    return ceil(places * (1 + mean.tool_s / decoding_s))


def derive_config(config: TrainConfig, setup: ScheduleSetup, *, places: int, steps: int) -> TrainConfig:
    """The config of a simulated run, with `places` for sessions."""
    trainer, rollout = config.trainer, config.rollout
    limits = _with(
        rollout.limits,
        session_timeout_s=_NEVER_S,
        session_tool_time_s=None,
        request_timeout_s=_NEVER_S,
        stall_report_s=_NEVER_S,
    )
    return _with(
        config,
        rollout=_with(rollout, limits=limits, agent=_with(rollout.agent, max_concurrent_sessions=places)),
        trainer=_with(
            trainer,
            mode=setup.mode,
            max_staleness=setup.max_staleness,
            total_training_steps=steps,
            val_before_train=False,
            val_only=False,
            test_freq=-1,
        ),
    )


def _with(section: S, **values: Any) -> S:
    """A section with other values."""
    return type(section)(**{**section.values(), **values})


@dataclass(slots=True)
class SessionTotals:
    """Sums over the sessions that were trained so far."""

    count: int = 0
    tokens: int = 0
    """Sampled."""
    context_tokens: int = 0
    """Prompts and tool answers."""
    age: int = 0
    """Policy versions behind, summed over sampled tokens."""
    max_age: int = 0
    seconds: float = 0.0
    tool_s: float = 0.0
    max_s: float = 0.0
    """Since the last note."""
    num_late: int = 0
    """That took longer than `rollout.limits.session_timeout_s`."""

    def add(self, groups: Sequence[Group], version: int, timeout_s: float) -> None:
        """Count what is trained now, with weights of `version`."""
        for trajectory in (item for group in groups for item in group.survivors):
            total_s = trajectory.timing.total_s
            self.count += 1
            self.seconds += total_s
            self.tool_s += trajectory.timing.tool_s
            self.max_s = max(self.max_s, total_s)
            self.num_late += total_s > timeout_s
            for row in trajectory.rows:
                self.context_tokens += row.prompt_ids[0]
                for tokens, at in zip(row.ids, row.versions, strict=True):
                    if at < 0:
                        self.context_tokens += tokens
                    else:
                        self.tokens += tokens
                        self.age += tokens * (version - at)
                        self.max_age = max(self.max_age, version - at)

    def note(self) -> "SessionTotals":
        """The sums so far; the longest session is looked for anew."""
        noted, self.max_s = replace(self), 0.0
        return noted


@dataclass(frozen=True, slots=True)
class StepMark:
    """Where a run stood at the end of a step."""

    step: int
    time: float
    work: ReplicaWork
    """Of all replicas together."""
    seconds: Mapping[str, float]
    """Of the schedule's spans, by name."""
    sessions: SessionTotals


@dataclass(frozen=True, slots=True)
class Forecast:
    """Means over the measured steps; the greatest staleness is that of the whole run up to their end."""

    setup: ScheduleSetup
    steps: int
    step_s: float
    min_step_s: float
    max_step_s: float
    train_s: float
    """The trainer trained."""
    wait_s: float
    """The trainer waited for groups."""
    push_s: float
    """The trainer waited for weights to arrive."""
    decoding: float
    """Share of the replicas' time in which at least one sequence was decoded."""
    prefilling: float
    updating: float
    idle: float
    load: float
    """Tokens that the engines sampled, as a share of what they could have at full speed."""
    sampled_tokens: float
    """Of one step."""
    trained_tokens: float
    generation_s: float
    training_s: float
    staleness_mean: float
    staleness_max: int
    session_s: float
    tool_s: float
    """Of a session, in tools."""
    max_session_s: float
    late: float
    """Share of sessions longer than `rollout.limits.session_timeout_s`."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens that were trained."""
        return self.sampled_tokens / self.step_s

    @property
    def bound_s(self) -> float:
        if self.setup.shared:
            return self.generation_s + self.training_s
        return max(self.generation_s, self.training_s)

    @property
    def of_bound(self) -> float:
        """How near the step came to the bound of its split; 1 is there."""
        return self.bound_s / self.step_s

    @property
    def training(self) -> float:
        """Share of the trainer's time in which it trained."""
        return self.train_s / self.step_s


def make_forecast(
    setup: ScheduleSetup,
    assumptions: Assumptions,
    config: TrainConfig,
    speed: ReplicaSpeed,
    replicas: int,
    marks: Sequence[StepMark],
) -> Forecast:
    """What happened between the first mark and the last, for each step between them."""
    first, last = marks[0], marks[-1]
    each = [after.time - before.time for before, after in pairwise(marks)]
    steps, passed = last.step - first.step, last.time - first.time
    before, after = first.sessions, last.sessions
    sampled, context = after.tokens - before.tokens, after.context_tokens - before.context_tokens
    count = max(1, after.count - before.count)
    work, spans = (
        last.work - first.work,
        {name: last.seconds[name] - first.seconds.get(name, 0) for name in last.seconds},
    )
    epochs, train_per_s = config.actor.ppo_epochs, setup.train_gpus * assumptions.train_tokens_per_s
    return Forecast(
        setup=setup,
        steps=steps,
        step_s=passed / steps,
        min_step_s=min(each),
        max_step_s=max(each),
        train_s=spans.get("train", 0.0) / steps,
        wait_s=spans.get("rollout", 0.0) / steps,
        push_s=spans.get("weights", 0.0) / steps,
        decoding=work.decoding / work.seconds,
        prefilling=work.prefilling / work.seconds,
        updating=work.updating / work.seconds,
        idle=work.idle / work.seconds,
        load=work.tokens / (work.seconds * speed.full),
        sampled_tokens=sampled / steps,
        trained_tokens=(sampled + context) / steps,
        generation_s=(sampled / speed.full + context / speed.prefill) / replicas / steps,
        training_s=(sampled + context) * epochs / train_per_s / steps,
        staleness_mean=(after.age - before.age) / max(1, sampled),
        staleness_max=after.max_age,
        session_s=(after.seconds - before.seconds) / count,
        tool_s=(after.tool_s - before.tool_s) / count,
        max_session_s=max(mark.sessions.max_s for mark in marks[1:]),
        late=(after.num_late - before.num_late) / count,
    )
