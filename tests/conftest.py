"""What holds for every test.

Property tests have no clock, and in CI they draw the same examples every time. Ctrl-C can be tested wherever tests run:
a shell has it ignored in what it starts in the background, and children inherit that. oneDNN does without AMX: some
virtual machines announce it and then end the process at its first instruction (docs/troubleshooting.md). Every process
computes with one thread: several run side by side, and small models leave threads nothing to do. What collection has
imported is left alone by the garbage collector, for which it is most of the work.
"""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.loop import Loop

NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("here", **NO_CLOCK)
settings.register_profile("ci", **NO_CLOCK, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    """For engines that outlive a test."""
    made = Loop()
    yield made
    made.close()
