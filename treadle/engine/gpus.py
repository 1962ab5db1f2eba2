"""The GPUs that a process started here would see.

Owns the reading of CUDA_VISIBLE_DEVICES. Looks without importing torch: a plan is made before anything is loaded.
"""

import os
from pathlib import Path

from treadle.engine.protocol import Gpu


def visible_gpus() -> tuple[Gpu, ...]:
    """All of them, in the order in which this process counts them."""
    return tuple(Gpu(number, name) for number, name in enumerate(_names()))


def _names() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    return [str(at) for at in range(len([number for number in numbers if number.isdigit()]))]
