"""Start-up checks: every prompt of a run, and the chat template, looked at before the first session.

Owns what is refused at the start, with the key to change, and what is only reported: prompts that are too long, tasks
that name unknown tools or agent loops, a chat template that does not show tools, take their results, or write calls
as `rollout.multi_turn.format` reads them. Renders every prompt once, with the tools its task may use, and keeps only
counts. A prompt that cannot be rendered at all is left to the run, where its trajectory fails. The comparison of
renderings is the renderer's parity. Knows no engines.
Invariant: a rollout with tools starts only if the template shows them, or they are written into the prompt in the
format that its parser reads.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from treadle.config import RolloutConfig
from treadle.config.rollout import AGENT_LOOPS, MultiTurnConfig
from treadle.data.chat_template import FALLBACK_FORMAT
from treadle.data.renderer import Renderer
from treadle.data.rendering_parity import IGNORES_TOOLS, BoundaryVerdict, RenderingParity
from treadle.errors import ConfigError, Mistake, PromptFailure, ToolFailure, nearest
from treadle.rollout.agent_loop import known_loops
from treadle.rollout.parsers import PARSERS, parser
from treadle.rollout.tools import Toolbox
from treadle.types import Task

MAX_MISTAKES = 20


@dataclass(frozen=True, slots=True)
class PromptSurvey:
    """Result of the check of all prompts."""

    count: int
    longest: int = 0
    """Tokens of the longest prompt."""
    longest_uid: str = ""
    overlong: tuple[str, ...] = ()
    """Tasks with more than `rollout.prompt_length`, which are dropped or cut."""

    def note(self, rollout: RolloutConfig) -> str | None:
        """A warning before the run, if there is one."""
        if not self.overlong:
            return None
        becomes = "are dropped" if rollout.overlong_prompts == "drop" else f"are cut ({rollout.overlong_prompts})"
        return f"{_describe_overlong(self, rollout)}; they {becomes}"


async def survey_prompts(tasks: Iterable[Task], rollout: RolloutConfig, renderer: Renderer) -> PromptSurvey:
    """Check every task; a ConfigError names those that the run cannot use."""
    async with await Toolbox.create(rollout.multi_turn, rollout.sandbox) as toolbox:
        return await asyncio.to_thread(_survey, list(tasks), rollout, renderer, toolbox)


def _survey(tasks: Sequence[Task], rollout: RolloutConfig, renderer: Renderer, toolbox: Toolbox) -> PromptSurvey:
    longest, longest_uid, overlong = 0, "", list[str]()
    mistakes = list[Mistake]()
    loops = known_loops(rollout)
    for task in tasks:
        mistakes += _unknown_agent(task, loops, rollout)
        if not task.messages:
            mistakes += check_promptless(task, rollout)
            continue
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
        mistakes.append(Mistake(key, _describe_overlong(survey, rollout), value, rollout.origin("prompt_length"), fix))
    if mistakes:
        raise ConfigError(mistakes)
    return survey


def check_promptless(task: Task, rollout: RolloutConfig) -> list[Mistake]:
    """A task without a prompt needs an environment that writes one."""
    agent = rollout.agent.loops.get(task.agent or rollout.agent.default_agent_loop)
    name = (agent and agent.path) or task.agent or rollout.agent.default_agent_loop
    if name != "environment_agent" and name in AGENT_LOOPS:
        fix = "give it a prompt, or set rollout.agent.default_agent_loop to environment_agent"
        return [Mistake(f"task {task.uid}", f"has no prompt, and {name} writes none", fix=fix)]
    return []


def _unknown_agent(task: Task, known: Sequence[str], rollout: RolloutConfig) -> list[Mistake]:
    if task.agent is None or task.agent in known or rollout.agent.allow_imports_from_data:
        return []
    problem = f"asks for the agent loop {task.agent!r}; known: {', '.join(known)}"
    fix = "name it under rollout.agent.loops, or set rollout.agent.allow_imports_from_data for data that you trust"
    return [Mistake(f"task {task.uid}", problem, task.agent, fix=nearest(task.agent, known) or fix)]


def _describe_overlong(survey: PromptSurvey, rollout: RolloutConfig) -> str:
    verb = "is" if len(survey.overlong) == 1 else "are"
    return (
        f"{len(survey.overlong)} of {survey.count} prompts {verb} longer than {rollout.prompt_length} tokens; the "
        f"longest, of {survey.longest_uid}, has {survey.longest}"
    )


_FORMAT_KEY = "rollout.multi_turn.format"
_TEMPLATE_KEY = "model.custom_chat_template"


def check_template(parity: RenderingParity, multi_turn: MultiTurnConfig) -> list[str]:
    """Notes about a template; a ConfigError where it cannot do what the rollout needs."""
    has_tools = bool(multi_turn.tools or multi_turn.mcp_servers)
    notes = list(_check_tools(parity, multi_turn)) if has_tools else []
    if parity.differences:
        notes.append(f"turn by turn, the chat template gives other ids than all at once:\n{parity}")
    return notes


def _check_tools(parity: RenderingParity, multi_turn: MultiTurnConfig) -> Iterator[str]:
    if not parity.shows_tools:
        if multi_turn.format != FALLBACK_FORMAT:
            problem = f"{IGNORES_TOOLS}, which {multi_turn.format!r} does not read"
            fix = f"set it to {FALLBACK_FORMAT}, or give a template that shows tools as {_TEMPLATE_KEY}"
            raise ConfigError([Mistake(_FORMAT_KEY, problem, multi_turn.format, multi_turn.origin("format"), fix)])
        yield IGNORES_TOOLS
    _check_results(parity)
    reads = [name for name in (multi_turn.format, *PARSERS) if _reads(name, parity.call)]
    if parity.call and multi_turn.format not in reads:
        others = f"; {', '.join(reads)} would" if reads else ""
        yield f"{_FORMAT_KEY}={multi_turn.format} does not read calls as the chat template writes them{others}"


def _check_results(parity: RenderingParity) -> None:
    """Results of tools can go back to the model after at least one kind of turn, and change nothing before them."""
    calls, plain = parity["assistant calls → tool"], parity["assistant → tool"]
    able = (BoundaryVerdict.AGREES, BoundaryVerdict.KEEPS)
    if calls.verdict in able or (calls.verdict is BoundaryVerdict.REFUSED and plain.verdict in able):
        return
    problem = f"the chat template of {parity.model} cannot take results of tools: {calls.detail}"
    fix = "give a template that can, leave out rollout.multi_turn.tools, or list the token that ends calls in "
    raise ConfigError([Mistake(_TEMPLATE_KEY, problem, fix=f"{fix}generation_config.json")])


def _reads(name: str, text: str) -> bool:
    return any(call.name == "zq_probe" and call.problem is None for call in parser(name).parse(text).calls)
