"""Rollout: agent loops, sessions, tools and workers behind one manager. Runs without a trainer; imports no torch."""

from treadle.rollout.agent_loop import AgentLoopBase, SingleTurnAgentLoop, ToolAgentLoop
from treadle.rollout.environment import Environment, EnvironmentAgentLoop, Reply
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.protocol import Dropped
from treadle.rollout.service import RolloutKind, RolloutParts
from treadle.rollout.session import Session
from treadle.rollout.worker import AgentLoopWorker

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopWorker",
    "Dropped",
    "Environment",
    "EnvironmentAgentLoop",
    "Reply",
    "RolloutKind",
    "RolloutParts",
    "Session",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
]
