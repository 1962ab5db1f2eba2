"""Checkpoints: what a run needs to go on as if it had never stopped."""

from treadle.checkpoint.export import export
from treadle.checkpoint.manifest import Damaged
from treadle.checkpoint.store import Checkpoints, Progress, latest

__all__ = ["Checkpoints", "Damaged", "Progress", "export", "latest"]
