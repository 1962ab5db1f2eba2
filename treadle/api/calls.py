"""Calls of the Python interface: train, sft, rollout, the same as coroutines, and the YAML that a call amounts to.

Owns the signatures and what they say. What the arguments mean is in `arguments`, how a call runs in `running_call`.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from treadle.api.arguments import CallArguments, Rewards, Tools, prepare
from treadle.api.results import Evaluation, Run
from treadle.api.running_call import RolloutCall, SFTCall, TrainingCall
from treadle.api.tasks import Tasks

PathLike = str | os.PathLike[str]
Model = PathLike | Mapping[str, Any]


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
    return TrainingCall(prepare(given), fresh, allow_changes).run_blocking()


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
    """`train` as a coroutine. Cancelling the awaiting task finishes the step under way and saves.

    >>> import asyncio, treadle
    >>> sums = [{"prompt": "1+2=", "answer": "3"}]
    >>> run = asyncio.run(treadle.train_async("calculator", steps=1, validation_tasks=sums,
    ...                                       data={"train_batch_size": 4}, actor={"ppo_mini_batch_size": 4}))
    >>> run.steps
    1
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
    return await TrainingCall(prepare(given), fresh, allow_changes).run()


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
    return SFTCall(
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
    """`sft` as a coroutine. Cancelling the awaiting task finishes the step under way and saves.

    >>> import asyncio, treadle
    >>> rows = [{"prompt": f"{a}+1=", "response": f"#### {a + 1}"} for a in range(8)]
    >>> run = asyncio.run(treadle.sft_async(model="treadle/tiny-calculator", tasks=rows, steps=1))
    >>> run.steps
    1
    """
    given = _sft_arguments(configs, model, tasks, tools, steps, validation_tasks, run_dir, keys)
    return await SFTCall(prepare(given), fresh, allow_changes).run()


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
    return RolloutCall(prepare(given), fresh).run_blocking()


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
    """`rollout` as a coroutine. Cancelling the awaiting task ends it; trajectories that are done are kept.

    >>> import asyncio, treadle
    >>> tasks = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2+2=", "answer": "4"}]
    >>> found = asyncio.run(treadle.rollout_async(model="treadle/tiny-calculator", tasks=tasks, reward="number_match",
    ...                                           rollout={"response_length": 16}))
    >>> len(found.trajectories())
    2
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
    return await RolloutCall(prepare(given), fresh).run()
