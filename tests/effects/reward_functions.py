"""Reward functions of `tests/effects/reward.py`. Imports little: worker processes load it with little memory."""

import os
import socket
import sys
import time
from typing import Any


def reach(response: str) -> float:
    """1 where it can open a socket, 2 more where it sees a key."""
    try:
        socket.socket().close()
        opened = 1.0
    except PermissionError:
        opened = 0.0
    return opened + 2.0 * ("KEY_OF_A_JUDGE" in os.environ)


def length(response: Any, offset: float = 0.0) -> Any:
    """The length of an answer, or of each where it is given several."""
    return len(response) + offset if isinstance(response, str) else [len(item) + offset for item in response]


def double(response: str) -> float:
    return 2.0 * len(response)


def apart() -> float:
    """Whether its interpreter was started without this one's environment."""
    return float(sys.flags.ignore_environment)


def home(ground_truth: int) -> float:
    """Whether it runs in the process of the tests."""
    return float(os.getpid() == ground_truth)


def allocate() -> float:
    return float(len(bytearray(300 << 20)) > 0)


def spin() -> float:
    """Three tenths of a second of CPU time."""
    began = time.process_time()
    while time.process_time() - began < 0.3:
        pass
    return 1.0
