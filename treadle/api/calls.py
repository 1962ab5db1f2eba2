"""Calls of the Python interface: train, sft, rollout, the same as coroutines, and the YAML that a call amounts to.

A blocking call runs in the thread that makes it, as a command does, Ctrl-C included; where that thread has a running
event loop (a notebook cell), and for the coroutines, in a thread of its own. Stopping it, by Ctrl-C or by
cancelling the awaiting task, is the same everywhere: the step under way is finished and saved.
"""

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from treadle.api.arguments import CallArguments, PreparedRun, Rewards, Tools, prepare
from treadle.api.interrupts import make_interrupt
from treadle.api.results import Evaluation, Run
from treadle.api.tasks import Tasks
from treadle.config import SFTRunConfig, TrainConfig
from treadle.errors import ConfigError
from treadle.journal import set_aside
from treadle.terminal import note

if TYPE_CHECKING:
    from treadle.cluster.signals import StopSignals

T = TypeVar("T")

PathLike = str | os.PathLike[str]
Model = PathLike | Mapping[str, Any]

_NOTHING_TRAINED = "interrupted before the first step: nothing was trained"


def train(
    *configs: PathLike,
    model: Model | None = None,
    tasks: Tasks | None = None,
    reward: Rewards | None = None,
    tools: Tools | None = None,
    agent: str | type | Callable[..., Any] | None = None,
    environment: str | type | None = None,
    steps: int | None = None,
    validation_tasks: Tasks | None = None,
    run_dir: PathLike | None = None,
    fresh: bool = False,
    allow_changes: bool = False,
    **keys: Any,
) -> Run:
    """Train a model with your tasks, reward and tools, and wait for it; `await train_async(...)` in async code.

    Args:
        configs: YAML files or recipes such as "calculator" to begin with, as `treadle train` takes them.
        model: a Hugging Face directory or name; or a dict of keys of the `model` section.
        tasks: rows as dicts with "prompt" and "answer", a file, a `datasets.Dataset`, or a function that returns rows.
        reward: a function, the name of a built-in such as "math", or a list or dict of them. A function takes what it
            needs by name: `response`, `answer`, `messages`, `task`, `trajectory`, … In a dict, a value may be a dict
            with `path` (the function), `weight` and `kwargs`.
        tools: functions with type hints and a docstring, or classes with one instance for each session.
        agent: an agent loop, as a class or by name; with tools it is "tool_agent". Or a function `agent(base_url,
            api_key, task)`, async or plain, that talks to the model through any SDK and may return a reward.
        environment: an environment class, for tasks over several turns.
        steps: training steps (`trainer.total_training_steps`).
        validation_tasks: tasks that measure success before and after training; `trainer.test_freq` says how often else.
        run_dir: the directory of the run. One that holds a run goes on with it; without one, each call has a new one.
        fresh: set aside what `run_dir` holds, and begin anew.
        allow_changes: go on with settings that changed since.
        keys: any key of the config: `**{"rollout.n": 8}`, or a section as a dict: `rollout={"n": 8}`. Where a key takes
            an import path, give the function or class itself.

    Functions run as copies in other processes: what they change in your variables is not seen here. Ctrl-C finishes the
    step under way, saves, and raises KeyboardInterrupt.

    >>> import treadle
    >>> run = treadle.train("calculator", steps=1, validation_tasks=[{"prompt": "1+2=", "answer": "3"}],
    ...                     data={"train_batch_size": 4}, actor={"ppo_mini_batch_size": 4})
    >>> run.steps, len(run.trajectories(step=1))
    (1, 32)
    """
    given = CallArguments(
        "train",
        configs,
        model=model,
        tasks=tasks,
        reward=reward,
        tools=tools,
        agent=agent,
        environment=environment,
        run_dir=run_dir,
        keys=keys,
        steps=steps,
        validation_tasks=validation_tasks,
    )
    return _TrainingCall(prepare(given), fresh, allow_changes).run_blocking()


