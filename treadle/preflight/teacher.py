"""Preflight of a privileged teacher: `ref.prompt_template` can be written for every training task, and fits.

Owns what would end a step after its samples were drawn, and can be known before: fields that rows lack, prompts that
the reference would not find again (they show tools, or an agent writes its own), and rows that are too long for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle.config import TrainConfig
from treadle.config.rollout import GATEWAY_LOOPS
from treadle.data.renderer import Renderer
from treadle.errors import Failure, Mistake, RunError
from treadle.preflight.report import PreflightReport
from treadle.rollout.agent_loop import BUILT_IN
from treadle.trainer.teacher_prompt import KEY, TeacherPrompt
from treadle.types import Task

_PLAIN_LOOPS = ("single_turn_agent", "tool_agent")
"""Loops whose rows begin with the task's own prompt."""

_TOOLS_FIX = "set model.describe_tools=false and name the tools in the prompt, or leave the template out"

Schemas = Mapping[tuple[str, ...] | None, tuple[dict[str, Any], ...]]


def check_teacher_prompts(
    config: TrainConfig,
    renderer: Renderer,
    tasks: Sequence[Task],
    schemas: Schemas | None,
    report: PreflightReport,
    *,
    most: int | None,
) -> None:
    """Try the template on every task, and render the longest `most` of its prompts; None for all."""
    teacher = TeacherPrompt.of(config, renderer)
    if teacher is None or not tasks:
        return
    report.add(_check_loops(config, tasks, report))
    texts = dict[str, str]()
    for task in tasks:
        try:
            texts[task.uid] = teacher.fill(task)
        except RunError as error:
            report.add([_mistake(config, str(error), "use fields that every row has, or leave those rows out")])
            return
    longest = sorted(tasks, key=lambda task: -len(texts[task.uid]))[:most]
    if schemas is None:
        report.skip(f"tools in prompts that {KEY} writes anew", "the tools were not loaded")
    report.add(_check_prompts(config, renderer, teacher, longest, schemas, report))


def _check_prompts(
    config: TrainConfig,
    renderer: Renderer,
    teacher: TeacherPrompt,
    tasks: Sequence[Task],
    schemas: Schemas | None,
    report: PreflightReport,
) -> Iterator[Mistake]:
    """That the reference finds the student's prompts again, and has room for the longest row with its own."""
    rollout, most, whose = config.rollout, 0, ""
    for task in tasks:
        try:
            plain, privileged = teacher.prompts(task)
            shown = plain if schemas is None else renderer.prompt(task.messages, schemas[task.tools])
        except Failure:
            continue  # the check of prompts tells it
        if shown != plain:
            yield _mistake(config, f"the prompt of {task.uid} shows tools, and cannot be written anew", _TOOLS_FIX)
            return
        if len(plain) > rollout.prompt_length and rollout.overlong_prompts != "drop":
            problem = f"the prompt of {task.uid} is longer than rollout.prompt_length: cut, it cannot be written anew"
            yield _mistake(config, problem, "raise it, or set rollout.overlong_prompts=drop")
            return
        if len(plain) <= rollout.prompt_length and len(privileged) > most:
            most, whose = len(privileged), task.uid
    needed = most + rollout.response_length
    if needed > rollout.sequence_length():
        problem = (
            f"with it, {whose} has {most:,} tokens: {needed:,} with a response of rollout.response_length, and the "
            f"reference is loaded for {rollout.sequence_length():,}"
        )
        yield _mistake(config, problem, f"set rollout.max_model_len={needed}, or write less")
    elif whose:
        report.note("teacher", f"prompts of at most {most:,} tokens ({whose}) by {KEY}")


def _check_loops(config: TrainConfig, tasks: Sequence[Task], report: PreflightReport) -> Iterator[Mistake]:
    """Loops whose rows begin with prompts of their own."""
    agent = config.rollout.agent
    for name in dict.fromkeys(task.agent or agent.default_agent_loop for task in tasks):
        loop = agent.loops.get(name)
        path = name if loop is None or loop.path is None else loop.path
        if path in GATEWAY_LOOPS:
            problem = f"prompts of {name} are the agent's own, and cannot be written anew"
            yield _mistake(config, problem, f"use {' or '.join(_PLAIN_LOOPS)}, or leave the template out")
        elif path not in _PLAIN_LOOPS and path not in [BUILT_IN[plain] for plain in _PLAIN_LOOPS]:
            report.warnings.append(f"{KEY}: a step ends with an error where {name} writes prompts of its own")


def _mistake(config: TrainConfig, problem: str, fix: str) -> Mistake:
    return Mistake(KEY, problem.removeprefix(f"{KEY} "), config.ref.prompt_template, config.origin(KEY), fix)
