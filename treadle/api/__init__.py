"""Python interface: `treadle.train` and `treadle.rollout`, as the commands of these names, from a script or a notebook.

Owns the calls and where they run: in this thread, or in one of its own where this one has a running event loop. Each
call is a config (`arguments`) given to the code behind the command of its name, so that the two cannot differ, and a
result (`results`) read from the run directory. `treadle.Policy` is in `research`.
"""

from treadle.api.calls import rollout, rollout_async, sft, sft_async, to_yaml, train, train_async
from treadle.api.results import Evaluation, Run

__all__ = ["Evaluation", "Run", "rollout", "rollout_async", "sft", "sft_async", "to_yaml", "train", "train_async"]
