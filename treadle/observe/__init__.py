"""Observation of a run: counters, live progress, the stall watchdog, metrics, trackers and the summary. No torch.

`treadle.observe.rich_output` draws with rich; it is left out here, as rich is slow to import.
"""

from treadle.observe.progress import FinishedTrajectory, LiveProgress, ReplicaStatus, RolloutCounters
from treadle.observe.summary import Summary, summarize
from treadle.observe.watchdog import StallReport, StallWatchdog, Wait

__all__ = [
    "FinishedTrajectory",
    "LiveProgress",
    "ReplicaStatus",
    "RolloutCounters",
    "StallReport",
    "StallWatchdog",
    "Summary",
    "Wait",
    "summarize",
]
