"""One way to run a config: a schedule, and how many GPUs train and sample.

Owns the config that a simulated run gets. It is the user's, but for the schedule, the number of steps, and everything
that a simulation leaves out: validation, checkpoints, deadlines. Deadlines that real sessions would miss are counted.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, TypeVar

from treadle.config import RolloutConfig, TrainConfig
from treadle.config.section import Section
from treadle.trainer.simulation.assumptions import Assumptions
from treadle.trainer.simulation.engine import replica_speed
from treadle.trainer.simulation.workload import MeanSession

Mode = Literal["sync", "one_step_off", "fully_async"]
MODES: tuple[Mode, ...] = ("sync", "one_step_off", "fully_async")

_NEVER_S = 1e9

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Setup:
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
    def lag(self) -> int:
        """Policy versions that a token may be behind."""
        return {"sync": 0, "one_step_off": 1, "fully_async": self.max_staleness}[self.mode]

    def __str__(self) -> str:
        bound = f", staleness {self.max_staleness}" if self.mode == "fully_async" else ""
        where = f"{self.gpus} shared" if self.shared else f"{self.train_gpus} + {self.rollout_gpus}"
        return f"{self.mode} on {where}{bound}"


def setup_of(config: TrainConfig) -> Setup:
    """What a config says, without looking at any machine."""
    trainer, rollout = config.trainer, config.rollout
    train_gpus = trainer.num_ranks()
    rollout_gpus = rollout.nnodes * max(rollout.n_gpus_per_node, rollout.tensor_model_parallel_size)
    shared = rollout.nnodes == 0
    return Setup(trainer.mode, train_gpus, train_gpus if shared else rollout_gpus, shared, trainer.max_staleness)


def gpus_per_node(config: TrainConfig) -> int:
    """GPUs of one machine: as the config has them, or 8."""
    return max(config.trainer.n_gpus_per_node, config.rollout.n_gpus_per_node) or 8


def count_replicas(rollout: RolloutConfig, setup: Setup) -> int:
    """Engines that sample."""
    return max(1, setup.rollout_gpus // rollout.tensor_model_parallel_size)


def choose_places(rollout: RolloutConfig, assumptions: Assumptions, mean: MeanSession, setup: Setup) -> int:
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


def derive(config: TrainConfig, setup: Setup, *, places: int, steps: int) -> TrainConfig:
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
    """The same section with other values."""
    return type(section)(**{**section.values(), **values})
