"""Rollout: agent loops, sessions, tools and workers behind one manager. Runs with no trainer; imports no torch."""

from treadle.rollout.agent_loop import AgentLoopBase, SingleTurnAgentLoop, ToolAgentLoop
from treadle.rollout.environment import Environment, EnvironmentAgentLoop, Reply
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import Kind, Parts
from treadle.rollout.session import Session
from treadle.rollout.worker import AgentLoopWorker, Dropped

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopWorker",
    "Dropped",
    "Environment",
    "EnvironmentAgentLoop",
    "Kind",
    "Parts",
    "Reply",
    "Session",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
]
