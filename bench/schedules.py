"""The three schedules against each other, and against what the hardware allows.

    PYTHONPATH=. python bench/schedules.py [reasoning] [published] [real]

reasoning  Long answers (mean L, at most 10 L) with tool calls between turns, in virtual time, with as many GPUs for
           training as for sampling. The bound is max(generation, training): generation is every token of a step with
           all engines at full speed (`rollout.max_num_seqs` sequences each), training every token of a step at the
           trainer's speed. Where sync has all GPUs in turn, its bound is the sum of both on all of them.
published  The shape of verl's own figures (7B on 128 GPUs, 512 tasks × 16 samples of up to 28k tokens; step 356.3 s in
           sync, of which 177.9 s generation; 150.6 s fully async; 2.35 to 2.67 times as many steps in the same time).
           Speeds are set so that our sync takes what theirs did, phase by phase; the rest is predicted.
real       Real time, a scripted engine: rollout manager, sessions, tools, router, flow and journal as in production,
           with sleeps for GPUs. One sync run is recorded; from its sessions the simulator predicts all three modes.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from treadle.algorithm.kl import KLControl
from treadle.config import TrainConfig, loads
from treadle.data.task_feed import TaskFeed
from treadle.data.task_source import TaskSource
from treadle.engine.protocol import WeightUpdate
from treadle.journal import Journal, JournalReader
from treadle.observe.trackers import Trackers
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutParts
from treadle.simulate.assumptions import Assumptions
from treadle.simulate.forecast import Forecast, ScheduleSetup
from treadle.simulate.report import draw_table
from treadle.simulate.simulation import MeasuredSteps, TimedLearner, simulate
from treadle.simulate.stand_ins import CountingPolicy, NoCheckpoints, NoHistory, NoSender
from treadle.simulate.workload import AssumedWorkload, MeanSession, PlannedTurn, SessionPlan
from treadle.trainer.schedules import SCHEDULES
from treadle.trainer.step import StepParts, StepReport
from treadle.trainer.trainer import Trainer
from treadle.types import Group, Request, Task, Trajectory
from treadle.weights.sync import WeightSync

REASONING = """
model: {path: unused}
data: {train_files: unused, train_batch_size: 128}
reward: {functions: {answer: {path: exact_match}}}
rollout: {n: 16, prompt_length: 2048, response_length: 24000, max_num_seqs: 256}
actor: {ppo_mini_batch_size: 128, ppo_max_token_len_per_gpu: 32768}
trainer: {}
"""
REASONING_SPEEDS = Assumptions(
    response_tokens=2000,
    length_tail=10,
    prompt_tokens=500,
    turns=3,
    tool_s=5,
    tool_tail=10,
    tool_tokens=100,
    push_s=3,
    push_overlap=0,
)

PUBLISHED = """
model: {path: unused}
data: {train_files: unused, train_batch_size: 512}
reward: {functions: {answer: {path: exact_match}}}
rollout: {n: 16, prompt_length: 2048, response_length: 28672, max_num_seqs: 256}
actor: {ppo_mini_batch_size: 512, ppo_max_token_len_per_gpu: 32768}
trainer: {}
"""
PUBLISHED_STEP_S = {"sync": 356.3, "fully_async": 150.63}
PUBLISHED_TRAIN_S = {"sync": 53.92 + 113.81, "fully_async": 113.16}
"""With old logprobs in sync, on 128 GPUs; without them, on 64."""

REAL = """
model: {path: treadle/tiny-calculator}
data: {train_files: unused, train_batch_size: 12}
reward: {functions: {answer: {path: exact_match}}}
rollout:
  name: scripted
  n: 4
  nnodes: 1
  replicas_per_node: 4
  prompt_length: 400
  response_length: 400
  scripted: {script: "bench.schedules:speak", latency_s: 0.15, latency_tail: 10}
  agent: {default_agent_loop: tool_agent, max_concurrent_sessions: 4096}
  multi_turn: {tools: "bench.schedules:wait", tool_timeout_s: 60}
