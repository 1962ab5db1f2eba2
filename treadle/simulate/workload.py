"""Workload: what simulated sessions do: tokens turn by turn and tool latencies, assumed or recorded.

Owns the distributions, and the way from recorded trajectories to session plans: lengths, turns and tool times from a
run's journal, never the seconds of an engine. Everything is drawn by (seed, task, sample), never by the order of
requests, so every schedule and every split of the GPUs gets exactly the same work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Protocol

from treadle.config import RolloutConfig, TrainConfig
from treadle.engine.rng import unit_at
from treadle.errors import ConfigError, Mistake
from treadle.journal import JournalReader
from treadle.simulate.assumptions import Assumptions
from treadle.simulate.engine import replica_speed
from treadle.types import Trajectory

TRUNCATED_SHARE = 1 / 400
"""The fraction of draws that reach the longest value. With a tail of 10 the median is then 0.6 of the mean."""

_NORMAL = NormalDist()
_WIDEST = _NORMAL.inv_cdf(1 - TRUNCATED_SHARE)


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn: the tokens it samples, then the seconds of its tool call and the tokens that the tool adds."""

    tokens: int
    tool_s: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Plan of one session: the same in every schedule and on every engine."""

    prompt_tokens: int
    answers: tuple[PlannedTurn, ...]

    @property
    def sampled_tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def context_tokens(self) -> int:
        """The prompt and the tools' answers."""
        return self.prompt_tokens + sum(answer.tool_tokens for answer in self.answers)

    @property
    def tool_s(self) -> float:
        return sum(answer.tool_s for answer in self.answers)


@dataclass(frozen=True, slots=True)
class MeanSession:
    """What sessions do on average."""

    sampled_tokens: float
    context_tokens: float
    tool_s: float

    @classmethod
    def of(cls, plans: Sequence[SessionPlan]) -> "MeanSession":
        return cls(
            fmean(plan.sampled_tokens for plan in plans),
            fmean(plan.context_tokens for plan in plans),
            fmean(plan.tool_s for plan in plans),
        )


class Workload(Protocol):
    """Where the sessions of a simulated run come from."""

    @property
    def mean(self) -> MeanSession: ...

    def plan_of(self, uid: str, sample: int) -> SessionPlan:
        """What one session does; always the same."""
        ...

    def reward_of(self, uid: str, sample: int) -> float: ...


@dataclass(frozen=True, slots=True)
class TruncatedLogNormal:
    """Log-normal distribution, truncated at `longest`."""

    location: float
    width: float
    longest: float

    @classmethod
    def of(cls, mean: float, longest: float) -> "TruncatedLogNormal":
        """The one with this mean, of which `TRUNCATED_SHARE` or, where that is impossible, less reaches `longest`."""
        ratio = max(1.0, longest / mean) if mean else 1.0
        width = _WIDEST - sqrt(max(0.0, _WIDEST**2 - 2 * log(ratio)))
        low, high = log(max(mean, 1e-300)) - width**2 / 2 - 1, log(max(longest, mean, 1e-300))
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, width, longest).mean() < mean else (low, middle)
        return cls(low, width, max(longest, mean))

    def mean(self) -> float:
        """The mean of the truncated distribution."""
        if not self.width:
            return min(self.longest, exp(self.location))
        edge = (log(self.longest) - self.location) / self.width
        below = exp(self.location + self.width**2 / 2) * _NORMAL.cdf(edge - self.width)
        return below + self.longest * (1 - _NORMAL.cdf(edge))

    def truncate(self, longest: float) -> "TruncatedLogNormal":
        """These draws, truncated sooner."""
        return TruncatedLogNormal(self.location, self.width, min(longest, self.longest))

    def at(self, unit: float) -> float:
        """The value at a quantile in [0, 1)."""
        z = _NORMAL.inv_cdf(min(max(unit, 1e-12), 1 - 1e-12))
        return min(self.longest, exp(self.location + self.width * z))


