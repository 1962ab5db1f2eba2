"""GPUs of this machine: those that a process started here would see, and those that a plan gives to each part.

Owns the reading of CUDA_VISIBLE_DEVICES. Looks without importing torch: a plan is made before anything is loaded.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from treadle.config import Config, Machine, Plan, make_plan
from treadle.engine.protocol import Gpu
from treadle.types import NOTHING


def visible_gpus() -> tuple[Gpu, ...]:
    """All of them, in the order in which this process counts them."""
    return tuple(Gpu(number, name) for number, name in enumerate(_names()))


def _names() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    return [str(at) for at in range(len([number for number in numbers if number.isdigit()]))]


def this_machine() -> Machine:
    """This computer and the GPUs a process started here would see."""
    return Machine(socket.gethostname(), len(visible_gpus()))


def plan_here(config: Config) -> Plan:
    """The plan of a run on this machine alone."""
    return make_plan(config, [this_machine()])


def replica_gpus(plan: Plan) -> tuple[tuple[Gpu, ...], ...]:
    """The GPUs of each engine, where everything runs on this machine; none for an engine on a CPU."""
    here = visible_gpus()
    return tuple(tuple(here[gpu] for gpu in gpus) for gpus in plan.replica_gpus())


def reward_gpus(plan: Plan) -> Mapping[str, tuple[Gpu, ...]]:
    """The GPUs of each reward model that uses some, where everything runs on this machine."""
    if plan.rewards is None:
        return NOTHING
    here = visible_gpus()
    return {model: tuple(here[gpu] for gpu in gpus) for model, gpus in plan.rewards.gpus.items()}
