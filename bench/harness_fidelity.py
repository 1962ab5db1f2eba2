"""Harness fidelity: what agents send back, and what three ways to train on it make of that.

    PYTHONPATH=. python bench/harness_fidelity.py [--agents .venv-agents]

Real agents talk to a real gateway; the engine is scripted: call a tool twice, answer. Every request is recorded with
what was sampled for it. Chat templates are those that models ship; each call is spelled as the template itself
writes it, and as a model may (`bench/fidelity_writers.py`). For each agent, template and spelling:

    re-render    every request is rendered by the template: turns whose prompt does not begin with the ids that were
                 shown and sampled before, and so cannot be trained as sampled
    masked       sampled tokens that a trainer loses which re-renders and masks what no longer matches
    ours         sampled turns that are not in the gateway's rows exactly once, behind the ids they were sampled after;
                 and rows of the session
    twice        the first answer is cut off and the agent asks again: requests that repeat an earlier one without a
                 header that says so, which a server that knows retries by header samples again; and turns that ours
                 samples again
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.fidelity_writers import SPELLINGS, ScriptedModel, cells
from tests.gateway_agents import anthropic_sdk, openai_sync
from tests.gateways import RecordingEngine, trained
from tests.rollouts import rollout, task
from treadle.config import ScriptedConfig, load
from treadle.config.rollout import GatewayConfig
from treadle.data.chat_template import CHANNELS
from treadle.data.renderer import Renderer
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import PromptFailure
from treadle.gateway.agent_program import AgentProgram, default_environment, fill, template_values, write_files
from treadle.gateway.conversation import Conversation, Exchange
from treadle.gateway.http_server import ConnectionLost, HttpConnection, HttpRequest
from treadle.gateway.placement import RenderedRequest, fold
from treadle.gateway.request import TurnRequest
from treadle.gateway.server import GatewayServer
from treadle.rollout.parsers import parser
from treadle.rollout.protocol import Services
from treadle.rollout.session import Session
from treadle.rollout.trajectory_builder import SessionRecord
from treadle.types import Message, SamplingParams

EXAMPLES = Path(__file__).parents[1] / "examples"
FRAMEWORKS = {"openai-agents": "openai_agents_sdk", "LangGraph": "langgraph_agent", "smolagents": "smolagents_agent"}
COMMAND_LINE = {"mini-swe-agent": "mini_swe_agent", "Claude Code": "claude_code", "Codex": "codex"}


class Recorded(Conversation):
    """Keeps every exchange."""

    exchanges: list[Exchange]

    def ask(self, request: TurnRequest, rendered: RenderedRequest | None = None) -> Exchange:
        exchange = super().ask(request, rendered)
        self.exchanges.append(exchange)
        return exchange


class CuttingServer(GatewayServer):
    """Cuts the first answer in the middle, and counts requests that repeat another and do not say so in a header."""

    is_cut = True
    num_unmarked = 0

    def __init__(self, gateway: GatewayConfig) -> None:
        super().__init__(gateway)
        self._seen: set[str] = set()

    async def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        if request.method == "POST":
            asked = json.dumps(json.loads(request.body), sort_keys=True)
            is_marked = request.headers.get("x-stainless-retry-count", "0") != "0"
            self.num_unmarked += asked in self._seen and not is_marked
            self._seen.add(asked)
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
    unmarked: int = 0
    """Requests that repeat an earlier one, and no header of theirs says so."""

    def __add__(self, other: "Figures") -> "Figures":
        numbers = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "echoes"}
        return Figures(**numbers)


async def measure(model: ScriptedModel, run: Callable[[str, str], Any], *, cut: bool = False) -> Figures:
    renderer = model.renderer
    engine = RecordingEngine(
        ScriptedEngine.create(
            ScriptedConfig(), name="scripted", encode=renderer.encode, decode=renderer.decode, script=model
        )
    )
    section = rollout(response_length=20_000, max_model_len=100_000)
    services = Services(section, engine, renderer, parser(model.form))
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
    figures.unmarked = server.num_unmarked
    return figures


def summarize(conversation: Recorded, session: Session, engine: RecordingEngine, renderer: Renderer) -> Figures:
    figures = Figures(echoes=", ".join(f"{name} {count}" for name, count in conversation.counters.echoes.items()))
    before: tuple[int, ...] = ()
    mine = 0
    for exchange in conversation.exchanges:
        request, turn = exchange.request, exchange.turns[0]
        calls = conversation._placement.calls_of(request.messages)
        try:
            prompt = renderer.prompt(
                rendered_anew(fold(request.messages, calls, at_start=True)[0], renderer), request.tools
            )
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


def rendered_anew(messages: Sequence[Message], renderer: Renderer) -> list[Message]:
    """Messages as this template takes them: gpt-oss has a key of its own for reasoning."""
    if renderer.reasoning_tags != CHANNELS:
        return list(messages)
    taken = []
    for message in messages:
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        if "reasoning_content" in message and not (message.get("content") and message.get("tool_calls")):
            rest["thinking"] = message["reasoning_content"]
        taken.append(rest)
    return taken


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


COLUMNS = ("agent", "turns come back", "re-render: broken", "masked: tokens lost", "ours: broken", "ours: rows")
TOTALS = (
    *("agent", "re-render: broken, serializer's spelling", "a model's spelling", "masked: tokens lost, serializer's"),
    *(
        "a model's",
        "ours: broken",
        "ours: rows of sessions",
        "sampled twice after a broken connection: by header, ours",
    ),
)


def main(agents: Path | None, only: str) -> None:
    runs = {"openai SDK": function(partial(openai_sync, max_retries=2)), "anthropic SDK": function(anthropic_sdk)}
    if agents is not None:
        runs |= programs(agents.absolute())
    totals, details = [], []
    for name, run in runs.items():
        if only and only != name:
            continue
        sums = {spelling: Figures() for spelling in SPELLINGS}
        for model in cells():
            it = asyncio.run(measure(model, run))
            sums[model.spelling] += it
            words = f"{'reasoning, ' * model.reasons}calls"
            details.append(
                f"| {name} | {model.template}, {words}, {model.spelling} | {it.echoes} | {it.broken} of {it.turns - 1} "
                f"| {it.lost} of {it.sampled} | {it.ours_broken} | {it.rows} |"
            )
            print(details[-1], file=sys.stderr, flush=True)
        first = cells()[0]
        whole, retried = (asyncio.run(measure(first, run, cut=cut)) for cut in (False, True))
        sessions, both = len(cells()), sums["serializer"] + sums["model"]
        cuts = (sums[spelling] for spelling in SPELLINGS)
        broken, lost = zip(
            *((f"{one.broken} of {one.turns - sessions // 2}", f"{one.lost} of {one.sampled}") for one in cuts),
            strict=True,
        )
        totals.append(
            f"| {name} | {' | '.join((*broken, *lost))} | {both.ours_broken} | {both.rows} of {sessions} "
            f"| {retried.unmarked}, {retried.num_sampled - whole.num_sampled} |"
        )
    print(f"| {' | '.join(TOTALS)} |\n|{'---|' * len(TOTALS)}", *totals, sep="\n")
    columns = (COLUMNS[0], "template, model writes, spelling", *COLUMNS[1:])
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", *details, sep="\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="one agent, by name")
    options.add_argument("--agents", type=Path, help="the environment that make test-agents builds")
    main(**vars(options.parse_args()))