class AssumedWorkload:
    """Sessions with lengths and latencies as assumed."""

    def __init__(self, assumptions: Assumptions, rollout: RolloutConfig, seed: int) -> None:
        response, prompt, turns = assumptions.response_tokens, assumptions.prompt_tokens, assumptions.turns
        tool_tokens, tool_s = assumptions.tool_tokens, assumptions.tool_s
        assert response and prompt and turns and tool_tokens is not None, "filled from the config"
        self._prompt, self._turns, self._tool_tokens = round(prompt), round(turns), round(tool_tokens)
        self._seed = seed
        self._no_signal = assumptions.no_signal
        room = max(self._turns, rollout.response_length - (self._turns - 1) * self._tool_tokens)
        self._lengths = TruncatedLogNormal.of(response, response * assumptions.length_tail).truncate(room)
        self._tools = TruncatedLogNormal.of(tool_s, tool_s * assumptions.tool_tail) if tool_s else None
        calls = self._turns - 1
        waits_s = calls * self._tools.mean() if self._tools else 0.0
        self.mean = MeanSession(self._lengths.mean(), self._prompt + calls * self._tool_tokens, waits_s)

    def plan_of(self, uid: str, sample: int) -> SessionPlan:
        """What one session does."""
        stream, last = stream_of(self._seed, uid, sample), self._turns - 1
        each, extra = divmod(max(self._turns, round(self._lengths.at(unit_at(stream, 0)))), self._turns)
        answers = [
            PlannedTurn(
                each + (at < extra), self._tools.at(unit_at(stream, 1 + at)) if self._tools else 0.0, self._tool_tokens
            )
            for at in range(last)
        ]
        return SessionPlan(self._prompt, (*answers, PlannedTurn(each)))

    def reward_of(self, uid: str, sample: int) -> float:
        """Samples of a group differ, but for those groups that have no signal."""
        dull = self._no_signal and unit_at(stream_of(self._seed, uid, -1), 0) < self._no_signal
        return 0.0 if dull else float(sample % 2)


def stream_of(seed: int, uid: str, sample: int) -> int:
    """The numbers that belong to one session."""
    key = f"{seed}\0{uid}\0{sample}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class StepWork:
    """Mean work of one step, in seconds of one GPU at full speed."""

    generation: float
    training: float


def expected_work(mean: MeanSession, assumptions: Assumptions, config: TrainConfig) -> StepWork:
    """The work of a step before anything is simulated."""
    rollout, speed = config.rollout, replica_speed(assumptions, config.rollout)
    sessions = config.data.train_batch_size * rollout.n
    per_replica = mean.sampled_tokens / speed.full + mean.context_tokens / speed.prefill
    trained = (mean.sampled_tokens + mean.context_tokens) * config.actor.ppo_epochs
    return StepWork(
        sessions * per_replica * rollout.tensor_model_parallel_size,
        sessions * trained / assumptions.train_tokens_per_s,
    )


class RecordedWorkload:
    """Each session does what one of the recorded ones did."""

    def __init__(self, plans: Sequence[SessionPlan], seed: int) -> None:
        assert plans, "at least one session was recorded"
        self._plans = tuple(plans)
        self._seed = seed
        self.mean = MeanSession.of(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    @classmethod
    def read(cls, run_dir: Path, seed: int) -> "RecordedWorkload":
        """The sessions of a run directory that ended well and are still there whole."""
        if not run_dir.is_dir():
            raise ConfigError([Mistake("--like", "there is no such directory", str(run_dir))])
        with JournalReader.open(run_dir) as reader:
            plans = [plan_from_trajectory(trajectory) for trajectory in _trajectories(reader)]
        if not plans:
            raise ConfigError([Mistake("--like", "no session in it ended well", str(run_dir))])
        return cls(plans, seed)

    def plan_of(self, uid: str, sample: int) -> SessionPlan:
        """What one session does."""
        return self._plans[stream_of(self._seed, uid, sample) % len(self._plans)]

    def reward_of(self, uid: str, sample: int) -> float:
        """Samples of a group differ."""
        return float(sample % 2)


def plan_from_trajectory(trajectory: Trajectory) -> SessionPlan:
    """What a recorded session did. Forks count as further turns."""
    prompt = len(trajectory.rows[0].prompt_ids) if trajectory.rows else 0
    answers = [
        PlannedTurn(turn.sampled_end - turn.start, turn.tool_s, turn.end - turn.sampled_end)
        for row in trajectory.rows
        for turn in row.turns
    ]
    return SessionPlan(prompt, tuple(answer for answer in answers if answer.tokens))


def _trajectories(reader: JournalReader) -> Iterator[Trajectory]:
    for entry in reader.trajectories():
        if entry.headline.outcome.ok and entry.headline.has_body and entry.headline.num_sampled:
            yield entry.trajectory