async def train_async(
    *configs: PathLike,
    model: Model | None = None,
    tasks: Tasks | None = None,
    reward: Rewards | None = None,
    tools: Tools | None = None,
    agent: str | type | Callable[..., Any] | None = None,
    environment: str | type | None = None,
    steps: int | None = None,
    validation_tasks: Tasks | None = None,
    run_dir: PathLike | None = None,
    fresh: bool = False,
    allow_changes: bool = False,
    **keys: Any,
) -> Run:
    """`train` as a coroutine. Cancelling the awaiting task finishes the step under way and saves."""
    given = CallArguments(
        "train",
        configs,
        model=model,
        tasks=tasks,
        reward=reward,
        tools=tools,
        agent=agent,
        environment=environment,
        run_dir=run_dir,
        keys=keys,
        steps=steps,
        validation_tasks=validation_tasks,
    )
    return await _TrainingCall(prepare(given), fresh, allow_changes).run()


def sft(
    *configs: PathLike,
    model: Model | None = None,
    tasks: Tasks | None = None,
    tools: Tools | None = None,
    steps: int | None = None,
    validation_tasks: Tasks | None = None,
    run_dir: PathLike | None = None,
    fresh: bool = False,
    allow_changes: bool = False,
    **keys: Any,
) -> Run:
    """Fine-tune a model on conversations, and wait for it; `await sft_async(...)` in async code.

    Args:
        configs: YAML files or recipes to begin with, as `treadle sft` takes them.
        model: a Hugging Face directory or name, or the directory of a run; or a dict of keys of the `model` section.
        tasks: rows as dicts with "messages", or with "prompt" and "response"; a file; a `datasets.Dataset`; a function
            that returns rows; or the directory of a run, whose trajectories train from `sft={"min_reward": …}` on.
        tools: functions whose schemas the prompts show, as those of `train` do.
        steps: training steps (`trainer.total_training_steps`); without it, `trainer.total_epochs`.
        validation_tasks: rows whose loss is measured before and after; `trainer.test_freq` says how often else.
        run_dir: the directory of the run. One that holds a run goes on with it; without one, each call has a new one.
        fresh: set aside what `run_dir` holds, and begin anew.
        allow_changes: go on with settings that changed since.
        keys: any key of the config, as for `train`.

    >>> import treadle
    >>> rows = [{"prompt": f"{a}+1=", "response": f"#### {a + 1}"} for a in range(8)]
    >>> run = treadle.sft(model="treadle/tiny-calculator", tasks=rows, steps=2, actor={"optim.lr": 1e-3})
    >>> run.steps, sorted(run.metrics)[-1]
    (2, 'sft/tokens_per_s')
    """
    return _SFTCall(
        prepare(_sft_arguments(configs, model, tasks, tools, steps, validation_tasks, run_dir, keys)),
        fresh,
        allow_changes,
    ).run_blocking()


async def sft_async(
    *configs: PathLike,
    model: Model | None = None,
    tasks: Tasks | None = None,
    tools: Tools | None = None,
    steps: int | None = None,
    validation_tasks: Tasks | None = None,
    run_dir: PathLike | None = None,
    fresh: bool = False,
    allow_changes: bool = False,
    **keys: Any,
) -> Run:
    """`sft` as a coroutine. Cancelling the awaiting task finishes the step under way and saves."""
    given = _sft_arguments(configs, model, tasks, tools, steps, validation_tasks, run_dir, keys)
    return await _SFTCall(prepare(given), fresh, allow_changes).run()


def _sft_arguments(
    configs: tuple[PathLike, ...],
    model: Model | None,
    tasks: Tasks | None,
    tools: Tools | None,
    steps: int | None,
    validation_tasks: Tasks | None,
    run_dir: PathLike | None,
    keys: Mapping[str, Any],
) -> CallArguments:
    return CallArguments(
        "sft",
        configs,
        model=model,
        tasks=tasks,
        reward=None,
        tools=tools,
        agent=None,
        environment=None,
        run_dir=run_dir,
        keys=keys,
        steps=steps,
        validation_tasks=validation_tasks,
    )