actor: {ppo_mini_batch_size: 12}
algorithm: {rollout_correction: {rollout_is: none}}
trainer: {max_staleness: 4, val_before_train: false}
"""
REAL_STEPS = 10
REAL_TURNS = 2
REAL_TOKENS_PER_S = 1000.0
"""In the simulation a second of the scripted engine is this many tokens."""
REAL_TRAIN_RATE = 24_000.0
"""Of those tokens, per second of training."""
REAL_PUSH_S = 0.05


def show(title: str, found: Mapping[str, Forecast], sync: Forecast) -> None:
    rows = [("", "step", "over sync", "generation", "training", "bound", "of bound", "staleness")]
    rows += [
        (
            name,
            f"{item.step_s:.1f} s",
            f"{sync.step_s / item.step_s:.2f} ×",
            f"{item.generation_s:.1f} s",
            f"{item.training_s:.1f} s",
            f"{item.bound_s:.1f} s",
            f"{item.of_bound:.0%}",
            f"{item.staleness_mean:.2f}, max {item.staleness_max}",
        )
        for name, item in found.items()
    ]
    print(f"\n{title}\n{draw_table(rows, left=(0,))}", flush=True)


def bench_reasoning() -> None:
    config = _config(REASONING)
    workload = AssumedWorkload(REASONING_SPEEDS.fill(config.rollout), config.rollout, seed=0)
    setups = {
        "sync, 8 GPUs in turn": ScheduleSetup("sync", 8, 8, shared=True),
        "one_step_off, 4 + 4": ScheduleSetup("one_step_off", 4, 4),
        **{
            f"fully_async, 4 + 4, staleness {k}": ScheduleSetup("fully_async", 4, 4, max_staleness=k)
            for k in (1, 2, 3, 4, 6)
        },
    }
    found = {name: simulate(config, REASONING_SPEEDS, workload, setup, steps=10) for name, setup in setups.items()}
    sync = found["sync, 8 GPUs in turn"]
    title = (
        "reasoning: 2,048 sessions a step, 2,000 tokens on average and 20,000 at most, 3 turns, tools of 5 s to 50 s"
    )
    show(title, found, sync)
    reached = [name for name, item in found.items() if item.setup.mode == "fully_async" and item.of_bound >= 0.9]
    print(f"90 % of the bound: {'reached by ' + reached[0] if reached else 'not reached'}")


def bench_published() -> None:
    config = _config(PUBLISHED)

    def speeds(train_s: float, gpus: int) -> Assumptions:
        tokens = 512 * 16 * 2200
        return Assumptions(
            response_tokens=2000,
            length_tail=28672 / 2000,
            prompt_tokens=200,
            turns=1,
            sequence_tokens_per_s=235,
            engine_tokens_per_s=3000,
            train_tokens_per_s=tokens / gpus / train_s,
            push_s=5,
            push_overlap=0,
        )

    in_turn, apart = speeds(PUBLISHED_TRAIN_S["sync"], 128), speeds(PUBLISHED_TRAIN_S["fully_async"], 64)
    workload = AssumedWorkload(in_turn.fill(config.rollout), config.rollout, seed=0)
    sync = simulate(config, in_turn, workload, ScheduleSetup("sync", 128, 128, shared=True), steps=3)
    found = {"sync, 128 GPUs in turn": sync}
    for setup in (
        ScheduleSetup("one_step_off", 64, 64),
        *(ScheduleSetup("fully_async", 64, 64, False, k) for k in (1, 2, 4, 6)),
    ):
        name = f"{setup.mode}, 64 + 64" + (f", staleness {setup.max_staleness}" if setup.max_staleness else "")
        found[name] = simulate(config, apart, workload, setup, steps=4)
    show("published: 8,192 sessions a step on 128 GPUs, with verl's own speeds", found, sync)
    theirs = PUBLISHED_STEP_S["sync"] / PUBLISHED_STEP_S["fully_async"]
    print(
        f"verl: sync 356.3 s (generation 177.9 s), fully async 150.6 s = {theirs:.2f} ×; over whole runs 2.35 to 2.67 ×"
    )
    print(f"ours, predicted: sync {sync.step_s:.1f} s (generation {sync.wait_s:.1f} s)")


def speak(request: Request, rng: random.Random) -> str:
    """Tool calls that wait as long as they say, then an answer."""
    turns = sum(message["role"] == "assistant" for message in request.messages)
    if turns >= REAL_TURNS - 1:
        return "42"
    return f'<tool_call>{{"name": "wait", "arguments": {{"seconds": {rng.random() * 0.2:.3f}}}}}</tool_call>'


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "done"


class RealRun:
    """A schedule in real time, with sleeps in place of GPUs."""

    def __init__(self, mode: str, folder: Path) -> None:
        self._config = _config(REAL, f"trainer.mode={mode}")
        max_staleness = {"sync": 0, "one_step_off": 1, "fully_async": self._config.trainer.max_staleness}[mode]
        self._window = MeasuredSteps.of(REAL_STEPS, max_staleness)
        total = MeasuredSteps.of(
            REAL_STEPS, self._config.trainer.max_staleness
        ).total  # so that one run meets every task
        self._config = _config(REAL, f"trainer.mode={mode}", f"trainer.total_training_steps={total}")
        self._tasks = [Task(str(at), ({"role": "user", "content": "Wait."},)) for at in range(total * 12)]
        self._folder = folder
        self._policy = CountingPolicy()
        self._marks: list[float] = []

    async def play(self) -> float:
        """Seconds of a step, once the run has settled."""
        config, policy = self._config, self._policy
        async with Journal.open(self._folder, max_mb=1024) as journal:
            manager = await AgentLoopManager.create(
                rollout=config.rollout, model=config.model, parts=RolloutParts(journal=journal)
            )
            async with manager:
                weights = WeightSync.of(config, _Sender())
                networks = StepParts(policy, config.actor, config.algorithm, config.trainer, policy, policy)
                trainer = Trainer(
                    config,
                    learner=TimedLearner(self.train, networks, weights.lock),
                    rollout=manager,
                    weights=weights,
                    tasks=TaskFeed(TaskSource(self._tasks, shuffle=False, seed=0)),
                    checkpoints=NoCheckpoints(),
                    journal=journal,
                    trackers=Trackers({}),
                    view=self,
                    history=NoHistory(),
                )
                await SCHEDULES[config.trainer.mode](trainer)
        first, last = self._marks[self._window.first - 1], self._marks[self._window.last - 1]
        return (last - first) / (self._window.last - self._window.first)

    async def train(self, groups: Sequence[Group], control: KLControl | None) -> StepReport:
        """Sleep as long as the tokens take."""
        plans = [_timed_plan(item) for group in groups for item in group.survivors]
        await asyncio.sleep(sum(plan.sampled_tokens + plan.prompt_tokens for plan in plans) / REAL_TRAIN_RATE)
        self._policy.version += 1
        return StepReport(self._policy.version, {}, control or KLControl.start(self._config.algorithm.kl_ctrl))

    def begin(self, total_steps: int) -> None: ...

    def watch(self, phase: object) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._marks.append(time.perf_counter())


class _Sender(NoSender):
    """Takes the time of a push."""

    async def publish(self, version: int) -> WeightUpdate:
        await asyncio.sleep(REAL_PUSH_S)
        return await super().publish(version)


class Remembered:
    """What each session of a recorded run did, by name."""

    def __init__(self, run_dir: Path) -> None:
        with JournalReader.open(run_dir) as reader:
            found = [entry.trajectory for entry in reader.trajectories()]
        self._plans = {(item.uid, item.sample): _timed_plan(item) for item in found}
        self.mean = MeanSession.of(list(self._plans.values()))

    def plan_of(self, uid: str, sample: int) -> SessionPlan:
        return self._plans[uid, sample]

    def reward_of(self, uid: str, sample: int) -> float:
        return float(sample % 2)


def _timed_plan(trajectory: Trajectory) -> SessionPlan:
    """A session in which a second of the scripted engine is so many tokens: its answers all have the same length."""
    turns = [turn for row in trajectory.rows for turn in row.turns]
    return SessionPlan(
        1, tuple(PlannedTurn(max(1, round(turn.generate_s * REAL_TOKENS_PER_S)), turn.tool_s) for turn in turns)
    )


def bench_real() -> None:
    speeds = Assumptions(
        sequence_tokens_per_s=REAL_TOKENS_PER_S,
        engine_tokens_per_s=1e12,
        prefill_tokens_per_s=1e12,
        train_tokens_per_s=REAL_TRAIN_RATE,
        push_s=REAL_PUSH_S,
    )
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("sync", "one_step_off", "fully_async"):
            measured[mode] = asyncio.run(RealRun(mode, Path(folder) / mode).play())
        workload = Remembered(Path(folder) / "sync")
    rows = [("", "measured", "predicted", "error")]
    errors = []
    config = _config(REAL)
    for mode, seconds in measured.items():
        setup = ScheduleSetup(mode, 1, 4, max_staleness=config.trainer.max_staleness)  # type: ignore[arg-type]
        predicted = simulate(config, speeds, workload, setup, steps=REAL_STEPS).step_s
        errors.append(abs(predicted / seconds - 1))
        rows.append((mode, f"{seconds:.3f} s", f"{predicted:.3f} s", f"{predicted / seconds - 1:+.1%}"))
    print(f"\nreal: 48 sessions a step, in seconds of this machine\n{draw_table(rows, left=(0,))}")
    print(f"mean error {statistics.fmean(errors):.1%}")


def _config(text: str, *words: str) -> TrainConfig:
    config = loads(text, "bench", words)
    assert isinstance(config, TrainConfig)
    return config


if __name__ == "__main__":
    parts = {"reasoning": bench_reasoning, "published": bench_published, "real": bench_real}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; by default all of them")
    chosen = parser.parse_args().parts
    for unknown in set(chosen) - set(parts):
        parser.error(f"there is no part {unknown}; there are {', '.join(parts)}")
    for part in chosen or parts:
        parts[part]()
