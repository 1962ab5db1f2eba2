"""This machine: its name, and the GPUs that a process started here would see.

Owns the reading of CUDA_VISIBLE_DEVICES. Looks without importing torch.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from treadle.config import Config, Machine, make_plan
from treadle.config.reward_places import wishes
from treadle.engine.protocol import Gpu
from treadle.types import NOTHING


def this_machine() -> Machine:
    """This computer and the GPUs a process started here would see."""
    return Machine(socket.gethostname(), len(_names()))


def reward_gpus(config: Config) -> Mapping[str, tuple[Gpu, ...]]:
    """The GPUs of each reward model that uses some, where everything runs on this machine."""
    if not any(wishes(config)):
        return NOTHING
    names, rewards = _names(), make_plan(config, [this_machine()]).rewards
    assert rewards is not None, "a plan places every reward model that wants GPUs"
    return {model: tuple(Gpu(gpu, names[gpu]) for gpu in gpus) for model, gpus in rewards.gpus.items()}


def _names() -> list[str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    return [str(at) for at in range(len([number for number in numbers if number.isdigit()]))]