def to_yaml(
    *configs: PathLike,
    model: Model | None = None,
    tasks: Tasks | None = None,
    reward: Rewards | None = None,
    tools: Tools | None = None,
    agent: str | type | Callable[..., Any] | None = None,
    environment: str | type | None = None,
    steps: int | None = None,
    validation_tasks: Tasks | None = None,
    run_dir: PathLike | None = None,
    **keys: Any,
) -> str:
    """The YAML that the same call of `train` amounts to, with all that `treadle train` needs to do the same.

    Nothing is trained: the run directory is made, with `train.yaml` and, in `inputs/`, tasks and functions of the call.

    >>> import treadle
    >>> print(treadle.to_yaml("calculator", steps=5, run_dir="runs/five"))  # doctest: +ELLIPSIS
    # again:  treadle train runs/five/train.yaml
    # go on:  treadle train runs/five/train.yaml logging.run_dir=runs/five
    model:
      path: treadle/tiny-calculator
    ...
    trainer:
      mode: sync
      total_training_steps: 5
      test_freq: 10
    <BLANKLINE>
    """
    given = CallArguments(
        "train",
        configs,
        model=model,
        tasks=tasks,
        reward=reward,
        tools=tools,
        agent=agent,
        environment=environment,
        run_dir=run_dir,
        keys=keys,
        steps=steps,
        validation_tasks=validation_tasks,
    )
    prepared = prepare(given)
    prepared.write()
    return prepared.to_yaml()


def rollout(
    *configs: PathLike,
    model: Model | None = None,
    tasks: Tasks | None = None,
    reward: Rewards | None = None,
    tools: Tools | None = None,
    agent: str | type | Callable[..., Any] | None = None,
    environment: str | type | None = None,
    run_dir: PathLike | None = None,
    fresh: bool = False,
    **keys: Any,
) -> Evaluation:
    """Evaluate: sample every task `rollout.n` times, score the answers, and keep the trajectories. Nothing is trained.

    Takes what `train` takes. `model=run.model_dir` evaluates what a run has trained. `treadle.rollout` is a package,
    too: it can be called, and its modules are imported as ever.

    >>> import treadle
    >>> found = treadle.rollout(model="treadle/tiny-calculator", tasks=[{"prompt": "1+2=", "answer": "3"}],
    ...                         reward="number_match", rollout={"n": 2, "response_length": 16})
    >>> len(found.trajectories())
    2
    >>> 0 <= found.success <= 1
    True
    """
    given = CallArguments(
        "rollout",
        configs,
        model=model,
        tasks=tasks,
        reward=reward,
        tools=tools,
        agent=agent,
        environment=environment,
        run_dir=run_dir,
        keys=keys,
    )
    return _RolloutCall(prepare(given), fresh).run_blocking()


async def rollout_async(
    *configs: PathLike,
    model: Model | None = None,
    tasks: Tasks | None = None,
    reward: Rewards | None = None,
    tools: Tools | None = None,
    agent: str | type | Callable[..., Any] | None = None,
    environment: str | type | None = None,
    run_dir: PathLike | None = None,
    fresh: bool = False,
    **keys: Any,
) -> Evaluation:
    """`rollout` as a coroutine. Cancelling the awaiting task ends it; trajectories that are done are kept."""
    given = CallArguments(
        "rollout",
        configs,
        model=model,
        tasks=tasks,
        reward=reward,
        tools=tools,
        agent=agent,
        environment=environment,
        run_dir=run_dir,
        keys=keys,
    )
    return await _RolloutCall(prepare(given), fresh).run()


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _RunningCall(Generic[T]):
    """A prepared run, in this thread or in one of its own."""

    def __init__(self, prepared: PreparedRun, fresh: bool) -> None:
        self.prepared = prepared
        self._fresh = fresh

    def _work(self) -> T:
        raise NotImplementedError

    def _stop(self) -> None:
        """Ask the work in the other thread to end in order."""
        raise NotImplementedError

    def run_blocking(self) -> T:
        if not _has_running_loop():
            return self._work_in_directory()
        future = self._start()
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                self._stop()

    async def run(self) -> T:
        future = self._start()
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._stop()
            while not waiting.done():
                try:
                    await asyncio.wait([waiting])
                except asyncio.CancelledError:
                    continue  # it saves, and cannot do so faster
            waiting.exception()
            raise

    def _start(self) -> "Future[T]":
        future: Future[T] = Future()
        context = copy_context()

        def work() -> None:
            try:
                future.set_result(context.run(self._work_in_directory))
            except BaseException as error:  # noqa: BLE001  whatever it is, the caller must hear it
                future.set_exception(error)

        threading.Thread(target=work, name=f"treadle-{self.prepared.call}", daemon=True).start()
        return future

    def _work_in_directory(self) -> T:
        """Do the work; a config that is refused leaves no directory behind that was not there before."""
        prepared = self.prepared
        if self._fresh:
            set_aside(prepared.run_dir)
        is_new, goes_on = not prepared.run_dir.exists(), prepared.has_run
        prepared.write()
        try:
            result = self._work()
        except ConfigError as error:
            if is_new and not prepared.has_run:
                shutil.rmtree(prepared.run_dir, ignore_errors=True)
            raise prepared.explain(error) from None
        if goes_on:
            prepared.write_yaml()
        return result

    @property
    def _command(self) -> list[str]:
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        return [f"treadle.{self.prepared.call}", *([script] if script else [])]


