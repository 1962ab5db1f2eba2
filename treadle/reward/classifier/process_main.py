"""The process of a classifier. Started by `ClassifierProcess`, never by hand.

Loads one model, says so, then scores batch after batch until its channel closes. Owns nothing that lasts: the parent
may kill it at any moment.
Invariant: one answer for each message, as JSON. On a CPU the kernel bounds its memory, on a GPU torch does.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError
from treadle.reward.result import Fault, ScoreFailure, blame_function, encode_failure
from treadle.reward.sandbox.limits import die_with_parent
from treadle.reward.sandbox.protocol import read_frame, write_frame

if TYPE_CHECKING:
    from treadle.reward.classifier.model import ClassifierModel


def main() -> None:
    """Load what the first message names, then score what the others hold."""
    channel, lifeline = int(sys.argv[2]), int(sys.argv[3])
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)
    die_with_parent(lifeline)
    network: list[ClassifierModel] = []
    while (message := read_frame(channel)) is not None:
        act = partial(_score, network[0]) if network else partial(_load, network)
        write_frame(channel, _answer(act, json.loads(message)))


def _answer(act: Callable[[Any], Any], message: Any) -> bytes:
    """What came of a message, or what went wrong with it."""
    try:
        with blame_function(""):
            return json.dumps(act(message)).encode()
    except ScoreFailure as failure:
        if failure.fault is Fault.MEMORY and failure.__cause__ is not None:
            failure = ScoreFailure(Fault.MEMORY, "ran out of memory (memory_mb)")
        return encode_failure(failure)


def _score(network: "ClassifierModel", message: Any) -> dict[str, Any]:
    return {"scores": network.score(message["texts"])}


def _load(network: "list[ClassifierModel]", setup: Any) -> dict[str, Any]:
    """Put the model into `network`, or say what is wrong with its section."""
    import torch

    from treadle.reward.classifier.model import ClassifierModel

    device: str = setup["device"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if device == "cpu":
        most = setup["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    loading = ClassifierModel(setup["path"], device=device, dtype=setup["dtype"])
    index = torch.device(device).index or 0
    if device != "cpu" and index < torch.cuda.device_count():  # one that is not there is refused by `load`
        torch.cuda.set_per_process_memory_fraction(setup["gpu_memory_utilization"], index)
    try:
        loading.load()
    except ConfigError as error:
        return {"mistakes": [[mistake.key, mistake.problem, mistake.fix] for mistake in error.mistakes]}
    network.append(loading)
    return {}
