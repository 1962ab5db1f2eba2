"""A module that kills the process which imports it, once, where a file says so."""

import os
import signal
from pathlib import Path

from treadle.rollout.tools import tool

_ORDER = Path("die_at_start")

if _ORDER.exists():
    _ORDER.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


@tool(inline=True)
def nothing() -> str:
    """Does nothing."""
    return ""