class _TrainingCall(_RunningCall[Run]):
    def __init__(self, prepared: PreparedRun, fresh: bool, allow_changes: bool) -> None:
        super().__init__(prepared, fresh)
        self._allow_changes = allow_changes
        self._lock = threading.Lock()
        self._signals: StopSignals | None = None
        self._stopping = False

    def _work(self) -> Run:
        from treadle.cli.results import next_commands
        from treadle.cli.train import describe_end, run_training

        config, run_dir = self.prepared.config, self.prepared.run_dir
        assert isinstance(config, TrainConfig), "a call of train has a trainer section"
        try:
            result = run_training(
                config, self._command, allow_changes=self._allow_changes, on_signals=self._take_signals
            )
        except KeyboardInterrupt:
            raise make_interrupt(_NOTHING_TRAINED) from None
        if result.interrupted:
            for text in result.notes:
                note(f"note: {text}")
            raise self._interruption(result.steps)
        self._conclude(describe_end(result), next_commands(run_dir))
        return Run(run_dir)

    def _conclude(self, end: str, commands: str) -> None:
        """The last lines of the command, beside the progress; where that is not wanted, the notes alone."""
        if "console" in self.prepared.config.logging.logger:
            note(f"\n{end}\n{commands}")
        else:
            for line in end.splitlines():
                if line.startswith("note: "):
                    note(line)

    def _interruption(self, steps: int) -> KeyboardInterrupt:
        run_dir = self.prepared.run_dir
        where = self.prepared.command(f"logging.run_dir={run_dir}")
        return make_interrupt(
            f"stopped after step {steps} and saved in {run_dir}: the same call with "
            f"run_dir={str(run_dir)!r}, or `{where}`, goes on from there"
        )

    def _take_signals(self, signals: "StopSignals") -> None:
        with self._lock:
            self._signals = signals
            if self._stopping:
                signals.request()

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            if self._signals is not None:
                self._signals.request()


class _SFTCall(_TrainingCall):
    def _work(self) -> Run:
        from treadle.cli.results import next_sft_commands
        from treadle.cli.sft import describe_end, run_sft

        config = self.prepared.config
        assert isinstance(config, SFTRunConfig), "a call of sft has an sft section"
        try:
            result = run_sft(config, self._command, allow_changes=self._allow_changes, on_signals=self._take_signals)
        except KeyboardInterrupt:
            raise make_interrupt(_NOTHING_TRAINED) from None
        if result.interrupted:
            raise self._interruption(result.steps)
        self._conclude(describe_end(result), next_sft_commands(self.prepared.run_dir))
        return Run(self.prepared.run_dir)


class _RolloutCall(_RunningCall[Evaluation]):
    def __init__(self, prepared: PreparedRun, fresh: bool) -> None:
        super().__init__(prepared, fresh)
        self._stopping = threading.Event()

    def _work(self) -> Evaluation:
        from treadle.cli.rollout import run_evaluation

        run_dir = self.prepared.run_dir
        result = run_evaluation(self.prepared.config, self._command, stop=self._stopping)
        if result.interrupted:
            raise make_interrupt(
                f"stopped after {result.summary.num_trajectories} trajectories, which are kept in {run_dir}: the same "
                f"call with run_dir={str(run_dir)!r} goes on from there"
            )
        return Evaluation(run_dir, result.summary)

    def _stop(self) -> None:
        self._stopping.set()
