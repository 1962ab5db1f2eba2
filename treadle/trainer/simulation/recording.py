"""Sessions as a real run had them: lengths, turns and tool times from its journal, drawn by name.

Owns the way from trajectories to plans. Takes tokens, which do not depend on the hardware, and the seconds of tools;
never the seconds of an engine.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.errors import ConfigError, Mistake
from treadle.journal import JournalReader
from treadle.trainer.simulation.workload import Answer, MeanSession, SessionPlan, stream_of
from treadle.types import Trajectory


class RecordedWorkload:
    """Each session does what one of the recorded ones did."""

    def __init__(self, plans: Sequence[SessionPlan], seed: int) -> None:
        assert plans, "somebody did something"
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
            plans = [plan_of(trajectory) for trajectory in _trajectories(reader)]
        if not plans:
            raise ConfigError([Mistake("--like", "no session in it ended well", str(run_dir))])
        return cls(plans, seed)

    def plan_of(self, uid: str, sample: int) -> SessionPlan:
        """What one session does."""
        return self._plans[stream_of(self._seed, uid, sample) % len(self._plans)]

    def reward_of(self, uid: str, sample: int) -> float:
        """Samples of a group differ."""
        return float(sample % 2)


def plan_of(trajectory: Trajectory) -> SessionPlan:
    """What a recorded session did. Forks count as further turns."""
    prompt = len(trajectory.rows[0].prompt_ids) if trajectory.rows else 0
    answers = [
        Answer(turn.sampled_end - turn.start, turn.tool_s, turn.end - turn.sampled_end)
        for row in trajectory.rows
        for turn in row.turns
    ]
    return SessionPlan(prompt, tuple(answer for answer in answers if answer.tokens))


def _trajectories(reader: JournalReader) -> Iterator[Trajectory]:
    for entry in reader.trajectories():
        if entry.headline.outcome.ok and entry.headline.has_body and entry.headline.num_sampled:
            yield entry.trajectory
