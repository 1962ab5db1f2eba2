"""Kinds of runs under attack: which parts each has, how it is started, and what a machine needs for it."""

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from tests.chaos import FROZEN, FROZEN_RANKS, RANKS, VALIDATED, WORDS, Fault, Part
from treadle.config.sandbox import SandboxConfig
from treadle.rollout.tools import tool
from treadle.rollout.tools.box_tools import BoxTools
from treadle.sandbox.pool import BoxPool
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import choose_provider
from treadle.types import ToolResult

HERE = Path(__file__).parent
SIGNALS = (Fault.KILL, Fault.TERM, Fault.INT, Fault.HUP)
PLAIN_ATTACKS = (
    *((part, fault) for part in (Part.ENGINE, Part.WORKER, Part.REWARD) for fault in SIGNALS),
    *((Part.DRIVER, fault) for fault in Fault if fault is not Fault.STOP),
)
FROZEN_ATTACKS = tuple((part, Fault.STOP) for part in (Part.ENGINE, Part.WORKER, Part.REWARD))
"""Parts that are not ended, and answer nothing: each is replaced after its deadline."""


class BoxCalculator(BoxTools):
    """The calculator in a box of the session's own: one of the tools that come with treadle does the work."""

    pool = BoxPool(BoxSettings.of(SandboxConfig()))

    @tool
    async def calculate(self, expression: str) -> ToolResult:
        """Work out one operation on two whole numbers.

        Args:
            expression: two whole numbers with +, - or * between them, such as 12*7
        """
        wait_s = crc32(expression.encode()) % 16 / 10
        return await self.python(f"import time\ntime.sleep({wait_s})\n{expression}")


def _no_need() -> str:
    return ""


def _need_mcp() -> str:
    return "" if importlib.util.find_spec("mcp") else "the package mcp is not installed"


def _need_box() -> str:
    try:
        asyncio.run(choose_provider(BoxSettings()))
    except Exception as error:  # noqa: BLE001  whatever it is, there is no box here
        return str(error)
    return ""


def _without(words: tuple[str, ...], *starts: str) -> Iterator[str]:
    return (word for word in words if not word.startswith(starts))


def _plain(directory: Path) -> tuple[str, ...]:
    return WORDS


def _validated(directory: Path) -> tuple[str, ...]:
    return VALIDATED


def _ranks(directory: Path) -> tuple[str, ...]:
    return RANKS


def _frozen(directory: Path) -> tuple[str, ...]:
    return FROZEN


def _frozen_ranks(directory: Path) -> tuple[str, ...]:
    return FROZEN_RANKS


def _program(directory: Path) -> tuple[str, ...]:
    argv = json.dumps(["python", str(HERE / "chaos_agent.py"), "{{messages}}"])
    return (
        *_without(WORDS, "rollout.multi_turn.tools="),
        "rollout.multi_turn.tools=[]",
        "rollout.agent.default_agent_loop=program_agent",
        f"rollout.agent.loops.program_agent.kwargs.argv={argv}",
    )


def _mcp(directory: Path) -> tuple[str, ...]:
    command = json.dumps(["python", str(HERE / "chaos_mcp.py")])
    return (
        *_without(WORDS, "rollout.multi_turn.tools="),
        "rollout.multi_turn.tools=[]",
        f"rollout.multi_turn.mcp_servers.calculator.command={command}",
    )


def _mcp_sessions(directory: Path) -> tuple[str, ...]:
    return (*_mcp(directory), "rollout.multi_turn.mcp_servers.calculator.scope=session")


def _classifier(directory: Path) -> tuple[str, ...]:
    """A model with seeded random weights, which is made where it is not there yet."""
    from tests.reward_models import save_classifier

    model = directory / "classifier"
    if not (model / "config.json").exists():
        save_classifier(model)
    return (*WORDS, f"reward.classifiers.style.path={model}", "reward.classifiers.style.weight=0.1")


def _box(directory: Path) -> tuple[str, ...]:
    return (*_without(WORDS, "rollout.multi_turn.tools="), f"rollout.multi_turn.tools={__name__}:BoxCalculator")


@dataclass(frozen=True, slots=True)
class RunKind:
    """One kind of run."""

    name: str
    words: Callable[[Path], tuple[str, ...]]
    """How a run is started; what it needs may be laid into the directory."""
    part: Part | None = None
    """What not every run has. Attacks on it are half of all."""
    missing: Callable[[], str] = _no_need
    """Why this machine cannot have it; empty where it can."""
    faults: tuple[tuple[Part, Fault], ...] = ()
    """All that is done to it, where that is not what is done to the others."""

    def attacks(self) -> list[tuple[Part, Fault]]:
        if self.faults:
            return list(self.faults)
        own = [(self.part, fault) for fault in SIGNALS] if self.part is not None else []
        if self.part is Part.RANK:
            return own
        return [*PLAIN_ATTACKS, *own * 4]


KINDS = {
    kind.name: kind
    for kind in (
        RunKind("plain", _plain),
        RunKind("validated", _validated, Part.VALIDATION),
        RunKind("ranks", _ranks, Part.RANK),
        RunKind("frozen", _frozen, faults=FROZEN_ATTACKS),
        RunKind("frozen-ranks", _frozen_ranks, Part.RANK, faults=((Part.RANK, Fault.STOP),)),
        RunKind("program", _program, Part.PROGRAM),
        RunKind("mcp", _mcp, Part.MCP, _need_mcp),
        RunKind("mcp-sessions", _mcp_sessions, Part.MCP, _need_mcp),
        RunKind("classifier", _classifier, Part.CLASSIFIER),
        RunKind("box", _box, Part.BOX, _need_box),
    )
}
