"""Rollout: agent loops, sessions, tools and workers behind one manager. Runs without a trainer; imports no torch.

The package can be called: `treadle.rollout(...)` is that of `treadle.api`.
"""

import sys
from types import ModuleType
from typing import Any

from treadle.rollout.agent_loop import AgentLoopBase, SingleTurnAgentLoop, ToolAgentLoop
from treadle.rollout.environment import Action, Environment, Opening, Reply, ShortEnvironment, Step
from treadle.rollout.environment_loop import EnvironmentAgentLoop
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.protocol import Dropped
from treadle.rollout.service import RolloutKind, RolloutParts
from treadle.rollout.session import Session
from treadle.rollout.worker import AgentLoopWorker

__all__ = [
    "Action",
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopWorker",
    "Dropped",
    "Environment",
    "EnvironmentAgentLoop",
    "Opening",
    "Reply",
    "RolloutKind",
    "RolloutParts",
    "Session",
    "ShortEnvironment",
    "SingleTurnAgentLoop",
    "Step",
    "ToolAgentLoop",
]


class _CallablePackage(ModuleType):
    def __call__(self, *configs: Any, **arguments: Any) -> Any:
        from treadle.api import rollout

        return rollout(*configs, **arguments)


sys.modules[__name__].__class__ = _CallablePackage
