"""All prompts of a run, looked at before it starts: which are too long, and which ask for what does not exist.

Owns the check of tasks against `rollout`. Renders every prompt once, with the tools its task may use, and keeps nothing
but counts. A prompt that cannot be rendered at all is left to the run, where it fails by itself.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treadle.config import RolloutConfig
from treadle.data.renderer import Renderer
from treadle.errors import ConfigError, Mistake, PromptFailure, ToolFailure, nearest
from treadle.rollout.agent_loop import known_loops
from treadle.rollout.tools import Toolbox
from treadle.types import Task

MAX_MISTAKES = 20


@dataclass(frozen=True, slots=True)
class PromptSurvey:
    """What was found."""

    count: int
    longest: int = 0
    """Tokens of the longest prompt."""
    longest_uid: str = ""
    overlong: tuple[str, ...] = ()
    """Tasks with more than `rollout.prompt_length`, which are dropped or cut."""

    def note(self, rollout: RolloutConfig) -> str | None:
        """What a person should know before the run, if anything."""
        if not self.overlong:
            return None
        becomes = "are dropped" if rollout.overlong_prompts == "drop" else f"are cut ({rollout.overlong_prompts})"
        return f"{_describe(self, rollout)}; they {becomes}"


async def survey_prompts(tasks: Iterable[Task], rollout: RolloutConfig, renderer: Renderer) -> PromptSurvey:
    """Look at every task; a ConfigError says what the run could not do with some of them."""
    async with await Toolbox.create(rollout.multi_turn) as toolbox:
        return await asyncio.to_thread(_survey, list(tasks), rollout, renderer, toolbox)


def _survey(tasks: Sequence[Task], rollout: RolloutConfig, renderer: Renderer, toolbox: Toolbox) -> PromptSurvey:
    longest, longest_uid, overlong = 0, "", list[str]()
    mistakes = list[Mistake]()
    loops = known_loops(rollout)
    for task in tasks:
        mistakes += _unknown_agent(task, loops, rollout)
        try:
            length = len(renderer.prompt(task.messages, toolbox.schemas(task.tools)))
        except PromptFailure:
            continue
        except ToolFailure as failure:
            mistakes.append(Mistake(f"task {task.uid}", str(failure), task.tools))
            continue
        if length > longest:
            longest, longest_uid = length, task.uid
        if length > rollout.prompt_length:
            overlong.append(task.uid)
        if len(mistakes) >= MAX_MISTAKES:
            break
    survey = PromptSurvey(len(tasks), longest, longest_uid, tuple(overlong))
    if overlong and rollout.overlong_prompts == "error":
        fix = f"raise it to {longest}, or set rollout.overlong_prompts to drop or truncate_left"
        key, value = "rollout.prompt_length", rollout.prompt_length
        mistakes.append(Mistake(key, _describe(survey, rollout), value, rollout.origin("prompt_length"), fix))
    if mistakes:
        raise ConfigError(mistakes)
    return survey


def _unknown_agent(task: Task, known: Sequence[str], rollout: RolloutConfig) -> list[Mistake]:
    if task.agent is None or task.agent in known or rollout.agent.allow_imports_from_data:
        return []
    problem = f"asks for the agent loop {task.agent!r}; known: {', '.join(known)}"
    fix = "name it under rollout.agent.loops, or set rollout.agent.allow_imports_from_data for data that you trust"
    return [Mistake(f"task {task.uid}", problem, task.agent, fix=nearest(task.agent, known) or fix)]


def _describe(survey: PromptSurvey, rollout: RolloutConfig) -> str:
    verb = "is" if len(survey.overlong) == 1 else "are"
    return (
        f"{len(survey.overlong)} of {survey.count} prompts {verb} longer than {rollout.prompt_length} tokens; the "
        f"longest, of {survey.longest_uid}, has {survey.longest}"
    )
