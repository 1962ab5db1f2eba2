"""Checkpoints: what a run needs to go on as if it had never stopped."""

from treadle.checkpoint.atomic_directory import Damaged
from treadle.checkpoint.links import CheckpointScore
from treadle.checkpoint.store import Checkpoints, Progress, export, latest

__all__ = ["CheckpointScore", "Checkpoints", "Damaged", "Progress", "export", "latest"]
