"""Harness fidelity: what agents send back, and what three ways to train on it make of that.

    PYTHONPATH=. python bench/harness_fidelity.py [--agents .venv-agents]

Real agents talk to a real gateway; the engine is scripted: think, call a tool, answer. Every request is recorded with
what was sampled for it. For each agent and chat template:

    re-render    every request is rendered by the template: the share of turns whose prompt does not begin with the ids
                 that were shown and sampled before, and so cannot be trained as sampled
    masked       sampled tokens that a trainer loses which re-renders and masks what no longer matches
    ours         sampled turns that are not in the gateway's rows exactly once, behind the ids they were sampled after;
                 and rows of the session
    duplicates   the first answer is cut off and the agent asks again: turns that are sampled twice by a server that
                 knows retries by their header, and by ours
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.gateway_agents import anthropic_sdk, openai_sync
from tests.gateways import RecordingEngine, trained
from tests.rollouts import GOLDEN, rollout, save_model, task
from treadle.config import ModelConfig, ScriptedConfig, load
from treadle.config.rollout import GatewayConfig
from treadle.data.renderer import Renderer
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import PromptFailure
from treadle.gateway.agent_program import AgentProgram, default_environment, fill, template_values, write_files
from treadle.gateway.conversation import Conversation, Exchange, RenderedRequest
from treadle.gateway.folding import fold
from treadle.gateway.http_server import ConnectionLost, HttpConnection, HttpRequest
from treadle.gateway.request import TurnRequest
from treadle.gateway.server import GatewayServer
from treadle.rollout.parsers import parser
from treadle.rollout.protocol import Services
from treadle.rollout.session import Session
from treadle.rollout.trajectory_builder import SessionRecord
from treadle.types import Request, SamplingParams

TEMPLATES = {"hermes": "hermes", "qwen3": "hermes"}
"""Chat templates, and the format of their tool calls."""

EXAMPLES = Path(__file__).parents[1] / "examples"
FRAMEWORKS = {"openai-agents": "openai_agents_sdk", "LangGraph": "langgraph_agent", "smolagents": "smolagents_agent"}
COMMAND_LINE = {"mini-swe-agent": "mini_swe_agent", "Claude Code": "claude_code", "Codex": "codex"}
SHELLS = {"Bash": "command", "exec_command": "cmd", "bash": "command"}
"""Shell tools of command-line agents, and the argument that holds the command."""

REASONING = "<think>\nOne and two.\n</think>\n\n"


def script(request: Request, rng: Random, thought: str = "") -> str:
    """A call, twice; then an answer. Spelled as models do: with spaces that no serializer writes."""
    turns = sum(message["role"] == "assistant" for message in request.messages)
    tools = {tool["function"]["name"] for tool in request.tools}
    if "final_answer" in tools:  # smolagents: calls are forced, and the answer is a call
        name, arguments = ("add", '{"a":1,  "b": 2}') if turns < 2 else ("final_answer", '{"answer": "3"}')
        return f'\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    if shell := tools & SHELLS.keys():
        (name,) = shell
        command = "expr 1 + 2" if turns < 2 else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        if turns < 2 or name == "bash":
            arguments = f'{{"{SHELLS[name]}":"{command}"}}'
            return f'{thought}<tool_call>\n{{"name": "{name}",  "arguments": {arguments}}}\n</tool_call>'
    elif turns < 2:
        return f'{thought}<tool_call>\n{{"name": "add",  "arguments": {{"a":1,  "b": 2}}}}\n</tool_call>'
    return f"{thought}It is 3."


class Recorded(Conversation):
    """Keeps every exchange."""

    exchanges: list[Exchange]

    def ask(self, request: TurnRequest, rendered: RenderedRequest | None = None) -> Exchange:
        exchange = super().ask(request, rendered)
        self.exchanges.append(exchange)
        return exchange


class CuttingServer(GatewayServer):
    """Cuts the first answer in the middle, and counts requests that say in a header that they are a retry."""

    is_cut = True
    num_marked = 0

    async def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        self.num_marked += request.headers.get("x-stainless-retry-count", "0") != "0"
        if request.method == "POST" and not self.is_cut:
            self.is_cut = True
            whole = connection.send

            async def cut(*_: Any, **__: Any) -> None:
                connection.send = whole  # type: ignore[method-assign]
                connection.drop()
                raise ConnectionLost

            connection.respond = connection.send = cut  # type: ignore[method-assign]
        await super().handle(request, connection)


@dataclass
class Figures:
    """Of one agent and one template."""

    turns: int = 0
    broken: int = 0
    sampled: int = 0
    lost: int = 0
    rows: int = 0
    ours_broken: int = 0
    echoes: str = ""
    num_sampled: int = 0
    """Turns that the engine sampled."""
    marked: int = 0
    """Requests that say of themselves that they are a retry."""


async def measure(template: str, thought: str, run: Callable[[str, str], Any], *, cut: bool = False) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory))
        text = (GOLDEN / "templates" / f"{template}.jinja").read_text()
        renderer = Renderer.create(ModelConfig(path=model.path, custom_chat_template=text))
    engine = RecordingEngine(
        ScriptedEngine.create(
            ScriptedConfig(),
            name="scripted",
            encode=renderer.encode,
            decode=renderer.decode,
            script=partial(script, thought=thought),
        )
    )
    section = rollout(response_length=20_000, max_model_len=100_000)
    services = Services(section, engine, renderer, parser(TEMPLATES[template]))
    sampling = SamplingParams(20_000, stop_token_ids=renderer.stop_token_ids)
    it = task()
    session = Session(it, 0, services, None, (), sampling, renderer.prompt(it.messages))  # type: ignore[arg-type]
    conversation = Recorded(session, train="all", max_turns=None, retries=0)
    conversation.exchanges = []
    server = CuttingServer(GatewayConfig())
    server.is_cut = not cut
    await server.listen()
    opened = server.open(conversation)
    try:
        await run(server.url, opened.key)
    finally:
        server.close_session(opened)
        await conversation.close()
        await server.close()
    figures = summarize(conversation, session, engine, renderer)
    figures.marked = server.num_marked
    return figures


def summarize(conversation: Recorded, session: Session, engine: RecordingEngine, renderer: Renderer) -> Figures:
    figures = Figures(echoes=", ".join(f"{name} {count}" for name, count in conversation.counters.echoes.items()))
    before: tuple[int, ...] = ()
    mine = 0
    for exchange in conversation.exchanges:
        request, turn = exchange.request, exchange.turns[0]
        calls = conversation._calls_of(request.messages)
        try:
            prompt = renderer.prompt(fold(request.messages, calls, at_start=True)[0], request.tools)
        except PromptFailure:
            prompt = ()
        row = turn.session._row
        start = next(built.start for built in row.turns if built.sampled_end == turn.mark.num_ids)
        figures.turns += 1
        figures.sampled += turn.reply.sampled_tokens
        if before and prompt[: len(before)] != before:
            figures.broken += 1
            figures.lost += mine
            mine = 0
        mine += turn.reply.sampled_tokens
        before = (*(prompt or (*row.prompt_ids, *row.ids[:start])), *row.ids[start : turn.mark.num_ids])
    rows = SessionRecord(session).rows()
    figures.rows = len(rows)
    figures.num_sampled = len(engine.sampled)
    figures.ours_broken = (Counter(engine.sampled) - trained(rows)).total()
    return figures


def function(agent: Callable[..., Any]) -> Callable[[str, str], Any]:
    async def run(url: str, key: str) -> None:
        await asyncio.to_thread(agent, base_url=f"{url}/v1", api_key=key, task=task())

    return run


def program(path: str, kwargs: dict[str, Any]) -> Callable[[str, str], Any]:
    """A program, as `program_agent` would start it."""

    async def run(url: str, key: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            values = template_values(task(), url, key, place)
            write_files(place, {name: fill(text, values) for name, text in kwargs.get("files", {}).items()})
            environment = {**default_environment(url, key, place), "PATH": path, **kwargs.get("env", {})}
            agent = AgentProgram([fill(word, values) for word in kwargs["argv"]], environment, place)
            status = await agent.run()
        if status:
            print(agent.explain(status), file=sys.stderr)

    return run


def programs(agents: Path) -> dict[str, Callable[[str, str], Any]]:
    """Every program that the environment of `make test-agents` has."""
    found = [*agents.glob("lib/python*/site-packages/claude_agent_sdk/_bundled"), agents / "npm/node_modules/.bin"]
    path = os.pathsep.join(map(str, [agents / "bin", *found, "/usr/bin", "/bin"]))
    made = {}
    for name, file in FRAMEWORKS.items():
        made[name] = program(
            path, {"argv": [str(agents / "bin/python"), str(EXAMPLES / f"frameworks/{file}.py"), "Add."]}
        )
    for name, file in COMMAND_LINE.items():
        loops = load(EXAMPLES / "command_line" / f"{file}.yaml").rollout.agent.loops
        made[name] = program(path, dict(loops["program_agent"].kwargs))
    return made


def main(agents: Path | None) -> None:
    runs = {"openai SDK": function(partial(openai_sync, max_retries=2)), "anthropic SDK": function(anthropic_sdk)}
    if agents is not None:
        runs |= programs(agents.absolute())
    columns = ("agent", "model writes", "template", "turns come back", "re-render: broken", "masked: tokens lost")
    columns += ("ours: broken, rows", "duplicates after a retry: by header, ours")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, run in runs.items():
        retried = asyncio.run(measure("hermes", "", run, cut=True))
        for words, thought in (("calls", ""), ("reasoning, calls", REASONING)):
            for template in TEMPLATES:
                it = asyncio.run(measure(template, thought, run))
                print(
                    f"| {name} | {words} | {template} | {it.echoes} | {it.broken} of {it.turns - 1} turns | "
                    f"{it.lost} of {it.sampled} | {it.ours_broken}, {it.rows} | "
                    f"{0 if retried.marked else 1}, {retried.num_sampled - it.num_sampled} |",
                    flush=True,
                )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--agents", type=Path, help="the environment that make test-agents builds")
    main(**vars(options.parse_args()))
