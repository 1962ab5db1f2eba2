"""What a simulated run came to: step time, who waited for whom, how old tokens were, and how near it came to its bound.

Owns the definitions, so that every table and benchmark means the same:
- generation_s: what the engines need for the tokens of one step at full speed, each decoding as many sequences as it
  may (`rollout.max_num_seqs`), plus reading every context in once.
- training_s: what the trainer needs for the tokens of one step.
- bound_s: the larger of the two; where the same GPUs do both in turn, their sum. Nothing can be faster on this split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from treadle.config import TrainConfig
from treadle.trainer.simulation.assumptions import Assumptions
from treadle.trainer.simulation.engine import ReplicaSpeed, Work
from treadle.trainer.simulation.setup import Setup
from treadle.types import Group


@dataclass(slots=True)
class Sessions:
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

    def note(self) -> "Sessions":
        """The sums so far; the longest session is looked for anew."""
        noted, self.max_s = replace(self), 0.0
        return noted


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a run stood at the end of a step."""

    step: int
    time: float
    work: Work
    """Of all replicas together."""
    seconds: Mapping[str, float]
    """Of the schedule's spans, by name."""
    sessions: Sessions


@dataclass(frozen=True, slots=True)
class Forecast:
    """Means over the measured steps; the greatest staleness is that of the whole run up to their end."""

    setup: Setup
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


def forecast(
    setup: Setup,
    assumptions: Assumptions,
    config: TrainConfig,
    speed: ReplicaSpeed,
    replicas: int,
    marks: Sequence[Mark],
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
