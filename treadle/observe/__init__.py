"""How a run is watched: counts, live progress, stalled waits and the summary at the end. No torch.

`treadle.observe.table` draws a summary with rich; it is left out here, as rich is slow to import.
"""

from treadle.observe.progress import LiveProgress, ReplicaState
from treadle.observe.stall import StallReport, StallWatch, Wait
from treadle.observe.summary import Summary, summarize
from treadle.observe.tally import Finished, Tally

__all__ = [
    "Finished",
    "LiveProgress",
    "ReplicaState",
    "StallReport",
    "StallWatch",
    "Summary",
    "Tally",
    "Wait",
    "summarize",
]
